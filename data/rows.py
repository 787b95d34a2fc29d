"""What both ways to a sample yield: ids exactly as served, with the spans of the replies in them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """Token-exact ids of one turn, or of several where each is a prefix of the next.

    Attributes:
        conversation: index among the conversations that were given.
        turn: of the row's last reply, counted from 0.
        input_ids: prompt and replies.
        loss_spans: [start, end) of every reply in `input_ids`, ascending.
        finish_reason: `stop` or `length`, of the last reply.
        author: who wrote the replies; `target` where they were regenerated.
        reply: which of several replies to the conversation, counted from 0.
    """

    conversation: int
    turn: int
    input_ids: list[int]
    loss_spans: list[tuple[int, int]]
    finish_reason: str
    author: str
    reply: int = 0
