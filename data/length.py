"""What to do with a row that is longer than `data.max_length`."""

from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

from draftsmith.core.config import DataConfig
from draftsmith.data.rows import Row


class Unfit(NamedTuple):
    """Why a row is no sample."""

    reason: str
    detail: str


def fit(row: Row, config: DataConfig, end_ids: Collection[int]) -> Row | Unfit:
    """The row, or as much of it as is a sample in its own right, or the reason why it is none.

    Ids and spans are cut together, and only where a server's own output could have ended: after a whole reply
    (`truncate`), or within one at `max_length`, where a server with that limit stops too (`cut`). So what is left is
    a prefix of what was served, and no template is left half.

    Args:
        row: as rendered or regenerated.
        config: `max_length` and `too_long`.
        end_ids: tokens that end a turn.
    """
    longest = config.max_length
    if len(row.input_ids) > longest and config.too_long == "reject":
        return Unfit("too_long", f"{len(row.input_ids)} tokens, data.max_length {longest}")
    if len(row.input_ids) > longest:
        spans = [span for span in row.loss_spans if span[1] <= longest]
        end = spans[-1][1] if spans else 0
        crossing = next(((a, b) for a, b in row.loss_spans if a + 1 < longest < b), None)
        finish = "stop" if end and row.input_ids[end - 1] in end_ids else "length"
        if crossing and config.too_long == "cut":
            spans, end, finish = [*spans, (crossing[0], longest)], longest, "length"
        if not spans:
            return Unfit("too_long", f"no reply of turn {row.turn} ends within {longest} tokens")
        row = replace(row, input_ids=row.input_ids[:end], loss_spans=spans, finish_reason=finish)
    if max(b - a for a, b in row.loss_spans) < 2:
        return Unfit("reply_too_short", "one token or none: nothing to draft")
    return row
