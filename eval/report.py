"""`eval/report.{json,md,html}`: one JSON with numbers, and two renderings of it.

`report.json`:
    replay:    [{k, temperature, acceptance_length, ci95 [low, high], per_position, rounds, samples, exact}]
    served:    [{set, k, temperature, concurrency, prompts, acceptance_length, per_position, drafts, accepted, tokens,
                tokens_per_second, baseline_tokens_per_second, speedup, identical_replies}]
    objective: {checkpoint, loss, loss_per_step, supervised_rows_per_step, accuracy_per_step}, held-out samples
    settings, versions: what it takes to get the same figures again
Rates are unconditional: accepted at position i / rounds. Acceptance length counts the bonus token.
"""

import json
from html import escape
from pathlib import Path
from typing import Any

from draftsmith.core.atomic import write_json, write_text
from draftsmith.core.config import Config
from draftsmith.core.config_io import dump_config
from draftsmith.core.errors import UserError
from draftsmith.core.pages import data_uri, template_environment
from draftsmith.core.run import RunFolder
from draftsmith.eval.plots import plot_loss, plot_positions


def write_report(run: RunFolder, config: Config, report: dict[str, Any]) -> None:
    """Write the report's files into `run.eval`."""
    run.eval.mkdir(parents=True, exist_ok=True)
    write_json(run.eval / "report.json", report)
    plots = {}
    loss, positions = run.eval / "plots" / "loss.png", run.eval / "plots" / "acceptance_by_position.png"
    if plot_loss(run.metrics, loss):
        plots["Loss"] = loss
    plot_positions(report, positions)
    plots["Acceptance by position"] = positions
    environment = template_environment("draftsmith.eval")
    environment.filters["cell"] = lambda text: escape(str(text)).replace("|", "&#124;")
    environment.filters["rates"] = lambda rates: ", ".join(f"{r:.3f}" for r in rates)
    shared = {"report": report, "name": config.run.name, "config": dump_config(config)}
    html = environment.get_template("report.html.j2").render(
        **shared,
        plots={k: data_uri(v.read_bytes()) for k, v in plots.items()},
        versions=json.dumps(report["versions"], indent=2),
    )
    markdown = (
        environment.overlay(autoescape=False)
        .get_template("report.md.j2")
        .render(**shared, plots={k: v.relative_to(run.eval) for k, v in plots.items()})
    )
    write_text(run.eval / "report.html", html)
    write_text(run.eval / "report.md", markdown)


def read_report(folder: Path) -> dict[str, Any]:
    """Read `report.json`.

    Raises:
        UserError: there is none.
    """
    path = folder / "report.json"
    if not path.is_file():
        raise UserError(f"{path}: no report.", "Run `draftsmith eval` first.")
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return report
