"""The documents that training speed is measured on, the same for draftsmith and for its peers. Numpy only.

`dense(tokens)` is one document, every token of it supervised. `equal(tokens)` is documents of
1,024 tokens. `conversations(tokens, seed)` is a packed batch as a
training run meets it: conversations of log-normal length whose one reply, the last 60 % of the tokens, is supervised.
"Supervised" is said of a token that the target wrote: the row before it is the one that has to predict it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MEDIAN_LENGTH = 600
MEAN_LENGTH = 1000
LONGEST = 8192
SHORTEST = 16
EQUAL_LENGTH = 1024
SUPERVISED_SHARE = 0.6
FULL_ENOUGH = 0.98  # a packed batch is closed at this share of its budget
MOST_DRAWS = 10_000


@dataclass(frozen=True)
class Document:
    """A document of `length` tokens of which those from `reply_start` on are supervised."""

    length: int
    reply_start: int

    @property
    def supervised(self) -> int:
        """The number of supervised tokens."""
        return self.length - self.reply_start


def dense(tokens: int) -> list[Document]:
    """One document of `tokens` tokens, all supervised."""
    return [Document(tokens, 0)]


def equal(tokens: int) -> list[Document]:
    """Documents of 1,024 tokens, `tokens` of them together; the last 60 % of each supervised."""
    return [Document(EQUAL_LENGTH, EQUAL_LENGTH - round(SUPERVISED_SHARE * EQUAL_LENGTH))] * (tokens // EQUAL_LENGTH)


def conversation_length(generator: np.random.Generator) -> int:
    """One length in tokens, log-normal with the median and mean above, cut at the longest."""
    sigma = math.sqrt(2 * math.log(MEAN_LENGTH / MEDIAN_LENGTH))
    return int(np.clip(round(generator.lognormal(math.log(MEDIAN_LENGTH), sigma)), SHORTEST, LONGEST))


def conversations(tokens: int, seed: int) -> list[Document]:
    """Conversations of at most `tokens` tokens together, the same ones for the same arguments.

    Lengths are drawn until the budget is `FULL_ENOUGH` used; a conversation that does not fit is left for another
    batch, as a packing loader does.

    Raises:
        ValueError: the budget is too small for any conversation that was drawn.
    """
    generator = np.random.default_rng(seed)
    documents: list[Document] = []
    left = tokens
    for _ in range(MOST_DRAWS):
        length = conversation_length(generator)
        if length <= left:
            documents.append(Document(length, length - round(SUPERVISED_SHARE * length)))
            left -= length
        if left < SHORTEST or tokens - left >= FULL_ENOUGH * tokens:
            break
    if not documents:
        raise ValueError(f"a budget of {tokens} tokens holds no conversation: give {MEDIAN_LENGTH} or more")
    return documents


def loss_mask(document: Document) -> NDArray[np.bool_]:
    """True at the supervised tokens, shape [length]."""
    return np.arange(document.length) >= document.reply_start
