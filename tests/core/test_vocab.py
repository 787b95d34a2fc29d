"""The draft's reduced vocabulary: offsets as vLLM reads them, the exact size, the same result every time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.core.errors import UserError
from draftsmith.core.vocab import TokenCounts, build_mapping, count_tokens, coverage, load_mapping, save_mapping


def mapping_of(replies, always, vocab_size, draft_vocab_size):
    return build_mapping(count_tokens(replies, vocab_size), always, draft_vocab_size)


def kept(*args):
    return mapping_of(*args).target_ids.tolist()


def test_d2t_holds_offsets_not_ids():
    mapping = mapping_of([[9, 9, 5]], [], 12, 2)
    assert mapping.d2t.tolist() == [5, 8]
    assert mapping.target_ids.tolist() == [5, 9]
    assert np.flatnonzero(mapping.t2d).tolist() == [5, 9]


def test_the_most_frequent_reply_tokens_are_kept():
    assert kept([[7, 7, 7, 3, 3, 11], [3, 7, 2]], [], 20, 2) == [3, 7]


def test_ties_go_to_the_lower_id_whatever_the_order_of_the_replies():
    assert kept([[9, 4, 8]], [], 20, 2) == kept([[8], [4, 9]], [], 20, 2) == [4, 8]


def test_fewer_distinct_tokens_than_asked_for_are_filled_up_to_the_exact_size():
    ids = kept([[15, 15]], [], 20, 6)
    assert len(ids) == 6 and 15 in ids and ids == [0, 1, 2, 3, 4, 15]


def test_no_replies_at_all_still_give_the_exact_size():
    assert len(kept([], [3], 20, 6)) == 6


def test_special_ids_are_kept_whatever_their_count():
    assert kept([[1, 1, 2, 2, 3]], [19, 0], 20, 3) == [0, 1, 19]


def test_ids_outside_the_vocabulary_are_not_kept():
    assert kept([[1]], [20, -1], 20, 1) == [1]


def test_more_special_ids_than_room_are_refused():
    with pytest.raises(UserError, match="3 special tokens are always kept"):
        mapping_of([], [1, 2, 3], 20, 2)


def test_a_draft_vocabulary_larger_than_the_targets_is_refused():
    with pytest.raises(UserError, match=r"data\.draft_vocab_size is 21, and the target has only 20"):
        mapping_of([], [], 20, 21)


@pytest.mark.parametrize("size", [None, 20])
def test_the_full_vocabulary_maps_every_id_to_itself(size):
    mapping = mapping_of([[3]], [], 20, size)
    assert mapping.is_full and mapping.t2d.all() and not mapping.d2t.any()


def test_a_reduced_vocabulary_is_not_full():
    assert not mapping_of([], [], 20, 19).is_full


def test_tokens_that_stream_by_in_any_portions_are_counted_alike():
    ids = np.random.default_rng(0).integers(0, 50, 200_000).tolist()
    counts = TokenCounts(50)
    for start in range(0, len(ids), 7777):
        counts.add(ids[start : start + 7777])
    assert counts.counts.tolist() == np.bincount(ids, minlength=50).tolist()


def test_expected_mass_ranks_like_counts():
    assert build_mapping(np.array([0.1, 0.0, 2.5, 0.3]), [], 2).target_ids.tolist() == [2, 3]


def test_coverage_is_the_share_of_tokens():
    mapping = mapping_of([[1, 1, 1, 2]], [], 20, 1)
    assert coverage(mapping, count_tokens([[1, 1, 1, 2], []], 20)) == 0.75
    assert coverage(mapping, count_tokens([], 20)) == 0.0


def test_a_mapping_is_read_back_as_it_was_written(tmp_path):
    mapping = mapping_of([[5, 9, 9]], [], 12, 4)
    save_mapping(tmp_path / "m.safetensors", mapping, {"coverage_train": 1.0})
    read = load_mapping(tmp_path / "m.safetensors")
    assert np.array_equal(read.d2t, mapping.d2t) and np.array_equal(read.t2d, mapping.t2d)
    assert read.d2t.dtype == np.int64 and read.t2d.dtype == np.bool_


def test_a_missing_mapping_is_named(tmp_path):
    with pytest.raises(UserError, match=r"m\.safetensors: no vocabulary mapping.*prepare"):
        load_mapping(tmp_path / "m.safetensors")


@settings(deadline=None, derandomize=True, database=None)
@given(st.data())
def test_any_replies_give_a_consistent_mapping(data):
    vocab = data.draw(st.integers(1, 60))
    token = st.integers(0, vocab - 1)
    always = data.draw(st.lists(token, max_size=5))
    size = data.draw(st.integers(len(set(always)) or 1, vocab))
    replies = data.draw(st.lists(st.lists(token, max_size=20), max_size=5))
    mapping = mapping_of(replies, always, vocab, size)
    ids = mapping.target_ids.tolist()
    assert len(mapping.d2t) == size and len(mapping.t2d) == vocab
    assert ids == sorted(set(ids)) and set(ids) == set(np.flatnonzero(mapping.t2d).tolist())
    assert set(always) <= set(ids)
    counts = {t: sum(r.count(t) for r in replies) for t in range(vocab)}
    left_out = [counts[t] for t in range(vocab) if t not in ids]
    chosen = [counts[t] for t in ids if t not in always]
    assert not left_out or not chosen or max(left_out) <= min(chosen)
