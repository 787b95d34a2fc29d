"""How alike prompts are: words, n-grams of them, MinHash signatures, and who shares a band of one.

Legend: N conversations, P permutations, W words.
"""

import re
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np
from datasketch import MinHash

from draftsmith.core.config import DedupConfig
from draftsmith.core.conversations import Conversation, text_of

# Where words are not set apart by spaces every character is one; so is every sign, or 1 + 2 would equal 1 - 2.
_NO_SPACES = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\u0e00-\u0e7f"
_WORD = re.compile(rf"[{_NO_SPACES}]|[^\W{_NO_SPACES}]+|[^\w\s]")
_MULTIPLIER, _MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)
_AT_ONCE = 1 << 14
_PAIRS = 1 << 11  # each may touch two pages of its own
_RECALL = 0.98
_BAND_BYTES = 128 << 20


def prompt_words(conversation: Conversation) -> np.ndarray:
    """uint64 [W]: hashes of the words of all user turns, or the prompt's ids where the source gives ids.

    The system text is left out: one that all of a product's traffic shares says nothing about the prompt.
    """
    if conversation.tokens:
        return np.array(conversation.tokens[0].prompt_ids, dtype=np.uint64)
    return word_hashes("\n".join(text_of(conversation.messages[i]) for i in conversation.user_turns))


def word_hashes(text: str, signs: bool = True) -> np.ndarray:
    """uint64 [W]: one hash a word, whatever its case; with `signs` punctuation counts as words."""
    found = _WORD.findall(text.lower())
    if not signs:
        found = [word for word in found if word[0].isalnum()]
    return np.fromiter((zlib.crc32(word.encode()) for word in found), dtype=np.uint64, count=len(found))


def ngram_hashes(words: np.ndarray, sizes: Collection[int]) -> Iterator[tuple[int, np.ndarray]]:
    """(n, uint64 [W - n + 1]) for every n of `sizes` up to W, ascending: a hash of every n words in a row."""
    hashes: np.ndarray = words + np.uint64(1)
    plus_one = hashes
    for n in range(1, min(max(sizes, default=0), len(words)) + 1):
        if n > 1:
            hashes = hashes[:-1] * _MULTIPLIER + plus_one[n - 1 :]
        if n in sizes:
            mixed = (hashes ^ (hashes >> np.uint64(31))) * _MIX
            yield n, mixed ^ (mixed >> np.uint64(29))


class Signer:
    """MinHash signatures of one kind."""

    def __init__(self, config: DedupConfig) -> None:
        self._ngram = config.ngram
        self._minhash = MinHash(config.permutations, hashfunc=int)

    def sign(self, words: np.ndarray) -> np.ndarray:
        """uint32 [P]: the signature of a prompt; of fewer words than an n-gram holds, of all of them as one."""
        self._minhash.clear()
        grams = words
        for _, hashes in ngram_hashes(words, [min(self._ngram, len(words))]):
            grams = hashes >> np.uint64(32)
        for start in range(0, len(grams), _AT_ONCE):
            self._minhash.update_batch(grams[start : start + _AT_ONCE].tolist())
        signature: np.ndarray = self._minhash.hashvalues.astype(np.uint32)
        return signature


def bands(threshold: float, permutations: int) -> tuple[int, int]:
    """(bands, rows of each): the fewest chance meetings with which a pair at the threshold is still found."""
    for rows in range(permutations, 1, -1):
        count = permutations // rows
        if 1 - (1 - threshold**rows) ** count >= _RECALL:
            return count, rows
    return permutations, 1


class Signatures:
    """Signatures of all conversations, on disk: 4 P bytes each."""

    def __init__(self, path: Path, permutations: int) -> None:
        self._path, self._permutations = path, permutations
        self._file = path.open("wb")
        self._count = 0

    def append(self, signature: np.ndarray) -> None:
        """Add one signature, uint32 [P]."""
        self._file.write(signature.tobytes())
        self._count += 1

    def __len__(self) -> int:
        return self._count

    def similarity(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Float [n]: estimated Jaccard similarity of every pair a[i], b[i]."""
        self._file.flush()
        shape = (self._count, self._permutations)
        found = np.empty(len(a))
        for start in range(0, len(a), _PAIRS):
            part = slice(start, start + _PAIRS)
            # Mapped anew for every part, or all pages ever touched would stay in memory.
            mapped = np.memmap(self._path, dtype=np.uint32, mode="r", shape=shape)
            found[part] = (mapped[a[part]] == mapped[b[part]]).mean(axis=1)
            del mapped
        return found

    def band_keys(self, threshold: float) -> Iterator[np.ndarray]:
        """uint64 [N] for every band: conversations with the same key share the band."""
        self._file.flush()
        count, rows = bands(threshold, self._permutations)
        at_once = max(1, _BAND_BYTES // max(1, 8 * self._count))
        for first in range(0, count, at_once):
            group = range(first, min(count, first + at_once))
            keys = np.empty((len(group), self._count), dtype=np.uint64)
            for start, part in self._parts():
                for i, band in enumerate(group):
                    columns = part[:, band * rows : (band + 1) * rows].astype(np.uint64)
                    key = np.zeros(len(part), dtype=np.uint64)
                    for column in columns.T:
                        key = (key ^ (key >> np.uint64(29))) * _MULTIPLIER + column
                    keys[i, start : start + len(part)] = key
            yield from keys

    def _parts(self) -> Iterator[tuple[int, np.ndarray]]:
        with self._path.open("rb") as file:
            for start in range(0, self._count, _AT_ONCE):
                count = min(_AT_ONCE, self._count - start) * self._permutations
                yield start, np.fromfile(file, dtype=np.uint32, count=count).reshape(-1, self._permutations)
