"""One measured pass over prompts, on whatever serves: what is asked, and what came of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from draftsmith.core.replay import Table
from draftsmith.eval.prompts import Prompt


@dataclass(frozen=True)
class Job:
    """Requests of one pass: those of a set, at a temperature, so many in flight, with seeds from `seed` on."""

    set: str
    temperature: float
    concurrency: int
    prompts: Sequence[Prompt]
    seed: int = 0


@dataclass(frozen=True)
class Counters:
    """A server's speculation counters: since its start, or over a pass. Zeros and none without a draft."""

    drafts: int = 0
    accepted: int = 0
    per_position: tuple[int, ...] = ()

    def since(self, before: "Counters") -> "Counters":
        """What was counted after `before`."""
        earlier = before.per_position or (0,) * len(self.per_position)
        return Counters(
            self.drafts - before.drafts,
            self.accepted - before.accepted,
            tuple(a - b for a, b in zip(self.per_position, earlier, strict=True)),
        )


@dataclass(frozen=True)
class Pass:
    """What came of a job; everything by request is in the order of its prompts.

    Attributes:
        seconds: wall time.
        replies: output ids.
        finish_reasons: `stop` or `length`.
        outputs: times that tokens came: the first of them from the prefill, every other from a round.
        first_token: seconds from asking to the first token.
        between_tokens: mean seconds between tokens after the first; nan for a reply of one.
        counters: differences of the server's own counters.
    """

    seconds: float
    replies: list[list[int]]
    finish_reasons: list[str]
    outputs: list[int]
    first_token: list[float]
    between_tokens: list[float]
    counters: Counters = Counters()

    @property
    def acceptance_length(self) -> float:
        """By the server's counters; 1 without a draft."""
        return 1.0 + self.counters.accepted / max(1, self.counters.drafts)

    @property
    def tokens(self) -> int:
        """Output tokens."""
        return sum(map(len, self.replies))

    @property
    def table(self) -> Table:
        """[requests, 2]: rounds and accepted drafts of every request, as its outputs show them.

        Drafts that were accepted past a reply's end are in the counters but not in here.
        """
        rounds = np.array(self.outputs, dtype=np.float64) - 1
        lengths = np.array([len(r) for r in self.replies], dtype=np.float64)
        return np.stack([rounds, np.maximum(lengths - 1 - rounds, 0.0)], axis=1)


@dataclass
class Clock:
    """When the tokens of one request came."""

    asked: float
    first: float = 0.0
    last: float = 0.0
    outputs: int = 0

    def tick(self, now: float) -> None:
        """Tokens came."""
        self.first = self.first or now
        self.last = now
        self.outputs += 1

    def between(self, tokens: int) -> float:
        """Mean seconds between `tokens` tokens."""
        return (self.last - self.first) / (tokens - 1) if tokens > 1 else float("nan")


class Side(Protocol):
    """Something that serves: an engine of ours with or without a draft, or a running server."""

    @property
    def k(self) -> int:
        """Drafted tokens a round; 0 without a draft."""

    def measure(self, job: Job) -> Pass:
        """Serve a job."""
