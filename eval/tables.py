"""The report's short tables: a sweep has hundreds of rows, and what one asks first are a few of them."""

import math
from typing import Any


def summaries(report: dict[str, Any]) -> dict[str, Any]:
    """Tables made of `served`.

    Returns:
        `by_set`: acceptance length of every set (rows) at every K and temperature (columns), all passes together;
        `by_concurrency`: speed-up, geometric mean over the sets, at every concurrency (rows), K and temperature;
        `headline`: the fastest row of the first set at the first temperature; None where nothing was served.
    """
    served = report["served"]
    columns = list(dict.fromkeys((r["temperature"], r["k"]) for r in served))
    sets = list(dict.fromkeys(r["set"] for r in served))
    many = list(dict.fromkeys(r["concurrency"] for r in served))
    by_set = [(name, [_length(_rows(served, c, set=name)) for c in columns]) for name in sets]
    speeds = [(n, [_speedup(_rows(served, c, concurrency=n)) for c in columns]) for n in many]
    first = [r for r in served if (r["set"], r["temperature"]) == (served[0]["set"], served[0]["temperature"])]
    headline = max(first, key=lambda r: r["speedup"] or 0.0, default=None)
    return {"columns": columns, "by_set": by_set, "by_concurrency": speeds, "headline": headline}


def _rows(served: list[dict[str, Any]], column: tuple[float, int], **wanted: Any) -> list[dict[str, Any]]:
    wanted |= {"temperature": column[0], "k": column[1]}
    return [r for r in served if all(r[key] == value for key, value in wanted.items())]


def _length(rows: list[dict[str, Any]]) -> float | None:
    drafts = sum(r["drafts"] for r in rows)
    return 1.0 + sum(r["accepted"] for r in rows) / max(1, drafts) if rows else None


def _speedup(rows: list[dict[str, Any]]) -> float | None:
    ratios = [r["speedup"] for r in rows if r["speedup"]]
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None
