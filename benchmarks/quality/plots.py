"""The ablation's and the scale's plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from tables import Line, grouped, mean_length, scale_fit, scale_points

matplotlib.use("Agg")
from matplotlib import pyplot


def draw_ablation(lines: Sequence[Line], by: str, path: Path) -> None:
    """A bar a variant, a point a seed; the base's length as a line."""
    groups = sorted(grouped(lines).items(), key=lambda item: mean_length(item[1], by))
    means = [mean_length(group, by) for _, group in groups]
    figure, axes = pyplot.subplots(figsize=(7, 1 + 0.22 * len(groups)), layout="constrained")
    axes.barh(range(len(groups)), means, color=["C1" if name == "base" else "C0" for name, _ in groups], height=0.6)
    for i, (_, group) in enumerate(groups):
        axes.plot([line["replay_last"][by] for line in group], [i] * len(group), "k.", markersize=4)
    axes.set_yticks(range(len(groups)), [name for name, _ in groups], fontsize=8)
    if base := [m for (name, _), m in zip(groups, means, strict=True) if name == "base"]:
        axes.axvline(base[0], color="C1", linewidth=0.8)
    room = 0.1 * (max(means) - min(means)) or 0.05
    axes.set_xlim(max(1.0, min(means) - 3 * room), max(means) + room)
    axes.set_xlabel(f"replayed acceptance length, K = {by}, T = 0")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def draw_scale(lines: Sequence[Line], by: str, path: Path) -> None:
    """Length against training tokens, the fit drawn on to eight times the data."""
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for epochs in sorted({round(line["tokens_seen"] / line["train_tokens"]) for line in lines}):
        mine = [line for line in lines if round(line["tokens_seen"] / line["train_tokens"]) == epochs]
        axes.plot(
            [p["train_tokens"] for p in mine], [p["replay_last"][by] for p in mine], "o", label=f"{epochs} epochs"
        )
    if found := scale_fit(lines, by):
        tokens = scale_points(lines, by)[0]
        x = np.geomspace(min(tokens), 8 * max(tokens), 100)
        axes.plot(x, [found.at(t) for t in x], "k--", linewidth=0.8, label=f"{found.a:.2f} - b tokens^-{found.c:.2f}")
    axes.set_xscale("log")
    axes.set_xlabel("training tokens")
    axes.set_ylabel(f"replayed acceptance length, K = {by}, T = 0")
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
