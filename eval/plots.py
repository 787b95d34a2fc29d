"""The report's plots, as files and for embedding."""

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from draftsmith.eval.tables import summaries

_REPLAYED, _SERVED = "#4269d0", "#ff725c"
_COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#a463f2", "#9c6b4e", "#97bbf5")
_MANY_SETS = 8


def draw_plots(report: dict[str, Any], folder: Path) -> dict[str, Path]:
    """Every plot that the report has figures for, by title."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {
        "Acceptance by position": (plot_positions, "acceptance_by_position.png"),
        "Replay against served": (plot_agreement, "replay_against_served.png"),
        "Acceptance length by set": (plot_sets, "acceptance_by_set.png"),
        "Speed-up by concurrency": (plot_speedup, "speedup_by_concurrency.png"),
    }
    return {title: folder / file for title, (plot, file) in drawn.items() if plot(report, folder / file)}


def plot_positions(report: dict[str, Any], file: Path) -> bool:
    """Share of rounds whose i-th draft was accepted: replayed beside served, at temperature 0 and the largest K."""
    served = [r for r in report["served"] if r["temperature"] == min(s["temperature"] for s in report["served"])]
    ks = [r["k"] for r in served] or [r["k"] for r in report["replay"]]
    if not ks:
        return False
    k = max(ks)
    figure, axes = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
    positions = list(range(1, k + 1))
    for row in [r for r in report["replay"] if r["k"] == k][:1]:
        axes.plot(positions, row["per_position"], "o-", color=_REPLAYED, label="replay, held out", zorder=3)
    rows = [r for r in served if r["k"] == k]
    for i, name in enumerate(dict.fromkeys(r["set"] for r in rows)):
        mine = [r for r in rows if r["set"] == name]
        rates = np.average([r["per_position"] for r in mine], axis=0, weights=[max(1, r["drafts"]) for r in mine])
        others = [c for c in _COLOURS if c not in (_REPLAYED, _SERVED)]
        colour = _SERVED if name == "held_out" else others[i % len(others)]
        axes.plot(positions, rates, "s--", color=colour, label=f"served, {_text(name)}", ms=4, zorder=4)
    axes.set(xlabel="drafted position", ylabel="share of rounds accepted", ylim=(0, 1), title=f"K = {k}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _finish(figure, axes, file)
    return True


def plot_agreement(report: dict[str, Any], file: Path) -> bool:
    """Served over replayed acceptance length on the held-out samples, with the bound that is diagnosed."""
    rows = report["agreement"]
    if not rows:
        return False
    figure, axes = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
    ends = [min(min(r["replayed"], r["served"]) for r in rows), max(max(r["replayed"], r["served"]) for r in rows)]
    line = np.array([ends[0] - 0.05, ends[1] + 0.05])
    axes.plot(line, line, color="#59636e", lw=1)
    axes.fill_between(line, 0.98 * line, 1.02 * line, color="#59636e", alpha=0.12, lw=0, label="within 2 %")
    for i, temperature in enumerate(dict.fromkeys(r["temperature"] for r in rows)):
        mine = [r for r in rows if r["temperature"] == temperature]
        label = f"T = {temperature:g} ({mine[0]['method']})"
        axes.plot([r["replayed"] for r in mine], [r["served"] for r in mine], "o", color=_COLOURS[i], label=label)
        for r in mine:
            axes.annotate(
                f"K = {r['k']}", (r["replayed"], r["served"]), (6, -9), textcoords="offset points", fontsize=8
            )
    axes.set(xlabel="replayed acceptance length", ylabel="served", title="One point a K, temperature and concurrency")
    _finish(figure, axes, file)
    return True


def plot_sets(report: dict[str, Any], file: Path) -> bool:
    """Acceptance length by set, a bar for every K and temperature."""
    tables = summaries(report)
    if not tables["by_set"]:
        return False
    _bars(
        [str(name) for name, _ in tables["by_set"]],
        [(_column(c), [row[i] for _, row in tables["by_set"]]) for i, c in enumerate(tables["columns"])],
        "acceptance length",
        file,
    )
    return True


def plot_speedup(report: dict[str, Any], file: Path) -> bool:
    """Speed-up over the target alone by requests in flight, the sets' geometric mean."""
    tables = summaries(report)
    if not any(value for _, row in tables["by_concurrency"] for value in row):
        return False
    _bars(
        [str(n) for n, _ in tables["by_concurrency"]],
        [(_column(c), [row[i] for _, row in tables["by_concurrency"]]) for i, c in enumerate(tables["columns"])],
        "speed-up over the target alone",
        file,
        "requests in flight",
    )
    return True


def plot_loss(metrics: Path, file: Path) -> bool:
    """Training and held-out loss of every step over optimizer steps; False where nothing was logged."""
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()] if metrics.is_file() else []
    trained = [(r["step"], r["loss_per_step"]) for r in rows if "loss_per_step" in r]
    held_out = [(r["step"], r["eval_loss_per_step"]) for r in rows if "eval_loss_per_step" in r]
    if not trained:
        return False
    figure, axes = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
    for j in range(len(trained[0][1])):
        shade = 1.0 - 0.8 * j / max(1, len(trained[0][1]))
        line = {"color": _REPLAYED, "alpha": shade, "label": f"step {j + 1}"}
        axes.plot([s for s, _ in trained], [v[j] for _, v in trained], **line)
        if held_out:
            axes.plot([s for s, _ in held_out], [v[j] for _, v in held_out], "o", color=_SERVED, alpha=shade, ms=4)
    if held_out:
        axes.plot([], [], "o", color=_SERVED, ms=4, label="held out")
    axes.set(xlabel="optimizer step", ylabel="soft cross-entropy (nats)", title="By training-time-test step")
    _finish(figure, axes, file)
    return True


def _bars(names: list[str], bars: list[tuple[str, list[float | None]]], what: str, file: Path, x: str = "") -> None:
    figure, axes = plt.subplots(figsize=(max(6.4, 1.2 * len(names)), 3.8), layout="constrained")
    width, at = 0.8 / len(bars), np.arange(len(names))
    for i, (label, values) in enumerate(bars):
        heights = [v or 0.0 for v in values]
        place = at + (i - (len(bars) - 1) / 2) * width
        drawn = axes.bar(place, heights, 0.92 * width, color=_COLOURS[i % len(_COLOURS)], label=label)
        if len(bars) * len(names) <= _MANY_SETS * 2:
            axes.bar_label(drawn, [f"{v:.2f}" if v else "" for v in values], fontsize=8, padding=1)
    axes.axhline(1.0, color="#59636e", lw=1)
    axes.set_xticks(at, [_text(n) for n in names])
    axes.set(xlabel=x, ylabel=what)
    axes.margins(y=0.12)
    _finish(figure, axes, file)


def _column(column: tuple[float, int]) -> str:
    return f"K = {column[1]}, T = {column[0]:g}"


def _text(name: object) -> str:
    return str(name).replace("$", r"\$")  # matplotlib would read it as mathematics


def _finish(figure: Any, axes: Axes, file: Path) -> None:
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(file, dpi=130)
    plt.close(figure)
