"""The last thing `make demo` prints: what the run made, and what it reached."""

import json
from typing import Any

from rich.table import Table

from draftsmith.core.config import Config
from draftsmith.core.errors import UserError
from draftsmith.core.manifest import read_manifest
from draftsmith.core.progress import console, say
from draftsmith.core.run import RunFolder


def print_summary(config: Config) -> None:
    """Print one line a finished stage and the table of served acceptance.

    Raises:
        UserError: the run does not exist.
    """
    run = RunFolder.of(config)
    if not run.root.is_dir():
        raise UserError(f"{run.root}: no such run.", "Run `make prepare` or `make demo` first.")
    made = {
        "samples": f"{run.samples}" if read_manifest(run.samples) else None,
        "hidden states": f"{run.hidden_states}" if read_manifest(run.hidden_states) else None,
        "checkpoint": f"{done[-1]}" if (done := run.complete_checkpoints()) else None,
        "export": f"{run.export}" if read_manifest(run.export) else None,
        "report": f"{run.eval}/report.html" if read_manifest(run.eval) else None,
    }
    stages = Table(title=f"run {config.run.name}", title_justify="left", show_header=False)
    for name, where in made.items():
        stages.add_row(name, where or "not made yet")
    console.print(stages)
    report_file = run.eval / "report.json"
    if made["report"] and report_file.is_file():
        report = json.loads(report_file.read_text(encoding="utf-8"))
        console.print(_acceptance_table(report))
        say(f"serve it: vllm serve {config.target.path} --speculative-config '{_spec(run, config)}'")


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
    replayed = {row["k"]: row["acceptance_length"] for row in report["replay"]}
    for row in report["served"]:
        same = row["set"] == "held_out" and row["temperature"] == 0
        table.add_row(
            str(row["set"]),
            str(row["k"]),
            f"{row['temperature']:g}",
            str(row["concurrency"]),
            f"{row['acceptance_length']:.3f}",
            f"{replayed[row['k']]:.3f}" if same and row["k"] in replayed else "",
            f"{row['tokens_per_second']:.1f}",
            f"{row['baseline_tokens_per_second']:.1f}",
            f"{row['speedup']:.2f}",
        )
    return table


def _spec(run: RunFolder, config: Config) -> str:
    spec = {"method": "eagle3", "model": str(run.export), "num_speculative_tokens": config.eval.k[0]}
    return json.dumps(spec)
