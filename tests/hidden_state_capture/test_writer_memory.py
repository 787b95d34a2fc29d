"""What the writer holds while it seals: no batch, few files."""

import gc
import os
import weakref

import pytest
import torch

from draftsmith.hidden_state_capture.gather import Batch, SampleRows
from draftsmith.hidden_state_capture.shard import committed_shards
from draftsmith.hidden_state_capture.writer import ShardWriter, WriterConfig

pytestmark = pytest.mark.usefixtures("one_thread")
GIB = 1024**3


def test_the_engine_has_its_memory_back_before_a_full_shard_is_sealed(tmp_path, sample):
    # Sealing hashes and syncs a gigabyte; the ring of pinned memory would be full meanwhile, and the engine wait.
    writer, seen = ShardWriter(tmp_path, WriterConfig(1, GIB)), []
    for name in "abc":
        batch = sample(name).batch("bf16")
        batch.release = lambda: seen.append(len(committed_shards(tmp_path)))
        writer.put(batch)
    writer.flush()
    assert seen == [0, 1, 2] and len(committed_shards(tmp_path)) == 3


def test_a_batch_is_gone_from_memory_when_it_counts_no_more(tmp_path, sample):
    held, alive = sample("a").batch("bf16").collect(), []
    there = weakref.ref(held["aux_states"])

    class Watched(ShardWriter):
        def _seal_full(self, lane):
            gc.collect()
            alive.append((there() is not None, self._pending))
            super()._seal_full(lane)

    writer = Watched(tmp_path, WriterConfig(1, GIB))
    batch = Batch([SampleRows.of("a", list(range(8)), [[4, 8]])], 99, lambda kept=held: dict(kept), bool)
    del held
    writer.put(batch)
    del batch
    writer.flush()
    assert alive[0] == (False, 0)


def test_a_batch_of_many_shards_keeps_few_files_open(tmp_path, sample):
    names, most = [f"s{i:03}" for i in range(60)], []
    tensors = {}
    samples = [SampleRows.of(name, list(range(8)), [[4, 8]]) for name in names]
    for name in names:
        for key, tensor in sample(name).batch("bf16").collect().items():
            tensors.setdefault(key, []).append(tensor)
            most.append(len(os.listdir("/proc/self/fd")))
    before = most[-1]

    def collect():
        most.clear()
        return {key: torch.cat(parts) for key, parts in tensors.items()}

    class Watched(ShardWriter):
        def _add_one(self, lane, one, given):
            super()._add_one(lane, one, given)
            most.append(len(os.listdir("/proc/self/fd")))

    writer = Watched(tmp_path, WriterConfig(1, GIB))
    writer.put(Batch(samples, 1, collect, bool))
    writer.flush()
    assert [row["sample_id"] for s in committed_shards(tmp_path) for row in s["rows"]] == names
    assert max(most) < before + 20
