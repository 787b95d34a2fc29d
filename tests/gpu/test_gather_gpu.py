"""The gather on CUDA: through reused pinned memory on a side stream, bit for bit what the CPU gathers."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.hidden_state_capture.gather import Gatherer, Held, SampleRows
from draftsmith.hidden_state_capture.shard import committed_shards
from draftsmith.hidden_state_capture.writer import ShardWriter, WriterConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")]
BLOCKS, PER_BLOCK, STATES, HIDDEN = 512, 16, 4, 64


@pytest.fixture
def cache():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(BLOCKS, PER_BLOCK, STATES, HIDDEN, generator=generator).to(torch.bfloat16)


def requests(count, seed=0):
    draw = torch.Generator().manual_seed(seed)
    for i in range(count):
        tokens = int(torch.randint(2, 90, (), generator=draw))
        blocks = torch.randperm(BLOCKS, generator=draw)[: -(-tokens // PER_BLOCK)].tolist()
        yield Held(f"s{i}", blocks, SampleRows.of(f"s{i}", [i] * tokens, [(tokens // 2, tokens)]))


def named(held, name):
    return Held(name, held.block_ids, dataclasses.replace(held.rows, sample_id=name))


@pytest.mark.parametrize("storage", ["bf16", "fp8"])
@pytest.mark.parametrize("layout", ["0.24", "0.32"])
def test_what_comes_over_is_what_a_cpu_gathers(cache, layout, storage):
    on_gpu = cache.cuda() if layout == "0.24" else cache.cuda().transpose(1, 2).contiguous().transpose(1, 2)
    asked = list(requests(40))
    gpu, cpu = (Gatherer(c, storage, 1 << 20, 1 << 17) for c in (on_gpu, cache))
    for (_, mine, event), (_, theirs, _) in zip(gpu.take(asked), cpu.take(asked), strict=True):
        found, expected = mine.collect(), theirs.collect()
        assert event.query() and found.keys() == expected.keys()
        for name in expected:
            assert torch.equal(found[name].view(torch.uint8), expected[name].view(torch.uint8)), name
        mine.release()


def test_a_small_ring_goes_round_many_times_while_the_cache_is_written_over(cache, tmp_path):
    """The engine's stream overwrites blocks once their event has happened, as vLLM does with blocks it got back."""
    on_gpu = cache.cuda()
    gatherer = Gatherer(on_gpu, "bf16", ring_bytes=1 << 18, batch_bytes=1 << 16)
    writer = ShardWriter(tmp_path, WriterConfig(1 << 18, 1 << 18, threads=3))
    asked = [named(h, f"s{n}-{h.request_id}") for n in range(10) for h in requests(20, seed=n)]
    original = cache.cuda()
    for held in asked:
        [(_, batch, event)] = gatherer.take([held])
        writer.put(batch)
        event.synchronize()
        on_gpu[held.block_ids] = 9.0
        on_gpu.copy_(original)
    writer.flush()
    expected = {h.request_id: cache[h.block_ids].flatten(0, 1)[: len(h.rows.input_ids_T)] for h in asked}
    seen = 0
    for sidecar in committed_shards(tmp_path):
        tensors = load_file(tmp_path / sidecar["shard"]["file"])
        for row in sidecar["rows"]:
            rows = slice(row["start"], row["start"] + row["length"])
            assert torch.equal(tensors["aux_states"][rows], expected[row["sample_id"]][:, :-1])
            seen += 1
    assert seen == len(asked)


def test_taking_does_not_wait_for_the_gpu(cache):
    on_gpu, asked = cache.cuda(), list(requests(20))
    gatherer = Gatherer(on_gpu, "bf16", 1 << 24, 1 << 22)
    for _, batch, _ in gatherer.take(asked):  # pinned memory and kernels are there
        batch.collect()
        batch.release()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second of the engine's stream
    events = [event for _, _, event in gatherer.take(asked)]
    assert not any(event.query() for event in events), "the side stream did not wait for the engine's"
    torch.cuda.synchronize()
    assert all(event.query() for event in events)
