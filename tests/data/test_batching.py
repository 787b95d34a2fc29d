"""Packing: every sample once, within the budget; every rank the same number of steps; reproducible from the seed."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.core.run import RunFolder
from draftsmith.data.batching import collate, epoch_order, plan_batches, rank_share
from draftsmith.hidden_state_capture.reader import HiddenStateStore


@settings(deadline=None, derandomize=True, database=None)
@given(st.lists(st.integers(1, 40), max_size=40), st.integers(1, 60), st.randoms(use_true_random=False))
def test_every_sample_is_in_one_batch_and_the_budget_is_kept(lengths, budget, random):
    order = list(range(len(lengths)))
    random.shuffle(order)
    plan = plan_batches(lengths, budget, order)
    assert [i for batch in plan for i in batch] == order
    assert all(sum(lengths[i] for i in batch) <= budget or len(batch) == 1 for batch in plan)
    assert all(plan)


def test_a_sample_longer_than_the_budget_is_alone():
    assert plan_batches([3, 20, 3, 3], 10) == [[0], [1], [2, 3]]


def test_a_batch_is_filled_up_to_the_last_token():
    assert plan_batches([5, 5, 5, 5], 10) == [[0, 1], [2, 3]]


def test_no_samples_give_no_batches():
    assert plan_batches([], 10) == []


def test_the_order_is_a_shuffle_that_seed_and_epoch_decide():
    order = epoch_order(50, 3, 1)
    assert sorted(order) == list(range(50)) != order
    assert order == epoch_order(50, 3, 1)
    assert len({tuple(epoch_order(50, seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9])
def test_every_rank_gets_the_same_number_and_every_batch_runs_once(count, world):
    batches = [[i] for i in range(count)]
    shares = [rank_share(batches, rank, world) for rank in range(world)]
    assert len({len(share) for share in shares}) == 1
    assert sorted(b[0] for share in shares for b in share if b) == list(range(count))
    assert sum(not b for share in shares for b in share) < world


def test_the_ranks_of_a_step_hold_neighbouring_batches():
    # So that a step of N ranks sees the samples that N steps of one rank would.
    shares = [rank_share([[0], [1], [2], [3]], rank, 2) for rank in range(2)]
    assert shares == [[[0], [2]], [[1], [3]]]


@pytest.fixture
def store(synthetic_run):
    return HiddenStateStore(RunFolder.of(synthetic_run).hidden_states)


def test_collate_lays_samples_one_after_another(store):
    first, second = store[5], store[2]
    batch = collate(store, [5, 2])
    size = len(first.input_ids_T)
    assert batch.sample_ids == (first.sample_id, second.sample_id)
    assert batch.offsets == (0, size, size + len(second.input_ids_T)) and batch.num_tokens == batch.offsets[-1]
    assert torch.equal(batch.input_ids_T, torch.cat([first.input_ids_T, second.input_ids_T]))
    assert batch.positions_T.tolist() == [*range(size), *range(len(second.input_ids_T))]
    assert torch.equal(batch.aux_TAH[size:], second.aux_states_TAH)
    assert torch.equal(batch.last_MH, torch.cat([first.last_states_MH, second.last_states_MH]))
    assert batch.last_rows_M.tolist() == [*first.last_rows_M.tolist(), *(size + second.last_rows_M).tolist()]


def test_last_rows_are_those_before_a_reply_token(store):
    batch = collate(store, list(range(len(store.index))))
    following = batch.loss_mask_T.roll(-1) & (batch.positions_T.roll(-1) > 0)
    assert torch.equal(batch.last_rows_M, following.nonzero().squeeze(1))


def test_an_empty_batch_is_a_full_one_without_rows(store):
    empty, full = collate(store, []), collate(store, [0])
    assert empty.num_tokens == 0 and empty.sample_ids == ()
    for name in ("input_ids_T", "loss_mask_T", "positions_T", "aux_TAH", "last_MH", "last_rows_M"):
        ours, theirs = getattr(empty, name), getattr(full, name)
        assert len(ours) == 0 and ours.shape[1:] == theirs.shape[1:], name
        assert ours.dtype == theirs.dtype or ours.is_floating_point(), name


@pytest.mark.parametrize("samples", [[], [0]], ids=["empty batch", "no supervised row"])
def test_a_rank_without_work_still_gives_every_parameter_a_gradient(store, synthetic_run, samples):
    """Else its collectives would wait for ever (known fault T1)."""
    from draftsmith.core.checkpoint import build_objective
    from draftsmith.core.draft_shape import resolve_shape
    from draftsmith.core.objective import step_weights
    from draftsmith.core.target import resolve_target

    target = resolve_target(synthetic_run.target)
    objective = build_objective(target, resolve_shape(synthetic_run.draft, target, 3, 128), torch.arange(128), "rms")
    batch = collate(store, samples)
    sums = objective(replace(batch, loss_mask_T=torch.zeros_like(batch.loss_mask_T)), 3)
    loss = (step_weights(torch.full((3,), 10.0), 0.8) * sums.loss_J).sum()
    loss.backward()
    assert loss.item() == 0 and sums.rows_J.tolist() == [0, 0, 0]
    assert all(p.grad is not None and not p.grad.any() for p in objective.draft.parameters())
