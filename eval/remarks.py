"""What a reader of the report must know before its figures are believed: noise, and what could not be compared."""

from collections.abc import Callable
from typing import Any

from draftsmith.eval.prompts import HELD_OUT

_FIRST_TOKENS = 3.0  # a ratio with the draft and without that only a machine busy with something else explains
_NAMED = 3

Row = dict[str, Any]


def remarks(report: dict[str, Any], written_at: float) -> list[str]:
    """Sentences, each about all the cells that it holds for.

    Args:
        report: all but its remarks.
        written_at: temperature of the samples' replies.
    """
    served, agreement = report["served"], report["agreement"]
    short = [r for r in agreement if r["falls_short"]]
    compared = {(r["k"], r["temperature"], r["concurrency"]) for r in agreement}
    held_out = [r for r in served if r["set"] == HELD_OUT]
    missing = [r for r in held_out if (r["k"], r["temperature"], r["concurrency"]) not in compared]
    return [
        *_said(
            [r for r in served if r["speedup"] and r["speedup"] > r["acceptance_length"]],
            lambda r: f"speed-up {r['speedup']:.2f} at acceptance length {r['acceptance_length']:.3f}",
            "no draft gives more than its acceptance length: the machine was busy; measure again (`draftsmith eval "
            "--fresh`)",
        ),
        *_said(
            [r for r in served if _apart(r["first_token_ms"], r["baseline_first_token_ms"])],
            lambda r: (
                f"first token after {r['first_token_ms']:.1f} ms with the draft and "
                f"{r['baseline_first_token_ms']:.1f} ms without"
            ),
            "the machine was busy; measure again (`draftsmith eval --fresh`)",
        ),
        *_said([] if report["diagnosis"] else short, _shortfall, _undiagnosed(short)),
        *_said(missing, lambda r: "not replayed", _unreplayed(report, written_at)),
    ]


def _said(rows: list[Row], about: Callable[[Row], str], what: str) -> list[str]:
    if not rows:
        return []
    cells = [f"{_cell(r)}: {about(r)}" for r in rows[:_NAMED]]
    more = [f"{len(rows) - _NAMED} more"] if len(rows) > _NAMED else []
    return [f"{'; '.join([*cells, *more])}. {what[0].upper()}{what[1:]}."]


def _cell(row: Row) -> str:
    return f"{row.get('set', HELD_OUT)}, K = {row['k']}, T = {row['temperature']:g}, {row['concurrency']} in flight"


def _apart(ours: float | None, theirs: float | None) -> bool:
    return bool(ours and theirs) and max(ours or 0, theirs or 0) > _FIRST_TOKENS * min(ours or 0, theirs or 0)


def _shortfall(row: Row) -> str:
    return f"served {-100 * row['difference']:.2f} % below replay"


def _undiagnosed(short: list[Row]) -> str:
    if any(r["method"] == "exact" for r in short):
        return "not diagnosed: this draft is not a checkpoint of the run, so there is nothing to compare its parts with"
    return (
        "not diagnosed: replay went along replies that were sampled, the server sampled others, and two draws differ "
        "by chance; `draftsmith eval diagnose` compares the parts"
    )


def _unreplayed(report: dict[str, Any], written_at: float) -> str:
    if not report["replay"]:
        return "no held-out sample has states of this draft's layers"
    return (
        f"the samples' replies were written at temperature {written_at:g}, and replay at another one is known only "
        "above 0; the export's proof compares replies at 0 (`verification.json`)"
    )
