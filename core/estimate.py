"""How many samples and tokens a run has: counted where it is prepared, else estimated from its sources."""

import json
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pyarrow.parquet as pq

from draftsmith.core.config import Config, SourceConfig
from draftsmith.core.conversations import Conversation, text_of
from draftsmith.core.errors import UserError
from draftsmith.core.manifest import read_manifest
from draftsmith.core.run import RunFolder
from draftsmith.core.sources import files_of, read_conversations

# Conversations of a source that are read for its mean lengths; characters of a token, of prose in most languages.
_READ, _CHARACTERS = 200, 4.0


@dataclass(frozen=True)
class Amount:
    """What a run has to capture and to train on.

    Attributes:
        samples, tokens, reply_tokens: of all samples.
        train_share: of the tokens.
        longest: tokens that no sample exceeds.
        how: where the figures are from, in words.
        prepared: the samples are there already.
    """

    samples: int
    tokens: int
    reply_tokens: int
    train_share: float
    longest: int
    how: str
    prepared: bool = False


def stated(config: Config, tokens: int, length: float, supervised: float) -> Amount:
    """As the user says."""
    longest = config.data.max_length
    share = 1 - config.data.eval_share
    return Amount(max(1, round(tokens / length)), tokens, round(tokens * supervised), share, longest, "as stated")


def amount_of(config: Config, run: RunFolder) -> Amount:
    """Of a run that may not be prepared yet.

    Raises:
        UserError: a source is missing, or its size cannot be known before it is read.
    """
    if manifest := read_manifest(run.samples):
        counts = manifest["counts"]
        samples = counts["train"] + counts["eval"]
        share = counts["train"] / max(1, samples)
        longest = int(manifest["lengths"]["max"])
        how = f"counted in {run.samples}"
        return Amount(samples, manifest["tokens"], manifest["reply_tokens"], share, longest, how, prepared=True)
    parts = [_of_source(config, source) for source in config.data.sources]
    tokens, replies = (round(sum(p[i] for p in parts)) for i in (1, 2))
    how = f"estimated from every source's size and first {_READ} conversations, at {_CHARACTERS:g} characters a token"
    if config.data.replies == "regenerate":
        how += f", every reply of data.sampling.max_tokens ({config.data.sampling.max_tokens}), which is the most"
    return Amount(
        round(sum(p[0] for p in parts)), tokens, replies, 1 - config.data.eval_share, config.data.max_length, how
    )


def _of_source(config: Config, source: SourceConfig) -> tuple[float, float, float]:
    """Conversations, tokens and reply tokens."""
    read = [
        c for c in islice(read_conversations(source, roles=config.data.roles), _READ) if isinstance(c, Conversation)
    ]
    if not read:
        raise UserError(f"data source `{source.path}`: no usable row among its first {_READ}.", "Check its rows.")
    lengths = [_tokens(config, c) for c in read]
    count = float(len(read)) if len(read) < _READ else _count(source)
    count = min(count, source.limit or count) * source.weight
    tokens, replies = (count * sum(n[i] for n in lengths) / len(lengths) for i in (0, 1))
    return count, tokens, replies


def _tokens(config: Config, row: Conversation) -> tuple[float, float]:
    """Tokens of a conversation with its replies, and of these alone; no more than data.max_length."""
    data = config.data
    if row.tokens:
        prompt = float(len(row.tokens[-1].prompt_ids))
        replies = float(sum(len(t.reply_ids or ()) for t in row.tokens))
    else:
        said = [(m["role"] == "assistant", len(text_of(m)) / _CHARACTERS) for m in row.messages]
        prompt, replies = (sum(n for is_reply, n in said if is_reply == wanted) for wanted in (False, True))
    if data.replies == "regenerate":
        replies = float(data.sampling.max_tokens * max(1, len(row.user_turns)))
    total = min(prompt + replies, float(data.max_length))
    return total, min(replies, total)


def _count(source: SourceConfig) -> float:
    """Rows of a source: exact for Parquet, by size and mean row for text files.

    Raises:
        UserError: nothing tells before it is read.
    """
    if source.limit:
        return float(source.limit)
    try:
        return sum(_rows_in(file) for file in files_of(source.path))
    except (UserError, ValueError):
        raise UserError(
            f"data source `{source.path}`: how many rows it has is not known before it is read.",
            "Give its `limit`, or say --tokens.",
        ) from None


def _rows_in(file: Path) -> float:
    if file.suffix == ".parquet":
        with pq.ParquetFile(file) as table:
            return float(table.metadata.num_rows)
    if file.suffix not in (".jsonl", ".ndjson", ".json"):
        raise ValueError("compressed")
    with file.open("rb") as data:
        head = data.read(1 << 20)
    rows = _elements(head) if head.lstrip()[:1] == b"[" else max(1, head.count(b"\n"))
    return rows * file.stat().st_size / max(1, len(head))


def _elements(head: bytes) -> int:
    """Whole elements in the beginning of a JSON array."""
    text, decoder, at, count = head.decode("utf-8", errors="ignore").lstrip()[1:], json.JSONDecoder(), 0, 0
    while True:
        while text[at : at + 1] in (" ", "\t", "\r", "\n", ","):
            at += 1
        try:
            _, at = decoder.raw_decode(text, at)
        except ValueError:
            return max(1, count)
        count += 1
