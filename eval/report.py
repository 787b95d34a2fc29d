"""`eval/report.{json,md,html}`: one JSON with numbers, as `schema.py` describes it, and two renderings of it."""

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
from draftsmith.eval.plots import draw_plots, plot_loss
from draftsmith.eval.schema import Report
from draftsmith.eval.tables import summaries


def write_report(run: RunFolder, config: Config, report: dict[str, Any]) -> None:
    """Write the report's files into `run.eval`.

    Raises:
        ValidationError: the report is not what its schema says (a fault of ours).
    """
    Report.model_validate(report)
    run.eval.mkdir(parents=True, exist_ok=True)
    write_json(run.eval / "report.json", report)
    plots = draw_plots(report, run.eval / "plots")
    loss = run.eval / "plots" / "loss.png"
    if plot_loss(run.metrics, loss):
        plots["Loss in training"] = loss
    environment = template_environment("draftsmith.eval")
    environment.filters["cell"] = lambda text: escape(str(text)).replace("|", "&#124;")
    environment.filters["rates"] = lambda rates: ", ".join(f"{r:.3f}" for r in rates)
    environment.filters["figure"] = _figure
    shared = {"report": report, "name": config.run.name, "config": dump_config(config), **summaries(report)}
    html = environment.get_template("report.html.j2").render(
        **shared,
        plots={k: data_uri(v.read_bytes()) for k, v in plots.items()},
        settings=json.dumps(report["settings"], indent=2),
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


def _figure(value: float | None, places: int = 3) -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None else f"{value:.{places}f}"
