"""Replay against a server's loop written out: draft K tokens, compare with the reply, advance."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.core.batch import Batch
from draftsmith.core.replay import (
    SampleRounds,
    acceptance,
    bootstrap_lengths,
    conversation_of,
    expected_walk,
    interval,
    tally,
    walk,
    walks,
)
from draftsmith.core.unroll import reply_runs


def batch_of(masks):
    offsets = np.concatenate([[0], np.cumsum([len(m) for m in masks])]).tolist()
    size = offsets[-1]
    return Batch(
        tuple(f"c{i}/0" for i in range(len(masks))), tuple(offsets), torch.zeros(size, dtype=torch.int64),
        torch.tensor([bool(x) for m in masks for x in m]), torch.tensor([t for m in masks for t in range(len(m))]),
        torch.zeros(size, 3, 4), torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64),
    )  # fmt: skip


def serve(mask, correct, k):
    """The server's own loop over one document; `correct[t][j]`: step j + 1 at row t drafts the reply's token."""
    rounds, size = [], len(mask)
    starts = [t for t in range(1, size) if mask[t] and not mask[t - 1]]
    for start in starts:
        end = next((t for t in range(start, size) if not mask[t]), size)
        known = start  # index of the newest known token: the first reply token comes from the prefill
        while known < end - 1:
            row, accepted = known - 1, 0
            while accepted < k and known + accepted + 1 < end and correct[row][accepted]:
                accepted += 1
            rounds.append(accepted)
            known += accepted + 1  # the accepted tokens and the target's own next one
    return rounds


@pytest.mark.parametrize("k", [1, 3, 7])
@pytest.mark.parametrize("seed", range(5))
def test_walk_equals_a_server_loop(k, seed):
    rng = np.random.default_rng(seed)
    masks = [[0] * rng.integers(1, 4) + [1] * rng.integers(1, 30) for _ in range(4)]
    masks.append([0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1])  # two replies in one document
    batch = batch_of(masks)
    correct = rng.random((batch.num_tokens, k)) < 0.6
    leading = torch.zeros(batch.num_tokens, dtype=torch.int64)
    for d, mask in enumerate(masks):
        for t in range(len(mask)):
            run = 0
            while t + 1 + run < len(mask) and mask[t + 1 + run]:
                run += 1
            n = 0  # a step is only supervised, and so only matches, inside the reply
            while n < min(k, run - 1) and correct[batch.offsets[d] + t][n]:
                n += 1
            leading[batch.offsets[d] + t] = n
    for d, rounds in enumerate(walk(batch, leading, k)):
        here = slice(batch.offsets[d], batch.offsets[d + 1])
        assert rounds.accepted == serve(masks[d], correct[here].tolist(), k)


def test_acceptance_length_counts_the_bonus_token_and_rates_are_unconditional():
    """E1: 3 rounds that accepted 2, 0 and 1 of 3 drafts."""
    figures = acceptance([SampleRounds("a/0", [2, 0]), SampleRounds("b/0", [1])], 3)
    assert figures["acceptance_length"] == 2.0
    assert figures["per_position"] == pytest.approx([2 / 3, 1 / 3, 0.0])
    assert figures["rounds"] == 3


def test_untrained_and_perfect_drafts_are_the_ends_of_the_scale():
    batch = batch_of([[0] + [1] * 9])
    none = walk(batch, torch.zeros(10, dtype=torch.int64), 3)
    assert acceptance(none, 3)["acceptance_length"] == 1.0
    runs = torch.tensor([min(3, max(0, 8 - t)) for t in range(10)])
    # Tokens x2..x9 come in rounds of 3 + 1: 8 tokens, 2 rounds.
    assert walk(batch, runs, 3)[0].accepted == [3, 3]


def bootstrap_interval(rounds, k=3):
    groups = [conversation_of(r.sample_id) for r in rounds]
    return interval(bootstrap_lengths(groups, [tally(rounds, k)], 200, 0)[:, 0])


def test_bootstrap_keeps_the_turns_of_a_conversation_together():
    alike = [SampleRounds(f"c/{t}", [t % 3]) for t in range(9)]
    low, high = bootstrap_interval(alike)
    assert low == high == pytest.approx(2.0)  # one conversation: nothing to resample
    apart = [SampleRounds(f"c{t}/0", [t % 3]) for t in range(9)]
    low, high = bootstrap_interval(apart)
    assert low < 2.0 < high


def test_tables_of_one_bootstrap_are_resampled_alike():
    """What makes a paired interval: a draft that is better by a constant is better by it in every draw."""
    rounds = [SampleRounds(f"c{t}/0", [t % 3, (t * 7) % 3]) for t in range(20)]
    better = [SampleRounds(r.sample_id, [n + 1 for n in r.accepted]) for r in rounds]
    groups = [r.sample_id for r in rounds]
    lengths = bootstrap_lengths(groups, [tally(rounds, 3), tally(better, 3)], 100, 0)
    assert lengths[:, 1] - lengths[:, 0] == pytest.approx(np.ones(100))
    assert np.ptp(lengths[:, 0]) > 0.1


def test_no_samples_have_no_rounds():
    figures = acceptance([], 3)
    assert figures == {"acceptance_length": 1.0, "per_position": [0.0] * 3, "rounds": 0}
    assert bootstrap_lengths([], [tally([], 3)], 10, 0).tolist() == [[1.0]] * 10


# ---- against a walk written out, on anything ----------------------------------------------------------------------

MASKS = st.lists(st.lists(st.booleans(), min_size=1, max_size=14), min_size=1, max_size=4)


@st.composite
def chains(draw, values):
    """A batch, and a value for every row and step."""
    batch = batch_of(draw(MASKS))
    steps = draw(st.integers(1, 5))
    flat = draw(st.lists(values, min_size=batch.num_tokens * steps, max_size=batch.num_tokens * steps))
    return batch, torch.tensor(flat, dtype=torch.float32).view(batch.num_tokens, steps)


def leading_of(batch, matches):
    """n[t], where a step past the reply's end has no match."""
    steps = torch.arange(matches.shape[1])
    labelled = steps[None] < (reply_runs(batch) - 1).clamp_min(0)[:, None]
    return (matches.bool() & labelled).long().cumprod(1).sum(1)


@settings(deadline=None, max_examples=40)
@given(chains(st.booleans()))
def test_any_walk_equals_a_server_loop(case):
    batch, matches = case
    leading, ks = leading_of(batch, matches), list(range(1, matches.shape[1] + 1))
    for k, rounds in zip(ks, walks(batch, leading, ks), strict=True):
        for d, found in enumerate(rounds):
            here = slice(batch.offsets[d], batch.offsets[d + 1])
            assert found.accepted == serve(batch.loss_mask_T[here].tolist(), matches[here].tolist(), k)


@settings(deadline=None, max_examples=40)
@given(chains(st.booleans()))
def test_expectation_of_what_is_certain_is_the_walk(case):
    batch, matches = case
    for k in range(1, matches.shape[1] + 1):
        table = tally(walk(batch, leading_of(batch, matches), k), k)
        assert expected_walk(batch, matches, k) == pytest.approx(table)


def every_outcome(mask, rates, k):
    """Expected rounds, and acceptances by position, of the server's loop over one document: every outcome tried."""
    table = np.zeros(1 + k)

    def go(row, end, weight):
        if row + 1 >= end - 1:
            return
        most = min(k, end - 2 - row)
        table[0] += weight
        for n in range(most + 1):
            chance = np.prod(rates[row][:n]) * (1 - rates[row][n] if n < most else 1.0)
            table[1 : n + 1] += weight * chance
            go(row + n + 1, end, weight * chance)

    for start in (t for t in range(1, len(mask)) if mask[t] and not mask[t - 1]):
        go(start - 1, next((t for t in range(start, len(mask)) if not mask[t]), len(mask)), 1.0)
    return table


@settings(deadline=None, max_examples=40)
@given(chains(st.floats(0, 1, width=32)))
def test_expected_walk_sums_over_every_outcome(case):
    batch, rates = case
    k = rates.shape[1]
    for d, (a, b) in enumerate(itertools.pairwise(batch.offsets)):
        wanted = every_outcome(batch.loss_mask_T[a:b].tolist(), rates[a:b].double().numpy(), k)
        assert expected_walk(batch, rates, k)[d] == pytest.approx(wanted, abs=1e-5)
