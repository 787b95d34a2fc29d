"""The spool's writer: each shard as its slots say, whatever comes last, and memory that does not grow with the run."""

import gc

import pytest
from safetensors.torch import load_file

from draftsmith.core.store import shard_name
from draftsmith.hidden_state_capture.shard import Tail, committed_shards
from draftsmith.hidden_state_capture.spool_writer import SpoolWriter
from draftsmith.hidden_state_capture.writer import WriterConfig

pytestmark = pytest.mark.usefixtures("one_thread")
GIB = 1024**3


def slot(shard, samples):
    return {"shard": shard, "samples": samples, "steps": [shard], "made_from": "x"}


def held_bytes():
    """Of the tails of all shards, sealed or not, that something still refers to."""
    gc.collect()
    return sum(len(one._bytes) for one in gc.get_objects() if isinstance(one, Tail))


def test_sealed_shards_leave_nothing_in_memory(tmp_path, sample):
    before, writer = held_bytes(), SpoolWriter(tmp_path, WriterConfig(GIB, GIB, threads=2))
    seen = []
    for number in range(30):
        writer.put(sample("a", slot=slot(number, 2)))
        writer.put(sample("b", slot=slot(number, 2)))
        writer.flush()
        seen.append(held_bytes() - before)
    assert len(committed_shards(tmp_path)) == 30
    assert seen[-1] <= seen[2], f"a run holds more with every shard: {seen}"


@pytest.mark.parametrize("bad", [["b"], ["a"], ["a", "b"]])
def test_a_shard_ends_with_its_last_sample_though_that_is_rejected(tmp_path, sample, bad):
    writer = SpoolWriter(tmp_path, WriterConfig(GIB, GIB, threads=2))
    for name in "ab":
        given = sample(name, slot=slot(3, 2))
        if name in bad:
            given.states_TSH[1] = float("nan")
        writer.put(given)
    writer.flush()
    (sidecar,) = committed_shards(tmp_path)
    assert sorted(one["sample_id"] for one in sidecar["rejected"]) == bad
    assert [row["sample_id"] for row in sidecar["rows"]] == [name for name in "ab" if name not in bad]
    if sidecar["rows"]:
        assert load_file(tmp_path / shard_name(3))["input_ids"].tolist() == list(range(8))
