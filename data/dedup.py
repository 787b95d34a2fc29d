"""Which conversations repeat an earlier one, and which are alike enough to stay on one side of the split.

Legend: N conversations. Everything here works on hashes; no text is compared.
"""

import hashlib
import json
import unicodedata
from collections.abc import Iterator

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from draftsmith.core.conversations import Conversation, Message, text_of
from draftsmith.data.similarity import Signatures

# In a bucket of many that only chance brought together, each is compared with this many others.
_LEADERS = 16


def content_key(conversation: Conversation, replies: bool) -> int:
    """64-bit hash of what a conversation says, up to white space and Unicode form.

    Args:
        conversation: as read.
        replies: whether the replies count, or only what is asked.
    """
    if conversation.tokens:
        return _hash(repr([(t.prompt_ids, t.reply_ids if replies else None) for t in conversation.tokens]))
    said = [_normal(m) for m in conversation.messages if replies or m["role"] != "assistant"]
    return _hash(_text([said, conversation.tools]))


def opening_key(conversation: Conversation) -> int:
    """64-bit hash of the first user turn: conversations that begin alike may share whole samples."""
    if conversation.tokens:
        return _hash(repr(conversation.tokens[0].prompt_ids))
    return _hash(_plain(text_of(conversation.messages[conversation.user_turns[0]])))


def setting_key(conversation: Conversation) -> int:
    """64-bit hash of system text and tools: the same question in another setting has another answer."""
    said = [_normal(m) for m in conversation.messages if m["role"] in ("system", "developer")]
    return _hash(_text([said, conversation.tools]))


def exact_duplicates(keys: np.ndarray) -> np.ndarray:
    """int64 [N]: the first conversation of the same key; its own index where it is the first.

    Args:
        keys: uint64 [N].
    """
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    found: np.ndarray = first[inverse]
    return found


def near_duplicates(
    signatures: Signatures, candidates: np.ndarray, threshold: float, settings: np.ndarray
) -> np.ndarray:
    """int64 [N]: an earlier conversation that is nearly equal; its own index where there is none.

    A pair that meets the threshold exactly is found with a probability of 0.98; of the conversations that are left,
    none is compared with one that was dropped.

    Args:
        signatures: of all N.
        candidates: int64, ascending: the conversations to look at.
        threshold: estimated Jaccard similarity from which two are nearly equal.
        settings: uint64 [N]; conversations of different ones are no duplicates.
    """
    found = np.arange(len(signatures))
    for keys in signatures.band_keys(threshold):
        candidates = candidates[found[candidates] == candidates]
        for rows, leaders in _alike(signatures, keys ^ settings, candidates, threshold):
            found[rows] = leaders
    return found


def alike_groups(signatures: Signatures, candidates: np.ndarray, threshold: float, *keys: np.ndarray) -> np.ndarray:
    """Int [N]: group of every conversation; those that share a key or are nearly equal, through others too, share it.

    Args:
        signatures: of all N.
        candidates: int64: the conversations whose signatures are compared.
        threshold: as in `near_duplicates`.
        keys: uint64 [N] each.
    """
    count = len(keys[0])
    everyone, offset = np.arange(count), count
    edges: list[tuple[np.ndarray, np.ndarray]] = []
    for key in keys:
        values, inverse = np.unique(key, return_inverse=True)
        edges.append((everyone, inverse + offset))
        offset += len(values)
    labels = _components(edges, offset)[:count]
    for band in signatures.band_keys(threshold):
        pairs = list(_alike(signatures, band, candidates, threshold))
        labels = _components([(everyone, labels + count), *pairs], 2 * count)[:count]
    return labels


def _alike(
    signatures: Signatures, keys: np.ndarray, rows: np.ndarray, threshold: float
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(rows, leaders): pairs of one band that are nearly equal; a leader is earlier than its rows."""
    order = np.argsort(keys[rows], kind="stable")
    rows = rows[order]
    _, bucket, size = np.unique(keys[rows], return_inverse=True, return_counts=True)
    several = size[bucket] > 1
    rows, bucket = rows[several], bucket[several]
    for _ in range(_LEADERS):
        if not len(rows):
            return
        first = np.r_[True, bucket[1:] != bucket[:-1]]
        leaders = rows[first][np.cumsum(first) - 1]
        alike = ~first
        alike[alike] = signatures.similarity(rows[alike], leaders[alike]) >= threshold
        yield rows[alike], leaders[alike]
        rest = ~first & ~alike
        rows, bucket = rows[rest], bucket[rest]


def _components(edges: list[tuple[np.ndarray, np.ndarray]], nodes: int) -> np.ndarray:
    a, b = (np.concatenate(side) for side in zip(*edges, strict=True))
    graph = coo_array((np.ones(len(a), dtype=np.bool_), (a, b)), shape=(nodes, nodes))
    labels: np.ndarray = connected_components(graph, directed=False)[1]
    return labels


def _normal(message: Message) -> list[object]:
    return [
        message["role"],
        _plain(text_of(message)),
        _plain(message.get("reasoning") or message.get("reasoning_content") or ""),
        message.get("tool_calls"),
    ]


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=repr)  # Parquet holds dates and bytes too


def _plain(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).split())


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
