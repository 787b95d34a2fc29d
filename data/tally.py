"""What became of every row: counted by source and reason, listed with file and line, nothing kept in memory."""

import json
from array import array
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.core.config import Config
from draftsmith.core.conversations import Conversation, Skipped
from draftsmith.core.errors import UserError
from draftsmith.core.samples import Sample

_PERCENTILES = {"p5": 5, "p50": 50, "p95": 95, "max": 100}


@dataclass
class SourceTally:
    """Counts of one source; lengths are of samples, in tokens."""

    shapes: Counter[str] = field(default_factory=Counter)
    conversations: int = 0
    samples: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    removed: Counter[str] = field(default_factory=Counter)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    authors: Counter[str] = field(default_factory=Counter)
    lengths: "array[int]" = field(default_factory=lambda: array("I"))
    reply_lengths: "array[int]" = field(default_factory=lambda: array("I"))


class Tally:
    """Counts and lists rows as they are read, removed, skipped and used.

    Args:
        names: of the sources.
        listing: file that every row that is not used is written to, an object a line.
    """

    def __init__(self, names: list[str], listing: Path) -> None:
        self.sources = {name: SourceTally() for name in names}
        self._splits: Counter[str] = Counter()
        # Text that is no Unicode is among what is listed.
        self._listing = listing.open("w", encoding="utf-8", errors="backslashreplace")
        self._first: Skipped | None = None

    def skip(self, row: Skipped) -> None:
        """A row that cannot be used; it counts against `data.max_skip_share`."""
        self._first = self._first or row
        self._source(row.source).skipped[row.reason] += 1
        self._list(row)

    def remove(self, row: Skipped, listed_only: bool = False) -> None:
        """A row that could be used and shall not be: a duplicate, or one of an evaluation set.

        Args:
            row: where and why.
            listed_only: it is used all the same.
        """
        self._source(row.source).removed[row.reason + (" (used)" if listed_only else "")] += 1
        self._list(row)

    def use(self, sample: Sample) -> None:
        """A row that became a sample."""
        source = self._source(sample.source)
        replies = [sample.input_ids[start:end] for start, end in sample.loss_spans]
        source.samples += 1
        source.finish_reasons[sample.finish_reason] += 1
        source.authors[sample.author] += 1
        source.lengths.append(len(sample.input_ids))
        source.reply_lengths.append(sum(map(len, replies)))
        self._splits[sample.split] += 1

    def check(self, config: Config, used: int) -> None:
        """Stop where too many rows cannot be used.

        Raises:
            UserError: their share is above `data.max_skip_share`; it names reasons and the first place.
        """
        reasons = self._sum("skipped")
        skipped = reasons.total()
        if self._first and skipped > config.data.max_skip_share * (used + skipped):
            said = ", ".join(f"{n} {reason}" for reason, n in reasons.most_common())
            raise UserError(
                f"{skipped} of {used + skipped} rows cannot be used ({skipped / (used + skipped):.1%}; "
                f"data.max_skip_share is {config.data.max_skip_share:.1%}): {said}. "
                f"The first: {self._first.place}: {self._first.detail}.",
                "Mend the rows, or raise data.max_skip_share.",
            )

    def figures(self) -> dict[str, Any]:
        """What the manifest says of the samples: totals, and the same by source."""
        lengths, replies = (
            np.concatenate([np.asarray(getattr(s, key)) for s in self.sources.values()])
            for key in ("lengths", "reply_lengths")
        )
        return {
            "counts": {split: self._splits[split] for split in ("train", "eval")},
            "tokens": int(lengths.sum()),
            "reply_tokens": int(replies.sum()),
            "lengths": _percentiles(lengths),
            "reply_lengths": _percentiles(replies),
            **{key: dict(self._sum(key)) for key in ("shapes", "finish_reasons", "authors", "skipped", "removed")},
            "sources": {name: self._of_source(name) for name in self.sources},
        }

    def close(self) -> None:
        """Finish the listing."""
        self._listing.close()

    def _of_source(self, name: str) -> dict[str, Any]:
        source = self.sources[name]
        return {
            "conversations": source.conversations,
            "samples": source.samples,
            "tokens": sum(source.lengths),
            "reply_tokens": sum(source.reply_lengths),
            "lengths": _percentiles(np.asarray(source.lengths)),
            "reply_lengths": _percentiles(np.asarray(source.reply_lengths)),
            **{k: dict(getattr(source, k)) for k in ("shapes", "finish_reasons", "authors", "skipped", "removed")},
        }

    def _sum(self, key: str) -> Counter[str]:
        return sum((getattr(source, key) for source in self.sources.values()), Counter())

    def _source(self, name: str) -> SourceTally:
        return self.sources[name or next(iter(self.sources))]

    def _list(self, row: Skipped) -> None:
        self._listing.write(json.dumps(asdict(row), ensure_ascii=False) + "\n")


def skipped(row: Conversation, reason: str, detail: str) -> Skipped:
    """A conversation that is not used."""
    return Skipped(row.place, reason, detail, row.source)


def _percentiles(lengths: np.ndarray) -> dict[str, int]:
    """Of the values that occur; all zero where there are none."""
    if not len(lengths):
        return dict.fromkeys(_PERCENTILES, 0)
    found = np.percentile(lengths, list(_PERCENTILES.values()), method="nearest")
    return {name: int(value) for name, value in zip(_PERCENTILES, found, strict=True)}
