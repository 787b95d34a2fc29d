"""Replay against a server's loop written out: draft K tokens, compare with the reply, advance."""

import numpy as np
import pytest
import torch

from draftsmith.core.batch import Batch
from draftsmith.core.replay import SampleRounds, acceptance, bootstrap_interval, walk


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


def test_bootstrap_keeps_the_turns_of_a_conversation_together():
    alike = [SampleRounds(f"c/{t}", [t % 3]) for t in range(9)]
    low, high = bootstrap_interval(alike, 200, 0)
    assert low == high == pytest.approx(2.0)  # one conversation: nothing to resample
    apart = [SampleRounds(f"c{t}/0", [t % 3]) for t in range(9)]
    low, high = bootstrap_interval(apart, 200, 0)
    assert low < 2.0 < high
