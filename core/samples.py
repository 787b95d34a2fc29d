"""`samples/`: Parquet rows that are token-exact as served.

| column | type | meaning |
|---|---|---|
| sample_id | string | unique; conversation id and turn, `demo-a-001/0`; of a second reply `demo-a-001/0~1` |
| input_ids | list<int32> | prompt and reply ids, as the engine was given and emitted them |
| loss_spans | list<fixed_size_list<int32>[2]> | [start, end) of every reply in input_ids |
| source | string | name of the source |
| finish_reason | string | `stop` or `length`, from the engine |
| split | string | `train` or `eval` |
| author | string | who wrote the replies; `target` where they were regenerated |
| conversation_id | string | of the conversation that the row is a turn of |
| turn | int32 | which reply of it the row ends with, from 0 |
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from draftsmith.core.damage import reading

FILE = "samples.parquet"
_GROUP_TOKENS = 1 << 20
_READ_ROWS = 512
SCHEMA = pa.schema(
    [
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("input_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_spans", pa.list_(pa.list_(pa.int32(), 2)), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("split", pa.string(), nullable=False),
        pa.field("author", pa.string(), nullable=False),
        pa.field("conversation_id", pa.string(), nullable=False),
        pa.field("turn", pa.int32(), nullable=False),
    ]
)


@dataclass(frozen=True)
class Sample:
    """One row of `samples/`; see the module's table."""

    sample_id: str
    input_ids: list[int]
    loss_spans: list[tuple[int, int]]
    source: str
    finish_reason: str
    split: str
    author: str = "target"
    conversation_id: str = ""
    turn: int = 0

    @property
    def loss_mask(self) -> np.ndarray:
        """uint8 [T]: 1 where the token is a reply token of the target, r[t] of the alignment."""
        mask = np.zeros(len(self.input_ids), dtype=np.uint8)
        for start, end in self.loss_spans:
            mask[start:end] = 1
        return mask

    @property
    def segments(self) -> list[tuple[bool, list[int]]]:
        """(supervised, ids) of every stretch of the row, in order; no stretch is empty."""
        cuts = [0, *(edge for span in self.loss_spans for edge in span), len(self.input_ids)]
        parts = [(i % 2 == 1, self.input_ids[a:b]) for i, (a, b) in enumerate(itertools.pairwise(cuts))]
        return [part for part in parts if part[1]]

    @property
    def prompts(self) -> list[list[int]]:
        """Ids before each reply: what a server was sent, turn by turn."""
        return [self.input_ids[:start] for start, _ in self.loss_spans]


class SampleWriter:
    """Writes `samples.parquet` row group by row group; memory is one row group.

    To be used inside a folder that appears as a whole (`atomic_folder`).
    """

    def __init__(self, folder: Path) -> None:
        self._writer = pq.ParquetWriter(folder / FILE, SCHEMA, compression="zstd")
        self._rows: list[dict[str, Any]] = []
        self._tokens = 0

    def __enter__(self) -> "SampleWriter":
        return self

    def __exit__(self, *error: object) -> None:
        with self._writer:
            if error[0] is None:
                self._flush()

    def write(self, sample: Sample) -> None:
        """Add one row."""
        self._rows.append(vars(sample))
        self._tokens += len(sample.input_ids)
        if self._tokens >= _GROUP_TOKENS:
            self._flush()

    def _flush(self) -> None:
        self._writer.write_table(pa.Table.from_pylist(self._rows, schema=SCHEMA))
        self._rows, self._tokens = [], 0


def write_samples(folder: Path, samples: Iterable[Sample]) -> None:
    """Write `folder/samples.parquet`."""
    with SampleWriter(folder) as writer:
        for sample in samples:
            writer.write(sample)


def iter_samples(folder: Path, split: str | None = None) -> Iterator[Sample]:
    """Rows of `folder`, of one split or of all, in file order; memory is one row group.

    Raises:
        UserError: the file is missing or damaged.
    """
    with reading(folder / FILE, "Run `draftsmith prepare --fresh`."), pq.ParquetFile(folder / FILE) as table:
        for batch in table.iter_batches(batch_size=_READ_ROWS):
            for row in batch.to_pylist():
                if split in (None, row["split"]):
                    yield _sample(row)


def read_samples(folder: Path, split: str | None = None) -> list[Sample]:
    """All rows of `iter_samples`."""
    return list(iter_samples(folder, split))


def reply_counts(folder: Path, vocab_size: int) -> dict[tuple[str, str], np.ndarray]:
    """(source, split) -> int64 [V]: how often each token comes in its replies; memory is one row group.

    Raises:
        UserError: the file is missing or damaged.
    """
    found: dict[tuple[str, str], np.ndarray] = {}
    columns = ["input_ids", "loss_spans", "source", "split"]
    with reading(folder / FILE, "Run `draftsmith prepare --fresh`."), pq.ParquetFile(folder / FILE) as table:
        for batch in table.iter_batches(batch_size=_READ_ROWS, columns=columns):
            rows = {name: batch.column(name) for name in columns}
            ids, starts = rows["input_ids"].values.to_numpy(), rows["input_ids"].offsets.to_numpy()
            spans, sources, splits = (rows[name].to_pylist() for name in columns[1:])
            replies: dict[tuple[str, str], list[np.ndarray]] = {}
            for at, of_row, *key in zip(starts[:-1], spans, sources, splits, strict=True):
                replies.setdefault((key[0], key[1]), []).extend(ids[at + a : at + b] for a, b in of_row)
            for name, parts in replies.items():
                counted = np.bincount(np.concatenate(parts), minlength=vocab_size)
                found[name] = found[name] + counted if name in found else counted
    return found


class TrainSamples:
    """The training samples by number: their place in the order of sample ids, as in `HiddenStateStore.numbers`.

    Token ids stay in Arrow's form, 4 bytes each.

    Attributes:
        ids: sample ids, ascending.
        lengths: tokens of every sample.
        labels: of these, rows whose next token is a reply token.
    """

    def __init__(self, folder: Path, longest: int | None = None) -> None:
        """Read `folder/samples.parquet`.

        Args:
            folder: `samples/` of a run.
            longest: longer ones are left out, as the target cannot read them; None: none is.

        Raises:
            UserError: the file is missing or damaged.
        """
        self._batches: list[pa.RecordBatch] = []
        found: list[tuple[str, int, int, int, int]] = []
        with reading(folder / FILE, "Run `draftsmith prepare --fresh`."), pq.ParquetFile(folder / FILE) as table:
            for batch in table.iter_batches(batch_size=_READ_ROWS):
                lengths = batch.column("input_ids").value_lengths().to_pylist()
                columns = (batch.column(name).to_pylist() for name in ("sample_id", "split", "loss_spans"))
                for row, (name, split, spans) in enumerate(zip(*columns, strict=True)):
                    if split == "train" and (longest is None or lengths[row] <= longest):
                        labels = sum(end - max(start, 1) for start, end in spans)
                        found.append((name, lengths[row], labels, len(self._batches), row))
                self._batches.append(batch)
        found.sort()
        self.ids = [f[0] for f in found]
        self.lengths, self.labels = [f[1] for f in found], [f[2] for f in found]
        self._places = [f[3:] for f in found]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, number: int) -> Sample:
        """One sample with its tokens."""
        batch, row = self._places[number]
        return _sample(self._batches[batch].slice(row, 1).to_pylist()[0])


def _sample(row: dict[str, Any]) -> Sample:
    return Sample(**{**row, "loss_spans": [(a, b) for a, b in row["loss_spans"]]})
