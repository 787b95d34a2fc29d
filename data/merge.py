"""Turns of one conversation that are prefixes of one another become one row with several reply spans.

A capture then prefills them once. Nothing changes for the draft: every reply still stands after the very ids that were
served before it. Where a template rewrites earlier turns (MiniMax-M2 drops their reasoning), the ids differ and the
rows stay apart. Two replies never touch in a merged row: the loss tells them apart by the template's tokens between.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from draftsmith.data.rows import Row


def merge(rows: Iterable[Row], longest: int) -> Iterator[Row]:
    """Merge the rows of one conversation, in their order, where the result is no longer than `longest` tokens."""
    last: Row | None = None
    for row in rows:
        if last and _extends(row, last) and len(row.input_ids) <= longest:
            row = replace(row, loss_spans=last.loss_spans + row.loss_spans)
        elif last:
            yield last
        last = row
    if last:
        yield last


def _extends(row: Row, last: Row) -> bool:
    end = len(last.input_ids)
    # A reply that was cut would be hidden inside: a row's finish_reason is that of its last reply.
    return (
        last.finish_reason == "stop"
        and last.author == row.author
        and row.loss_spans[0][0] > end
        and row.input_ids[:end] == last.input_ids
    )
