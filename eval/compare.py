"""`draftsmith eval compare A B ...`: drafts of one target on the same prompts, with paired intervals.

Replay needs the states that a draft reads: a draft of other layers than the captured ones is served only. A difference
is of B, C, ... to the first draft; its interval is of resampled conversations, the same ones for both.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table as RichTable

from draftsmith.core.atomic import sha256_file, write_json, write_text
from draftsmith.core.commands import with_config
from draftsmith.core.config import Config
from draftsmith.core.draft_folder import DraftFolder, read_draft_folder
from draftsmith.core.engine import require_vllm
from draftsmith.core.errors import UserError
from draftsmith.core.lineage import earlier_draft
from draftsmith.core.manifest import package_versions
from draftsmith.core.progress import console, say
from draftsmith.core.replay import Table, bootstrap_lengths, conversation_of, interval, table_figures
from draftsmith.core.run import RunFolder
from draftsmith.core.target import Target, resolve_target
from draftsmith.eval.columns import captured_for, check_fits
from draftsmith.eval.offline import Replay, release_memory, replay
from draftsmith.eval.prompts import PromptSets
from draftsmith.eval.rows import served_row
from draftsmith.eval.sweep import Measured, Variant, serve
from draftsmith.hidden_state_capture.reader import HiddenStateStore


@dataclass(frozen=True)
class Contender:
    """One draft: a short name of its own, where it lies, and what it holds."""

    name: str
    folder: Path
    draft: DraftFolder


def compare(config: Config, folders: Sequence[Path], served: bool, out: Path | None) -> None:
    """Compare drafts, print a table, and write JSON and Markdown.

    Args:
        config: a run of the same target, with captured held-out samples.
        folders: drafts; the first is what the others are compared with.
        served: serve them on vLLM too.
        out: the JSON file; None: `eval/compare.json` in the run.

    Raises:
        UserError: a folder is no draft of this target, or none can be replayed and none is served.
        StageFailed: an engine died.
    """
    if len(folders) < 2:
        raise UserError("one draft alone cannot be compared.", "Name two folders or more.")
    run, target = RunFolder.of(config), resolve_target(config.target)
    contenders = _read(folders, target)
    _warn_of_earlier(run, contenders)
    store = HiddenStateStore(run.hidden_states, "eval compare")
    sets = None
    if served:
        require_vllm("eval compare --serve")
        sets = PromptSets(config, target)
    replays = {c.name: r for c in contenders if (r := _replayed(config, target, store, c)) is not None}
    if not served and len(replays) < 2:
        raise UserError(
            "fewer than two of the drafts read the captured layers.", "Add --serve, or capture their layers in a run."
        )
    rows = _replay_rows(config, contenders, replays)
    release_memory()
    if sets:
        variants = [Variant(c.folder, k) for c in contenders for k in config.eval.k]
        rows += _served_rows(config, contenders, serve(config, target, sets, variants))
    result = {
        "base": contenders[0].name,
        "drafts": [_described(c, c.name in replays) for c in contenders],
        "rows": rows,
        "settings": {"config": config.model_dump(mode="json"), "prefix_caching": False},
        "versions": package_versions(),
    }
    path = out or run.eval / "compare.json"
    write_json(path, result)
    write_text(path.with_suffix(".md"), _markdown(result))
    _print(result)
    say(f"comparison: {path}")


def _read(folders: Sequence[Path], target: Target) -> list[Contender]:
    found: list[Contender] = []
    for folder in folders:
        draft = read_draft_folder(folder, target)
        check_fits(folder, draft, target)
        name, taken = folder.resolve().name, {c.name for c in found}
        if name in taken or name == "export":
            name = "/".join(folder.resolve().parts[-2:])
        found.append(Contender(name if name not in taken else f"{name}-{len(found)}", folder, draft))
    return found


def _warn_of_earlier(run: RunFolder, contenders: list[Contender]) -> None:
    """An export that the run was trained on after is compared all the same, for that may be meant."""
    for c in contenders:
        if why := earlier_draft(c.folder):
            ours = c.folder.resolve() == run.export.resolve()
            mend = "`draftsmith export --fresh` exports the one that is trained" if ours else "export it again"
            say(with_config(f"warning: {c.folder} is of an earlier draft ({why}); {mend}"))


def _replayed(config: Config, target: Target, store: HiddenStateStore, contender: Contender) -> Replay | None:
    batches = captured_for(config, store, contender.name, contender.draft)
    if batches is None:
        return None
    say(f"{contender.name}:")
    return replay(config, target, contender.draft, store.manifest["last_state"]["norm_form"], batches)


def _replay_rows(config: Config, contenders: list[Contender], replays: dict[str, Replay]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    if not replays:
        return rows
    first = next(iter(replays.values()))
    groups = [conversation_of(i) for i in first.sample_ids]
    names = [c.name for c in contenders if c.name in replays]
    for k, temperature in first.tables:
        tables = [replays[name].tables[k, temperature] for name in names]
        paired = _paired(config, groups, tables)
        for name, table, figures in zip(names, tables, paired, strict=True):
            rows.append(
                {"kind": "replay", "draft": name, "set": "held_out", "k": k, "temperature": temperature,
                 "concurrency": None, **table_figures(table), **figures}
            )  # fmt: skip
    return rows


def _served_rows(config: Config, contenders: list[Contender], measured: list[Measured]) -> list[dict[str, Any]]:
    names = {c.folder: c.name for c in contenders}
    cells: dict[tuple[Any, ...], list[Measured]] = {}
    for m in measured:
        cells.setdefault((m.job.set, m.variant.k, m.job.temperature, m.job.concurrency), []).append(m)
    rows = []
    for cell in cells.values():
        groups = [conversation_of(p.id) for p in cell[0].job.prompts]
        paired = _paired(config, groups, [m.done.table for m in cell])
        for m, figures in zip(cell, paired, strict=True):
            assert m.variant.draft is not None
            row = served_row(config, m)
            rows.append({"kind": "served", "draft": names[m.variant.draft], **row, "rounds": row["drafts"], **figures})
    return rows


def _paired(config: Config, groups: list[str], tables: list[Table]) -> list[dict[str, Any]]:
    """Interval of every table's acceptance length, and of its difference to the first one's."""
    draws = bootstrap_lengths(groups, tables, config.eval.bootstrap, config.run.seed)
    lengths = [float(str(table_figures(t)["acceptance_length"])) for t in tables]
    return [
        {
            "ci95": interval(draws[:, i]),
            "difference": length - lengths[0] if i else None,
            "difference_ci95": interval(draws[:, i] - draws[:, 0]) if i else None,
            "better": None if not i else _better(draws[:, i] - draws[:, 0]),
        }
        for i, length in enumerate(lengths)
    ]


def _better(differences: np.ndarray) -> bool | None:
    """Whether the whole interval is above zero (true) or below it (false)."""
    low, high = interval(differences)
    return True if low > 0 else False if high < 0 else None


def _described(contender: Contender, replayed: bool) -> dict[str, Any]:
    weights = sorted(contender.folder.glob("*.safetensors"))
    return {
        "name": contender.name,
        "folder": str(contender.folder),
        "layer_ids": contender.draft.layer_ids,
        "shape": contender.draft.shape.to_dict(),
        "weights_sha256": {f.name: sha256_file(f) for f in weights},
        "config_sha256": sha256_file(contender.folder / "config.json"),
        "replayed": replayed,
    }


_COLUMNS = (
    "", "set", "K", "T", "in flight", "draft", "acceptance length", "95 % interval", "difference", "its interval",
    "verdict",
)  # fmt: skip


def _cells(row: dict[str, Any]) -> list[str]:
    def span(values: list[float] | None) -> str:
        return "" if values is None else f"{values[0]:.3f} to {values[1]:.3f}"

    verdict = (
        "" if row["difference"] is None else {True: "better", False: "worse", None: "no difference"}[row["better"]]
    )
    return [
        row["kind"], row["set"], str(row["k"]), f"{row['temperature']:g}", str(row["concurrency"] or ""), row["draft"],
        f"{row['acceptance_length']:.3f}", span(row["ci95"]),
        "" if row["difference"] is None else f"{row['difference']:+.3f}", span(row["difference_ci95"]), verdict,
    ]  # fmt: skip


def _print(result: dict[str, Any]) -> None:
    table = RichTable(title=f"acceptance length; differences are to {result['base']}", title_justify="left")
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column in ("", "set", "draft", "verdict") else "right")
    for row in result["rows"]:
        table.add_row(*_cells(row))
    console.print(table)


def _markdown(result: dict[str, Any]) -> str:
    lines = [f"# Drafts compared; differences are to `{result['base']}`", ""]
    lines += ["| " + " | ".join(_COLUMNS) + " |", "|" + "---|" * len(_COLUMNS)]
    lines += ["| " + " | ".join(c.replace("|", "&#124;") for c in _cells(row)) + " |" for row in result["rows"]]
    lines += ["", "Settings, hashes and versions are in the JSON beside this file.", ""]
    return "\n".join(lines) + json.dumps({d["name"]: d["folder"] for d in result["drafts"]}, indent=2) + "\n"
