"""The gather out of the engine's cache: every layout, blocks in any order, many requests at once."""

import numpy as np
import pytest
import torch

from draftsmith.hidden_state_capture.gather import Gatherer, Held, SampleRows

BLOCKS, PER_BLOCK, STATES, HIDDEN = 24, 4, 4, 16


@pytest.fixture
def cache():
    """[blocks, tokens of a block, states, hidden] of distinct rows."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(BLOCKS, PER_BLOCK, STATES, HIDDEN, generator=generator).to(torch.bfloat16)


def held(name, tokens, blocks, spans=((2, 4),), **rest):
    return Held(name, blocks, SampleRows.of(name, list(range(tokens)), spans, **rest))


def as_vllm_lays_it_out(cache, layout):
    # 0.32 keeps [blocks, states, block, hidden]; its transposed view is what the gatherer is given.
    return cache if layout == "0.24" else cache.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("layout", ["0.24", "0.32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_a_batch_is_its_requests_rows_one_after_another(cache, layout, dtype):
    # Blocks are those that the engine had free: in no order, the last one only begun.
    requests = [held("a", 10, [7, 3, 21]), held("b", 4, [0], [(1, 4)]), held("c", 5, [11, 2], [])]
    gatherer = Gatherer(as_vllm_lays_it_out(cache.to(dtype), layout), "bf16", 1 << 20, 1 << 20)
    [(taken, batch, event)] = list(gatherer.take(requests))
    assert taken == requests and event is None
    states = batch.collect()
    rows = torch.cat([cache[h.block_ids].flatten(0, 1)[: len(h.rows.input_ids_T)] for h in requests])
    assert torch.equal(states["aux_states"], rows[:, :-1])
    labels = [1, 2, 10, 11, 12]  # of `a` before 2 and 3, of `b` before 1, 2 and 3, of `c` none
    assert torch.equal(states["last_states"], rows[labels, -1])
    assert torch.equal(states["aux_peaks"].float(), rows[:, :-1].abs().amax(-1).float())
    assert torch.equal(states["last_peaks"].float(), rows[labels, -1].abs().amax(-1).float())


def test_not_a_number_reaches_the_peaks(cache):
    cache[3, 1, 2, 5], cache[3, 2, 0, 0] = float("nan"), float("-inf")
    [(_, batch, _)] = list(Gatherer(cache, "bf16", 1 << 20, 1 << 20).take([held("a", 4, [3])]))
    peaks = batch.collect()["aux_peaks"]
    assert torch.isnan(peaks[1, 2]) and torch.isinf(peaks[2, 0]) and torch.isfinite(peaks).sum() == 10


def test_batches_stay_within_their_bytes_and_probes_go_apart(cache):
    token = STATES * HIDDEN * 2
    requests = [
        *(held(f"s{i}", 4, [i]) for i in range(3)),
        held("large", 12, [5, 6, 7]),
        *(held(f"p{i}", 4, [8 + i], save_to="x") for i in range(2)),
        held("last", 4, [10]),
    ]
    found = [[h.request_id for h in taken] for taken, _, _ in Gatherer(cache, "bf16", 1, 8 * token).take(requests)]
    assert found == [["s0", "s1"], ["s2"], ["large"], ["p0", "p1"], ["last"]]


def test_fewer_blocks_than_tokens_fail_by_name(cache):
    with pytest.raises(RuntimeError, match="sample a: 8 state rows for 9 tokens"):
        list(Gatherer(cache, "bf16", 1, 1 << 20).take([held("a", 9, [1, 2])]))


def test_rows_hold_what_the_store_does():
    rows = SampleRows.of("a", [5, 6, 7], [(0, 2)])
    assert rows.input_ids_T.dtype == np.int32 and rows.loss_mask_T.tolist() == [1, 1, 0]
    assert rows.last_rows_M.tolist() == [0]  # nothing comes before the first token
