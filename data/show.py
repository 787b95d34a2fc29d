"""`draftsmith data show` and `data stats`: what is in `samples/`, on the terminal."""

from itertools import islice
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from draftsmith.core.atomic import write_atomic
from draftsmith.core.config import Config
from draftsmith.core.errors import UserError
from draftsmith.core.manifest import require_manifest
from draftsmith.core.progress import console, say
from draftsmith.core.run import RunFolder
from draftsmith.core.samples import Sample, iter_samples
from draftsmith.core.target import load_tokenizer, resolve_target
from draftsmith.core.vocabulary import sample_figures
from draftsmith.data.plots import plot_samples

_SUPERVISED = "black on green"


def show(config: Config, row: str | None, ids: bool, count: int) -> None:
    """Print samples with their supervised tokens coloured; where there are no colours, between ⟦ and ⟧.

    Args:
        config: the run's config.
        row: a sample's id, or a conversation's; None: the first ones.
        ids: also print the token ids.
        count: samples to print.

    Raises:
        UserError: there are no samples, or none of that id.
    """
    run = RunFolder.of(config)
    require_manifest(run.samples, "prepare", "data show")
    tokenizer = load_tokenizer(resolve_target(config.target), config.target)
    samples = (s for s in iter_samples(run.samples) if row in (None, s.sample_id, s.conversation_id))
    shown = 0
    for sample in islice(samples, count):
        _print(sample, tokenizer, ids)
        shown += 1
    if not shown:
        raise UserError(f"no sample `{row}` in {run.samples}.", "`data show` without --row prints the first ones' ids.")


def stats(config: Config, plot: Path | None) -> None:
    """Print the figures of every source, and where it is asked for write a plot of them.

    Args:
        config: the run's config.
        plot: PNG file; None: none is written.

    Raises:
        UserError: there are no samples.
    """
    run = RunFolder.of(config)
    figures = sample_figures(run, require_manifest(run.samples, "prepare", "data stats"))
    table = Table(title=f"samples of {config.run.name}", title_justify="left", show_lines=True)
    for column in ("source", "samples", "tokens", "lengths", "replies", "coverage", "shapes, ends", "not used"):
        table.add_column(column, justify="left" if column in ("source", "shapes, ends", "not used") else "right")
    for name, source in figures["sources"].items():
        _add_row(table, name, source)
    if len(figures["sources"]) > 1:
        _add_row(table, "all", {**figures, "samples": sum(figures["counts"].values())})
    console.print(table)
    size = f"{figures['draft_vocab_size']:,} tokens" if "draft_vocab_size" in figures else "`prepare`, not made yet"
    say("lengths and replies: median / 95th percentile / longest, in tokens")
    say(f"coverage: of the training replies, by the draft vocabulary of {size}")
    if plot:
        picture = plot_samples(run.samples, figures)
        write_atomic(plot, lambda tmp: tmp.write_bytes(picture))
        say(f"plot: {plot}")


def _add_row(table: Table, name: str, figures: dict[str, Any]) -> None:
    table.add_row(
        name,
        f"{figures['samples']:,}",
        f"{figures['tokens']:,}",
        _lengths(figures["lengths"]),
        f"{figures['reply_tokens']:,}\n{_lengths(figures['reply_lengths'])}",
        f"{figures['coverage_train']:.1%}" if "coverage_train" in figures else "-",
        _counted(figures["shapes"], figures["finish_reasons"]),
        _counted(figures["skipped"], figures["removed"]),
    )


def _lengths(lengths: dict[str, int]) -> str:
    return " / ".join(str(lengths[key]) for key in ("p50", "p95", "max"))


def _counted(*counts: dict[str, int]) -> str:
    return "\n".join(f"{n:,} {what}" for group in counts for what, n in group.items())


def _print(sample: Sample, tokenizer: Any, ids: bool) -> None:
    text = Text()
    for supervised, part in sample.segments:
        said = tokenizer.decode(part)
        if not console.is_terminal and supervised:
            said = f"⟦{said}⟧"
        text.append(said, style=_SUPERVISED if supervised else "dim")
        if ids:
            text.append(f"\n{part}\n", style="cyan" if supervised else "dim cyan")
    console.rule(f"{sample.sample_id}", align="left")
    replies = sum(b - a for a, b in sample.loss_spans)
    console.print(
        f"{sample.source}, {sample.split}, {len(sample.input_ids)} tokens, {replies} supervised, "
        f"finish reason {sample.finish_reason}, replies by {sample.author}",
        markup=False,
    )
    console.print(text)
