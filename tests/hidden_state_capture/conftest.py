"""Samples for the writer, and a writer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from draftsmith.core.manifest import write_manifest
from draftsmith.core.store import INDEX, INDEX_SCHEMA
from draftsmith.hidden_state_capture.shard import committed_shards
from draftsmith.hidden_state_capture.writer import SampleStates, ShardWriter, WriterConfig

GIB = 1024**3


@pytest.fixture
def sample(random_states: Callable[..., torch.Tensor]) -> Callable[..., SampleStates]:
    """`sample("a", tokens=8)`: states [8, 3 + 1, 16] of a sample whose reply is its second half."""

    def make(name: str, tokens: int = 8, spans: Any = None, ready: Any = bool, **values: Any) -> SampleStates:
        states = random_states(tokens, sum(name.encode()), columns=4, hidden=16)
        return SampleStates(name, list(range(tokens)), spans or [[tokens // 2, tokens]], states, ready, **values)

    return make


@pytest.fixture
def writer(tmp_path: Path) -> ShardWriter:
    """Writes into one shard, and never waits."""
    return ShardWriter(tmp_path / "states", WriterConfig(GIB, GIB))


MANIFEST = {
    "target": {
        "path": "t", "local_path": "/models/t", "revision": None, "num_layers": 6, "hidden_size": 16,
        "vocab_size": 512, "dtype": "bfloat16",
    },
    "layer_ids": [1, 2, 3],
    "layer_id_convention": "vllm: id k is the residual stream after k layers",
    "last_state": {"layer_id": 6, "norm": "pre", "norm_form": "rms", "eps": 1e-6},
    "probe": {"norm_form": "rms", "eps": 1e-6},
}  # fmt: skip


@pytest.fixture
def finished() -> Callable[..., None]:
    """`finished(folder, "bf16")`: makes a complete store of the shards that are committed there."""

    def finish(folder: Path, storage: str, inputs: Any = None, **manifest: Any) -> None:
        sidecars = committed_shards(folder)
        rows = [
            {**row, "shard": n, "split": "train", "source": "s"} for n, s in enumerate(sidecars) for row in s["rows"]
        ]
        pq.write_table(pa.Table.from_pylist(rows, schema=INDEX_SCHEMA), folder / INDEX)
        outputs = {**MANIFEST, "storage": storage, "shards": [s["shard"] for s in sidecars], "rejected": []}
        write_manifest(folder, "capture", inputs or {}, {**outputs, **manifest})
        for sidecar in folder.glob("shard-*.json"):
            sidecar.unlink()

    return finish


@pytest.fixture
def make_store(sample: Callable[..., SampleStates], finished: Callable[..., None]) -> Callable[..., Path]:
    """`make_store(folder, ["a", "b"], shard_bytes=1)`: a complete store of these samples; a shard each by default."""

    def make(folder: Path, names: list[str], shard_bytes: int = 1, storage: str = "bf16", **manifest: Any) -> Path:
        inputs = {"samples_manifest_sha256": "0", "target": {"revision": None}, "layer_ids": [1, 2, 3]}
        inputs |= {"storage": storage, **manifest.pop("inputs", {})}
        writer = ShardWriter(folder, WriterConfig(shard_bytes, GIB, storage))
        for i, name in enumerate(names):
            writer.put(sample(name, tokens=6 + i % 3))
        writer.flush()
        finished(folder, storage, inputs, **manifest)
        return folder

    return make
