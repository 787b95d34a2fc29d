"""The report's plots, as files and for embedding."""

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

_REPLAYED, _SERVED = "#4269d0", "#ff725c"


def plot_loss(metrics: Path, file: Path) -> bool:
    """Training and held-out loss of step 1 over optimizer steps; False where nothing was logged."""
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()] if metrics.is_file() else []
    trained = [(r["step"], r["loss_per_step"]) for r in rows if "loss_per_step" in r]
    held_out = [(r["step"], r["eval_loss_per_step"]) for r in rows if "eval_loss_per_step" in r]
    if not trained:
        return False
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    for j in range(len(trained[0][1])):
        shade = 1.0 - 0.8 * j / max(1, len(trained[0][1]))
        axes.plot(
            [s for s, _ in trained],
            [v[j] for _, v in trained],
            color=_REPLAYED,
            alpha=shade,
            label=f"step {j + 1}",
        )
        if held_out:
            axes.plot([s for s, _ in held_out], [v[j] for _, v in held_out], "o", color=_SERVED, alpha=shade, ms=4)
    if held_out:
        axes.plot([], [], "o", color=_SERVED, ms=4, label="held out")
    axes.set(xlabel="optimizer step", ylabel="soft cross-entropy (nats)", title="Loss by training-time-test step")
    axes.legend(frameon=False, fontsize=8)
    _finish(figure, axes, file)
    return True


def plot_positions(report: dict[str, Any], file: Path) -> None:
    """Share of rounds whose i-th draft was accepted: replayed beside served, at the largest K."""
    k = max([r["k"] for r in report["replay"] + report["served"]])
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    positions = list(range(1, k + 1))
    for row in (r for r in report["replay"] if r["k"] == k):
        axes.plot(positions, row["per_position"], "o-", color=_REPLAYED, label="replay, held out")
    for i, row in enumerate(r for r in report["served"] if r["k"] == k):
        name = str(row["set"]).replace("$", r"\$")  # matplotlib would read it as mathematics
        label = f"served, {name}, T = {row['temperature']:g}, {row['concurrency']} in flight"
        axes.plot(positions, row["per_position"], "s--", color=_SERVED, alpha=max(0.3, 1 - 0.2 * i), label=label)
    axes.set(
        xlabel="drafted position",
        ylabel="share of rounds accepted",
        ylim=(0, 1),
        title=f"Acceptance by position, K = {k}",
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, fontsize=8)
    _finish(figure, axes, file)


def _finish(figure: Any, axes: Axes, file: Path) -> None:
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)
    plt.close(figure)
