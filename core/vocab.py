"""The draft's reduced vocabulary: which target tokens it can propose, as d2t offsets and a t2d mask.

target id = draft id + d2t[draft id]        (an offset, as vLLM reads it)
t2d[target id] = the draft can propose it
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from draftsmith.core.atomic import write_atomic
from draftsmith.core.damage import reading
from draftsmith.core.errors import UserError

_COUNT_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class VocabMapping:
    """d2t: int64 [Vd] offsets; t2d: bool [V]."""

    d2t: np.ndarray
    t2d: np.ndarray

    @property
    def target_ids(self) -> np.ndarray:
        """int64 [Vd]: the target id of every draft id, ascending."""
        ids: np.ndarray = self.d2t + np.arange(len(self.d2t))
        return ids

    @property
    def is_full(self) -> bool:
        """Whether the draft proposes every target token."""
        return len(self.d2t) == len(self.t2d)


class TokenCounts:
    """Counts token ids as they stream by; memory is one number per token of the vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        self._counts = np.zeros(vocab_size, dtype=np.int64)
        self._pending: list[int] = []

    def add(self, ids: Iterable[int]) -> None:
        """Count every id once more."""
        self._pending.extend(ids)
        if len(self._pending) >= _COUNT_AT_ONCE:
            self._count()

    @property
    def counts(self) -> np.ndarray:
        """int64 [V]: how often each id came."""
        self._count()
        return self._counts

    def _count(self) -> None:
        if self._pending:
            self._counts += np.bincount(self._pending, minlength=len(self._counts))
            self._pending = []


def count_tokens(replies: Iterable[Iterable[int]], vocab_size: int) -> np.ndarray:
    """int64 [V]: how often each id comes in the replies."""
    counts = TokenCounts(vocab_size)
    for reply in replies:
        counts.add(reply)
    return counts.counts


def build_mapping(counts: np.ndarray, always: Iterable[int], draft_vocab_size: int | None) -> VocabMapping:
    """Keep the tokens that the replies need most.

    Args:
        counts: [V] weight of every target token in the training replies: how often it comes, or the probability
            mass that the target expects of it.
        always: ids that are kept whatever their count (end of turn, special tokens).
        draft_vocab_size: Vd, met exactly; None: the full vocabulary.

    Raises:
        UserError: Vd is larger than V, or too small for the ids that are always kept.
    """
    vocab_size = len(counts)
    size = draft_vocab_size or vocab_size
    if size > vocab_size:
        raise UserError(
            f"data.draft_vocab_size is {size}, and the target has only {vocab_size} tokens.",
            "Lower it, or set it to null.",
        )
    kept = np.unique(np.array([i for i in always if 0 <= i < vocab_size], dtype=np.int64))
    if len(kept) > size:
        raise UserError(
            f"data.draft_vocab_size is {size}, and {len(kept)} special tokens are always kept.", "Raise it."
        )
    t2d = np.zeros(vocab_size, dtype=np.bool_)
    t2d[kept] = True
    # Ties and the filling up to Vd go by id: byte-pair ids ascend with rarity, and the result is reproducible.
    ranked = np.argsort(-counts, kind="stable")
    t2d[ranked[~t2d[ranked]][: size - len(kept)]] = True
    return VocabMapping(np.flatnonzero(t2d) - np.arange(size), t2d)


def coverage(mapping: VocabMapping, counts: np.ndarray) -> float:
    """Share of the counted tokens that the draft can propose, 0 to 1."""
    total = counts.sum()
    return float(counts[mapping.t2d].sum() / total) if total else 0.0


def save_mapping(path: Path, mapping: VocabMapping, figures: dict[str, Any]) -> None:
    """Write the mapping, whole or not at all, with what is known of it as safetensors metadata."""
    tensors = {"d2t": mapping.d2t, "t2d": mapping.t2d}
    write_atomic(path, lambda tmp: save_file(tensors, tmp, metadata={k: str(v) for k, v in figures.items()}))


def load_mapping(path: Path) -> VocabMapping:
    """Read a mapping.

    Raises:
        UserError: the file is missing.
    """
    if not path.is_file():
        raise UserError(f"{path}: no vocabulary mapping.", "Run `draftsmith prepare` first.")
    mend = "Run `draftsmith prepare`, which makes it again."
    with reading(path, mend), safe_open(path, "np") as file:
        return VocabMapping(file.get_tensor("d2t"), file.get_tensor("t2d"))
