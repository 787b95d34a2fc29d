"""The last thing `make demo` prints: what the run made, and what it reached."""

import json
from pathlib import Path
from typing import Any

from rich.table import Table

from draftsmith.core.commands import with_config
from draftsmith.core.config import Config
from draftsmith.core.errors import UserError
from draftsmith.core.lineage import earlier_draft
from draftsmith.core.manifest import manifest_hash, read_manifest
from draftsmith.core.progress import console, say
from draftsmith.core.run import RunFolder

_MOST_ROWS = 24
_STALE = ", of an earlier draft"


def print_summary(config: Config) -> None:
    """Print one line a finished stage and the table of served acceptance.

    Raises:
        UserError: the run does not exist.
    """
    run = RunFolder.of(config)
    if not run.root.is_dir():
        raise UserError(f"{run.root}: no such run.", "Run `make prepare` or `make demo` first.")
    made, current = _made(run)
    stages = Table(title=f"run {config.run.name}", title_justify="left", show_header=False)
    for name, where in made.items():
        stages.add_row(name, where)
    console.print(stages)
    for name, stage in (("export", "export"), ("report", "eval")):
        if made[name].endswith(_STALE):  # below the table, which would break the command
            say(with_config(f"the {name} is of an earlier draft: `make {stage} ARGS=--fresh`"))
    if current:
        report = json.loads((run.eval / "report.json").read_text(encoding="utf-8"))
        console.print(_acceptance_table(report))
        for remark in report.get("remarks", []):
            say(f"remark: {remark}")
        spec = {"method": "eagle3", "model": str(run.export), "num_speculative_tokens": config.eval.k[0]}
        local = report["settings"]["target"]["local_path"]
        say(f"serve it (GPU build of vLLM): vllm serve {local} --speculative-config '{json.dumps(spec)}'")


def _made(run: RunFolder) -> tuple[dict[str, str], bool]:
    """Each stage's output, or that it is missing or of an earlier draft; and whether the report is of the draft."""
    checkpoints, export, report = run.complete_checkpoints(), read_manifest(run.export), read_manifest(run.eval)
    newest = checkpoints[-1].name if checkpoints else None
    export_fits = export is not None and newest is not None and earlier_draft(run.export) is None
    of = report["inputs"]["export_manifest_sha256"] if report else None
    report_fits = export_fits and of == manifest_hash(run.export)

    def said(there: object, where: Path, fits: bool) -> str:
        return "not made yet" if not there else str(where) if fits else f"{where}{_STALE}"

    return {
        "samples": said(read_manifest(run.samples), run.samples, True),
        "hidden states": said(read_manifest(run.hidden_states), run.hidden_states, True),
        "checkpoint": said(newest, run.checkpoints / str(newest), True),
        "export": said(export, run.export, export_fits),
        "report": said(report, run.eval / "report.html", report_fits),
    }, report_fits


def _acceptance_table(report: dict[str, Any]) -> Table:
    table = Table(title="acceptance length (1 is no gain, K + 1 the most)", title_justify="left")
    for column in (
        "set",
        "K",
        "T",
        "in flight",
        "served",
        "replayed",
        "tokens/s",
        "without draft",
        "speed-up",
    ):
        table.add_column(column, justify="left" if column == "set" else "right")
    replayed = {(r["k"], r["temperature"]): r["acceptance_length"] for r in report["replay"]}
    rows = report["served"]
    if len(rows) > _MOST_ROWS:  # a sweep: the first temperature and concurrency, and the report has the others
        first = (rows[0]["temperature"], rows[0]["concurrency"])
        rows = [r for r in rows if (r["temperature"], r["concurrency"]) == first]
        table.caption = f"{len(rows)} of {len(report['served'])} measured passes; the report has all of them"
    for row in rows:
        predicted = replayed.get((row["k"], row["temperature"])) if row["set"] == "held_out" else None
        table.add_row(
            str(row["set"]),
            str(row["k"]),
            f"{row['temperature']:g}",
            str(row["concurrency"]),
            f"{row['acceptance_length']:.3f}",
            "" if predicted is None else f"{predicted:.3f}",
            f"{row['tokens_per_second']:.1f}",
            _or_dash(row["baseline_tokens_per_second"], 1),
            _or_dash(row["speedup"], 2),
        )
    return table


def _or_dash(value: float | None, places: int) -> str:
    return "-" if value is None else f"{value:.{places}f}"
