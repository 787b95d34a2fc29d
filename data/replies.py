"""Several replies to one prompt (`data.sampling.replies`): each is a whole conversation, written anew turn by turn.

All of them are one conversation to everything that counts conversations: they are on one side of the split, and an
interval that resamples conversations takes all of them or none. A reply that one before it has too, to the very same
prompt, is used once; the others are counted and listed as `same_reply`.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from draftsmith.core.conversations import Conversation, Skipped
from draftsmith.data.rows import Row

SAME_REPLY = "same_reply"
_SEED_STRIDE = 1_000_003


def reply_seed(base: int, conversations: int, conversation: int, reply: int, turn: int) -> int:
    """Seed of one sampled reply, 0 to 2**63 - 1.

    The first reply's is `base * 1_000_003 + turn * conversations + conversation`, modulo 2**63; a further one's is the
    first 63 bits of BLAKE2b over the text `base conversation turn reply`. Nothing else counts: not what else is in the
    batch, not what a stopped run had already, and not how many replies are asked for, so that more of them leave the
    others as they are.

    Args:
        base: `data.sampling.seed`, or `run.seed`.
        conversations: how many there are.
        conversation: its number.
        reply: which of the replies, from 0.
        turn: from 0.
    """
    if reply == 0:
        return (base * _SEED_STRIDE + turn * conversations + conversation) % 2**63
    text = f"{base} {conversation} {turn} {reply}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def sample_id(conversation: str, turn: int, reply: int) -> str:
    """`c/0` of the first reply, `c/0~1` of the next.

    The mark stands behind the last slash, where no id of a source can be: two conversations never share a sample's id,
    and what comes before that slash is the conversation's own id for all of its replies (`core/replay.py`).
    """
    return f"{conversation}/{turn}~{reply}" if reply else f"{conversation}/{turn}"


def place(conversation: Conversation, reply: int) -> str:
    """Where a reply belongs, for people."""
    return f"{conversation.place}, reply {reply + 1}" if reply else conversation.place


def distinct(
    talks: Iterable[list[Row]], conversations: Sequence[Conversation]
) -> Iterator[tuple[list[Row], list[Skipped]]]:
    """Every talk without the rows that an earlier one of its conversation has too, and what was left out.

    Args:
        talks: rows of one reply to one conversation each, a row a turn; those of a conversation stand together.
        conversations: as given.
    """
    for number, replies in groupby(talks, key=lambda rows: rows[0].conversation):
        first: dict[tuple[int, ...], int] = {}
        for rows in replies:
            kept, same = list[Row](), list[Skipped]()
            for row in rows:
                earlier = first.setdefault(tuple(row.input_ids), row.reply)
                if earlier == row.reply:
                    kept.append(row)
                    continue
                said = f"turn {row.turn + 1}: the very ids of reply {earlier + 1}"
                conversation = conversations[number]
                same.append(Skipped(place(conversation, row.reply), SAME_REPLY, said, conversation.source))
            yield kept, same
