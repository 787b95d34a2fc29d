"""`draftsmith plan`: what a run will need, and what does not fit, before anything runs."""

import json
import math
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from draftsmith.core.cli_spool import spool_refusal
from draftsmith.core.config import Config
from draftsmith.core.config_io import load_config
from draftsmith.core.errors import UserError
from draftsmith.core.estimate import Amount, amount_of, stated
from draftsmith.core.named import check_paths
from draftsmith.core.plan import make_plan, target_shape
from draftsmith.core.plan_hours import Rates, captures_while_training
from draftsmith.core.plan_memory import GB
from draftsmith.core.progress import console, say
from draftsmith.core.run import RunFolder
from draftsmith.core.target import Target


def _finite(value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number.")
    return value


def _number(about: str) -> Any:
    return typer.Option(min=1, callback=_finite, help=about)


Rate = Annotated[
    float | None,
    _number("Tokens/s of all GPUs together; else as measured on H200s."),
]


def plan(
    config: Annotated[Path, typer.Option("--config", "-c", help="YAML config of the run.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, over the config file.")] = None,
    gpu: Annotated[
        str | None, typer.Option("--gpu", help="What the hours are for, e.g. H100; else this machine's, or an H200.")
    ] = None,
    reply_rate: Annotated[
        float | None,
        _number("Reply tokens/s of `prepare`; else estimated, which nothing measured."),
    ] = None,
    capture_rate: Rate = None,
    train_rate: Rate = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs that train; else this machine's.")] = None,
    gpu_memory: Annotated[float | None, _number("GB of each; else of --gpu.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of all samples, instead of counting them.")] = None,
    length: Annotated[
        float | None,
        _number("With --tokens: mean tokens of a sample; else 1000, or data.max_length."),
    ] = None,
    supervised: Annotated[
        float | None, typer.Option(min=0, max=1, help="With --tokens: share of reply tokens; else 0.6.")
    ] = None,
    target_config: Annotated[
        Path | None, typer.Option(help="The target's config.json, or its folder, where the target is not here.")
    ] = None,
    max_hours: Annotated[float, typer.Option(min=0, help="A run that takes longer does not fit.")] = 720.0,
    brief: Annotated[
        bool,
        typer.Option(
            "--brief", help="Print the few lines that recipes carry in their head; on stderr what this machine lacks."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tokens, bytes, hours and memory of a run before anything runs; exit code 1 where something does not fit."""
    if tokens is None and not (length is None and supervised is None):
        raise UserError(
            "--length and --supervised describe samples that --tokens says the number of tokens of.",
            "Say --tokens, too, or leave them out: the samples, or their sources, are counted then.",
        )
    loaded = load_config(config, overrides)
    check_paths(loaded, target=target_config is None, sources=tokens is None)
    amount = _stated(loaded, tokens, length, supervised) if tokens else amount_of(loaded, RunFolder.of(loaded))
    gpu_bytes = None if gpu_memory is None else gpu_memory * GB
    rates = Rates(capture_rate, train_rate, gpus, gpu_bytes, reply_rate, gpu, max_hours)
    target = target_shape(loaded.target, target_config)
    made = make_plan(loaded, amount, rates, target)
    made["problems"] += _spool_problem(loaded, amount, target, made)
    if as_json:
        print(json.dumps(made, indent=2))
    elif brief:
        here = [p for p in made["problems"] if _of_this_machine(p["what"])]
        fits_anywhere = {**made, "problems": [p for p in made["problems"] if p not in here]}
        print("\n".join(brief_lines(loaded, fits_anywhere)))
        for problem in here:  # recipes carry what is printed, and are for other machines than this
            print(f"does not fit here: {problem['what']} {problem['mend']}", file=sys.stderr)
    else:
        _show(loaded, made)
    raise typer.Exit(1 if made["problems"] else 0)


def _stated(config: Config, tokens: int, length: float | None, supervised: float | None) -> Amount:
    longest = config.data.max_length
    if length is not None and length > longest:
        raise UserError(
            f"--length is {length:,.0f}, and no sample is longer than data.max_length ({longest:,}).",
            "Lower it, or raise data.max_length.",
        )
    return stated(config, tokens, length or min(1000, longest), 0.6 if supervised is None else supervised)


def _spool_problem(config: Config, amount: Amount, target: Target, made: dict[str, Any]) -> list[dict[str, str]]:
    """By the samples' own sizes, where they are there and not stated otherwise."""
    if not amount.prepared:
        return []
    run, layers = RunFolder.of(config), made["draft"]["layer_ids"]
    found = spool_refusal(config, run, target, layers, made["gpu"]["count"])
    return [{"what": found.what, "mend": found.mend}] if found else []


def brief_lines(config: Config, made: dict[str, Any]) -> list[str]:
    """The plan in a few lines; of `problems` all that `made` has."""
    draft, disk, hours, gpu = (made[key] for key in ("draft", "disk", "hours", "gpu"))
    states, used, count = disk["states"], sum(gpu["training"].values()), gpu["count"]
    spool = captures_while_training(config)
    stages = ", ".join(f"{s} {hours[s]:,.1f}" for s in ("prepare", "capture", "train"))
    kept = f"all states would be {_size(states['bf16'])} in bf16, {_size(states['fp8'])} in fp8"
    return [
        f"draft: {draft['parameters']:,} parameters on auxiliary layers {draft['layer_ids']}",
        f"disk: {_size(disk['states_needed'] + disk['checkpoints'])}, checkpoints included ({kept})",
        f"hours on {gpu['name']}s: {stages} ({'the last two at once' if spool else 'one after another'}), "
        f"{hours['all']:,.1f} in all",
        f"memory: {_size(used)} on {f'each of {count} GPUs that train' if count > 1 else 'the GPU that trains'}",
        *(f"does not fit: {p['what']} {p['mend']}" for p in made["problems"]),
    ]


def _of_this_machine(what: str) -> bool:
    return "are free" in what or "this machine has" in what


def _show(config: Config, made: dict[str, Any]) -> None:
    amount, target, disk, hours, gpu = (made[k] for k in ("amount", "target", "disk", "hours", "gpu"))
    storage, spool = config.capture.storage, captures_while_training(config)
    table = Table(title=f"plan of run {config.run.name}", title_justify="left", show_header=False)
    used = sum(gpu["training"].values())
    stages = [s for s in ("prepare", "capture", "train") if hours[f"{s}_tokens"]]
    rows = [
        ("samples", f"{amount['samples']:,}", amount["how"]),
        ("tokens", f"{amount['tokens']:,}", f"{amount['reply_tokens']:,} of them reply tokens"),
        ("target", f"{target['parameters'] / 1e9:,.2f} B", f"{_size(target['bytes'])} of weights"),
        ("draft", f"{made['draft']['parameters'] / 1e6:,.1f} M", f"auxiliary layers {made['draft']['layer_ids']}"),
        *((f"states in {kind}", _size(size), "as configured" if kind == storage else "")
          for kind, size in disk["states"].items()),
        ("disk", _size(disk["needed"]), f"to be written in {disk['folder']}, {_size(disk['free'])} free"),
        ("GPU", gpu["name"], f"{gpu['count']} train; {gpu['of']}"),
        *((stage, f"{hours[stage]:,.2f} h", f"{hours[f'{stage}_tokens']:,} tokens at {hours[f'{stage}_rate']:,.0f} a "
           f"second, {hours[f'{stage}_rate_of']}") for stage in stages),
        ("capture, train", f"{hours['together']:,.2f} h", "at once" if spool else "one after the other"),
        ("in all", f"{hours['all']:,.2f} h", f"on {gpu['name']}s; evaluation and export, minutes, beside it"),
        ("GPU memory", _size(used), f"of {_size(gpu['bytes'])}; {gpu['count']} train, each with:"),
        *(("", _size(size), part) for part, size in gpu["training"].items()),
        ("host memory", _size(made["host"]["capture_bytes"]), f"while capturing, of {_size(made['host']['bytes'])}"),
    ]  # fmt: skip
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)
    for problem in made["problems"]:
        console.print(f"[red]does not fit[/]: {escape(problem['what'])} {escape(problem['mend'])}")
    if not made["problems"]:
        say("all of it fits")


def _size(count: float) -> str:
    return f"{count / 1e12:,.2f} TB" if count >= 1e12 else f"{count / GB:,.2f} GB"
