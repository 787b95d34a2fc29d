"""The split: the exact share, by content and seed alone, and never through a group."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.data.split import held_out

KEYS = np.random.default_rng(0).integers(0, 2**63, 500).astype(np.uint64)


@pytest.mark.parametrize("count", [10, 11, 57, 300])
def test_the_held_out_count_is_exact(count):
    assert held_out(np.arange(count), KEYS[:count], 0.1, 0).sum() == round(count / 10)


def test_something_is_held_out_of_a_small_source_and_nothing_where_nothing_is_asked():
    assert held_out(np.arange(3), KEYS[:3], 0.01, 0).sum() == 1
    assert held_out(np.arange(3), KEYS[:3], 0.0, 0).sum() == 0
    assert len(held_out(np.arange(0), KEYS[:0], 0.5, 0)) == 0


def test_every_conversation_is_as_likely_as_another():
    drawn = sum(held_out(np.arange(500), KEYS, 0.2, seed).astype(int) for seed in range(200))
    assert drawn.min() > 15 and drawn.max() < 68  # 40 expected, standard deviation 5.7


@settings(deadline=None, derandomize=True, database=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=60), st.floats(0.01, 0.9), st.integers(0, 5), st.randoms())
def test_groups_stay_together_whatever_the_order(groups, share, seed, rng):
    groups, keys = np.array(groups), KEYS[: len(groups)]
    held = held_out(groups, keys, share, seed)
    sides = {(g, h) for g, h in zip(groups.tolist(), held.tolist(), strict=True)}
    assert len(sides) == len(set(groups.tolist()))
    smallest = min(np.count_nonzero(groups == g) for g in groups)
    assert 0 < held.sum() <= max(1, round(len(groups) * share), smallest)
    order = np.array(rng.sample(range(len(groups)), len(groups)))
    assert held_out(groups[order] + 7, keys[order], share, seed).tolist() == held[order].tolist()


def test_a_group_that_is_too_large_is_passed_over():
    groups = np.array([0] * 50 + list(range(1, 51)))
    held = held_out(groups, KEYS[:100], 0.1, 0)
    assert held.sum() == 10 and not held[:50].any()
