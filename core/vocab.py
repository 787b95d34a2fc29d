"""The draft's reduced vocabulary: which target tokens it can propose, as d2t offsets and a t2d mask.

target id = draft id + d2t[draft id]        (an offset, as vLLM reads it)
t2d[target id] = the draft can propose it
"""

from collections import Counter
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


def build_mapping(
    replies: Iterable[list[int]], always: Iterable[int], vocab_size: int, draft_vocab_size: int | None
) -> VocabMapping:
    """Keep the replies' most frequent tokens.

    Args:
        replies: reply token ids of the training split.
        always: ids that are kept whatever their count (end of turn, special tokens).
        vocab_size: V of the target.
        draft_vocab_size: Vd, met exactly; None: the full vocabulary.

    Raises:
        UserError: Vd is larger than V, or too small for the ids that are always kept.
    """
    size = draft_vocab_size or vocab_size
    if size > vocab_size:
        raise UserError(
            f"data.draft_vocab_size is {size}, and the target has only {vocab_size} tokens.",
            "Lower it, or set it to null.",
        )
    kept = dict.fromkeys(i for i in always if 0 <= i < vocab_size)
    if len(kept) > size:
        raise UserError(
            f"data.draft_vocab_size is {size}, and {len(kept)} special tokens are always kept.", "Raise it."
        )
    counts = Counter(token for reply in replies for token in reply)
    # Ties and the filling up to Vd go by id: byte-pair ids ascend with rarity, and the result is reproducible.
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    for token in (*ranked, *range(vocab_size)):
        if len(kept) == size:
            break
        kept[token] = None
    ids = np.sort(np.fromiter(kept, dtype=np.int64))
    t2d = np.zeros(vocab_size, dtype=np.bool_)
    t2d[ids] = True
    return VocabMapping(ids - np.arange(size), t2d)


def coverage(mapping: VocabMapping, replies: Iterable[list[int]]) -> float:
    """Share of reply tokens that the draft can propose, 0 to 1."""
    inside = [mapping.t2d[reply] for reply in replies if reply]
    return float(np.concatenate(inside).mean()) if inside else 0.0


def save_mapping(path: Path, mapping: VocabMapping, figures: dict[str, Any]) -> None:
    """Write the mapping with its coverage figures as safetensors metadata."""
    tensors = {"d2t": mapping.d2t, "t2d": mapping.t2d}
    write_atomic(path, lambda tmp: save_file(tensors, tmp, metadata={k: str(v) for k, v in figures.items()}))


def load_mapping(path: Path) -> VocabMapping:
    """Read a mapping.

    Raises:
        UserError: the file is missing.
    """
    if not path.is_file():
        raise UserError(f"{path}: no vocabulary mapping.", "Run `draftsmith prepare` first.")
    mend = "Run `draftsmith prepare --fresh`."
    with reading(path, mend), safe_open(path, "np") as file:
        return VocabMapping(file.get_tensor("d2t"), file.get_tensor("t2d"))
