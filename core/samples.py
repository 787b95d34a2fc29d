"""`samples/`: Parquet rows that are token-exact as served.

| column | type | meaning |
|---|---|---|
| sample_id | string | unique; conversation id and turn, `demo-a-001/0` |
| input_ids | list<int32> | prompt and reply ids, as the engine was given and emitted them |
| loss_spans | list<fixed_size_list<int32>[2]> | [start, end) of every reply in input_ids |
| source | string | name of the source |
| finish_reason | string | `stop` or `length`, from the engine |
| split | string | `train` or `eval` |
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from draftsmith.core.atomic import write_atomic
from draftsmith.core.damage import reading

FILE = "samples.parquet"
SCHEMA = pa.schema(
    [
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("input_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_spans", pa.list_(pa.list_(pa.int32(), 2)), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("split", pa.string(), nullable=False),
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

    @property
    def loss_mask(self) -> np.ndarray:
        """uint8 [T]: 1 where the token is a reply token of the target, r[t] of the alignment."""
        mask = np.zeros(len(self.input_ids), dtype=np.uint8)
        for start, end in self.loss_spans:
            mask[start:end] = 1
        return mask

    @property
    def first_prompt(self) -> list[int]:
        """Ids up to the first reply: what a server would be sent."""
        return self.input_ids[: self.loss_spans[0][0]]


def write_samples(folder: Path, samples: Iterable[Sample]) -> None:
    """Write `folder/samples.parquet`, whole or not at all."""
    rows = [vars(sample) for sample in samples]
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    write_atomic(folder / FILE, lambda tmp: pq.write_table(table, tmp, compression="zstd"))


def read_samples(folder: Path, split: str | None = None) -> list[Sample]:
    """Rows of `folder`, of one split or of all, in file order."""
    with reading(folder / FILE, "Run `draftsmith prepare --fresh`."):
        rows = pq.read_table(folder / FILE, schema=SCHEMA).to_pylist()
    samples = (Sample(**{**row, "loss_spans": [(a, b) for a, b in row["loss_spans"]]}) for row in rows)
    return [s for s in samples if split in (None, s.split)]
