"""The results' tables in Markdown, and their plots.

python3 benchmarks/quality/tables.py ablation ablation.jsonl [--png ablation.png]
python3 benchmarks/quality/tables.py scale scale.jsonl [--png scale.png]
python3 benchmarks/quality/tables.py cost scale.jsonl runs/speculators/result.json ...
python3 benchmarks/quality/tables.py served eval/compare.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fit import Fit, fit, time_to_reach

Line = dict[str, Any]
_SHOWN = ("1", "3", "5", "7")


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; the first column is text, the others figures."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


def grouped(lines: Iterable[Line]) -> dict[str, list[Line]]:
    """Lines by variant: its seeds."""
    groups: dict[str, list[Line]] = {}
    for line in lines:
        groups.setdefault(line["variant"], []).append(line)
    return groups


def mean_length(lines: Sequence[Line], k: str) -> float:
    """Mean over seeds of the last checkpoint's replayed length; nan where one has none at this K."""
    return statistics.fmean(line["replay_last"].get(k, float("nan")) for line in lines)


def ablation_table(lines: Sequence[Line], by: str = "5") -> str:
    """Variants by replayed acceptance length at K = `by`, T = 0; differences are to the variant `base`."""
    groups = grouped(lines)
    base = {k: mean_length(groups["base"], k) for k in _SHOWN} if "base" in groups else {}
    head = ["variant", *(f"K = {k}" for k in _SHOWN), f"to base at K = {by}", "seeds", "spread", "best checkpoint",
            "steps/s", "parameters"]  # fmt: skip
    rows = []
    for name, group in sorted(groups.items(), key=lambda item: -mean_length(item[1], by)):
        values = [line["replay_last"][by] for line in group]
        best = [line.get("replay_best", line["replay_last"])[by] for line in group]
        difference = f"{100 * (mean_length(group, by) / base[by] - 1):+.1f} %" if base else ""
        spread = f"{max(values) - min(values):.3f}" if len(values) > 1 else ""
        rows.append([
            name, *(f"{mean_length(group, k):.3f}" for k in _SHOWN), difference, str(len(group)), spread,
            f"{statistics.fmean(best):.3f}", f"{statistics.fmean(line['steps_per_second'] for line in group):.1f}",
            f"{group[0]['parameters'] / 1e6:.1f} M",
        ])  # fmt: skip
    return markdown(head, rows)


def scale_points(lines: Sequence[Line], by: str = "5") -> tuple[list[float], list[float]]:
    """Training tokens and lengths of the trainings with the fewest epochs: the fit's points."""
    epochs = min(round(line["tokens_seen"] / line["train_tokens"]) for line in lines)
    used = [line for line in lines if round(line["tokens_seen"] / line["train_tokens"]) == epochs]
    return [line["train_tokens"] for line in used], [line["replay_last"][by] for line in used]


def scale_fit(lines: Sequence[Line], by: str = "5") -> Fit | None:
    """The fit, where there are points enough."""
    tokens, lengths = scale_points(lines, by)
    return fit(tokens, lengths) if len(set(tokens)) >= 3 else None


def scale_table(lines: Sequence[Line], by: str = "5") -> str:
    """A row a training, then the fit and what it says of more data."""
    head = ["training", "tokens", "tokens seen", *(f"K = {k}" for k in _SHOWN), "minutes of the GPU"]
    rows = [
        [line["name"], f"{line['train_tokens']:,}", f"{line['tokens_seen']:,}",
         *(f"{line['replay_last'].get(k, float('nan')):.3f}" for k in _SHOWN),
         "resumed" if line["resumed"] else f"{line['process_seconds'] / 60 / line['side_by_side']:.2f}"]
        for line in sorted(lines, key=lambda line: (line["train_tokens"], line["tokens_seen"]))
    ]  # fmt: skip
    found = scale_fit(lines, by) if lines else None
    if found is None:
        return markdown(head, rows)
    most = max(scale_points(lines, by)[0])
    more = ", ".join(f"{n}x the tokens: {found.at(n * most):.3f}" for n in (2, 4, 16))
    end = " The exponent is at the end of its range: these points do not say where they lead." if found.at_bound else ""
    said = (
        f"K = {by}: length = {found.a:.3f} - {found.b:.3f} * (tokens / 10^6)^-{found.c:.3f}, "
        f"rms {found.rms:.4f}. By it, {more}.{end}"
    )
    return f"{markdown(head, rows)}\n\n{said}"


def ours(lines: Sequence[Line]) -> Line:
    """The training on the most data that was not stopped on the way; of equal ones that with the fewest epochs."""
    whole = [line for line in lines if not line["resumed"]]
    return max(whole, key=lambda line: (line["train_tokens"], -line["tokens_seen"]))


def cost_table(mine: Line, peers: Sequence[Line], share: Sequence[float] = (0.9, 0.95, 1.0)) -> str:
    """Seconds of a training process until a length was reached, ours at K = J beside the peers' at the same K.

    Args:
        mine: a line of the ablation or of the scale.
        peers: `result.json` of baselines; their checkpoints' replay, one an epoch.
        share: of the best peer's final length.
    """
    k = str(mine["ttt_steps"])
    curves = {mine["name"]: _curve(mine["curve"], "acceptance_length", mine["process_seconds"])}
    for peer in peers:
        told = [{**e, "length": e["replay"][k]} for e in peer["epochs"] if "replay" in e]
        curves[peer["name"]] = _curve(told, "length", peer["process_seconds"])
    ends = {name: points[-1][1] for name, points in curves.items()}
    levels = [x * max(ends[p["name"]] for p in peers) for x in share]
    rows = []
    for name, points in curves.items():
        times = [time_to_reach(points, level) for level in levels]
        rows.append([name, f"{ends[name]:.3f}", f"{points[-1][0]:.0f} s",
                     *("never" if t is None else f"{t:.0f} s" for t in times)])  # fmt: skip
    return markdown(["", f"length at K = {k}", "training", *(f"to {level:.3f}" for level in levels)], rows)


def _curve(points: Sequence[Line], name: str, process_seconds: float) -> list[tuple[float, float]]:
    """(seconds, length); what a process took outside of its steps is counted as its start."""
    start = max(0.0, process_seconds - points[-1]["seconds"])
    return [(start + p["seconds"], p[name]) for p in points]


def served_table(compared: dict[str, Any]) -> str:
    """Served acceptance length by set, and the mean over the sets that were never trained on, beside the first draft.

    Passes of one set at several concurrencies count alike.
    """
    cells: dict[tuple[int, float, str], dict[str, list[float]]] = {}
    for row in compared["rows"]:
        if row["kind"] == "served":
            of = cells.setdefault((row["k"], row["temperature"], row["draft"]), {})
            of.setdefault(row["set"], []).append(row["acceptance_length"])
    sets = list(dict.fromkeys(name for cell in cells.values() for name in cell))
    means = {
        key: statistics.fmean(statistics.fmean(v) for name, v in cell.items() if name != "held_out" or len(cell) == 1)
        for key, cell in cells.items()
    }
    rows = [
        [draft, str(k), f"{t:g}", *(f"{statistics.fmean(cell[name]):.3f}" if name in cell else "" for name in sets),
         f"{means[k, t, draft]:.3f}", f"{means[k, t, draft] / means[k, t, compared['base']]:.3f}"]
        for (k, t, draft), cell in sorted(cells.items(), key=lambda item: (item[0][0], item[0][1]))
    ]  # fmt: skip
    return markdown(["draft", "K", "T", *sets, "mean of the sets", f"to {compared['base']}"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=("ablation", "scale", "cost", "served"))
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--by", default="5", help="draft length that sorts, and is fitted")
    parser.add_argument("--png", type=Path)
    given = parser.parse_args()
    first, *others = (file.read_text(encoding="utf-8") for file in given.files)
    if given.kind == "served":
        return print(served_table(json.loads(first)))
    lines = [json.loads(line) for line in first.splitlines() if line.strip()]
    if given.kind == "cost":
        return print(cost_table(ours(lines), [json.loads(text) for text in others]))
    lines += [json.loads(line) for text in others for line in text.splitlines()]
    print({"ablation": ablation_table, "scale": scale_table}[given.kind](lines, given.by))
    if given.png:
        from plots import draw_ablation, draw_scale

        {"ablation": draw_ablation, "scale": draw_scale}[given.kind](lines, given.by, given.png)


if __name__ == "__main__":
    main()
