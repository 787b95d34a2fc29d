"""What there is to capture: which samples, in which shares, how many bytes."""

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from draftsmith.core.config import Config
from draftsmith.core.errors import UserError
from draftsmith.core.samples import Sample, iter_samples
from draftsmith.core.store import bytes_per_row
from draftsmith.core.target import Target, context_of

# The engine always makes a token, and speculates one more.
_BEYOND_PROMPT = 2


@dataclass(frozen=True)
class Head:
    """A sample without its ids: a million of them fit into memory.

    Attributes:
        sample_id, split, source: as in `samples/`.
        tokens: T.
        labels: M, rows whose next token is a reply token.
    """

    sample_id: str
    tokens: int
    labels: int
    split: str
    source: str

    @classmethod
    def of(cls, sample: Sample) -> "Head":
        """Of a whole sample."""
        labels = sum(end - max(start, 1) for start, end in sample.loss_spans)
        return cls(sample.sample_id, len(sample.input_ids), labels, sample.split, sample.source)


def read_heads(folder: Path) -> list[Head]:
    """Heads of all samples, in file order.

    Raises:
        UserError: two samples have one id: one would take the other's place.
    """
    heads = [Head.of(s) for s in iter_samples(folder)]
    if twice := [i for i, count in Counter(h.sample_id for h in heads).items() if count > 1]:
        raise UserError(
            f"{folder}: {len(twice)} sample ids are there twice, e.g. `{twice[0]}`.",
            "Give every conversation an id of its own and run `draftsmith prepare --fresh`.",
        )
    return heads


def engine_length(config: Config, target: Target) -> int:
    """`max_model_len` of the capturing engine: what the samples need, and the target's context at most."""
    needed = config.data.max_length + _BEYOND_PROMPT
    context = context_of(target.hf_config)
    return needed if context is None else min(needed, context)


def too_long(heads: Sequence[Head], config: Config, target: Target) -> list[Head]:
    """Samples that the target's context does not hold; they are listed, not captured."""
    return [h for h in heads if h.tokens > longest_sample(config, target)]


def longest_sample(config: Config, target: Target) -> int:
    """Tokens of the longest sample that the target's context holds."""
    return engine_length(config, target) - _BEYOND_PROMPT


def shares(heads: Sequence[Head], count: int) -> list[list[Head]]:
    """`count` shares of nearly equal tokens, the same ones on every machine."""
    by_tokens: list[tuple[int, int]] = [(0, i) for i in range(count)]
    found: list[list[Head]] = [[] for _ in range(count)]
    for head in sorted(heads, key=lambda h: (-h.tokens, h.sample_id)):
        tokens, least = by_tokens[0]
        found[least].append(head)
        heapq.heapreplace(by_tokens, (tokens + head.tokens, least))
    return found


def store_bytes(heads: Sequence[Head], aux_layers: int, hidden: int, storage: str) -> int:
    """Bytes that these samples' shards take."""
    per_token, per_label = bytes_per_row(storage, aux_layers, hidden)
    return sum(h.tokens * per_token + h.labels * per_label for h in heads)


def windows(folder: Path, wanted: set[str], tokens: int) -> Iterator[Sample]:
    """The wanted samples of `folder`, longest first within windows of so many tokens; memory is one window.

    A batch then holds like lengths, and the last step is not one long straggler.
    """
    window: list[Sample] = []
    held = 0
    for sample in iter_samples(folder):
        if sample.sample_id in wanted:
            window.append(sample)
            held += len(sample.input_ids)
        if held >= tokens:
            yield from sorted(window, key=lambda s: -len(s.input_ids))
            window, held = [], 0
    yield from sorted(window, key=lambda s: -len(s.input_ids))
