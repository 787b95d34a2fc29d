"""D5: what is cut is cut at a reply's end, ids and spans together; what is left is a prefix of what was served."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.core.config import DataConfig
from draftsmith.core.config_replies import SamplingConfig
from draftsmith.data.length import Unfit, fit
from draftsmith.data.rows import Row

END = 1


def row(*parts, finish="stop"):
    """Of (prompt tokens, reply tokens) pairs; every reply but the last ends with its end token."""
    ids, spans = [], []
    for i, (prompt, reply) in enumerate(parts):
        ids += [50 + i] * prompt
        spans.append((len(ids), len(ids) + reply))
        last = i == len(parts) - 1
        ids += [90 + i] * (reply - 1) + [END if not last or finish == "stop" else 99]
    return Row(0, len(parts) - 1, ids, spans, finish, "target")


def fitted(made, max_length, too_long):
    config = DataConfig(max_length=max_length, too_long=too_long, sampling=SamplingConfig(max_tokens=2))
    return fit(made, config, [END])


@pytest.mark.parametrize("policy", ["reject", "truncate", "cut"])
def test_a_row_that_fits_is_left_as_it_is(policy):
    made = row((4, 3), (2, 3))
    assert fitted(made, 12, policy) is made


def test_reject_refuses_the_row():
    skipped = fitted(row((4, 3), (2, 4)), 12, "reject")
    assert skipped.reason == "too_long" and "13 tokens" in skipped.detail


@pytest.mark.parametrize("max_length", [8, 9, 10, 12])
def test_truncate_ends_after_the_last_whole_reply(max_length):
    made = row((4, 3), (2, 4))
    kept = fitted(made, max_length, "truncate")
    assert kept.input_ids == made.input_ids[:7] and kept.loss_spans == [(4, 7)] and kept.finish_reason == "stop"


def test_truncate_skips_what_has_no_whole_reply():
    assert fitted(row((4, 9)), 8, "truncate").reason == "too_long"
    assert fitted(row((9, 3)), 8, "truncate").reason == "too_long"


def test_cut_ends_a_reply_where_a_server_with_that_limit_would():
    made = row((4, 3), (2, 4))
    kept = fitted(made, 11, "cut")
    assert kept.input_ids == made.input_ids[:11]
    assert kept.loss_spans == [(4, 7), (9, 11)] and kept.finish_reason == "length"


def test_cut_never_ends_in_a_prompt_or_after_one_token():
    made = row((4, 3), (4, 4))
    for max_length in (8, 10, 11, 12):
        assert fitted(made, max_length, "cut").input_ids == made.input_ids[:7]


@pytest.mark.parametrize("reply", [0, 1])
def test_a_reply_with_nothing_to_draft_is_skipped(reply):
    made = Row(0, 0, [5, 6, 7, 8][: 3 + reply], [(3, 3 + reply)], "stop", "target")
    assert fitted(made, 12, "reject").reason == "reply_too_short"


PARTS = st.lists(st.tuples(st.integers(1, 9), st.integers(2, 9)), min_size=1, max_size=5)


@settings(deadline=None, derandomize=True, database=None, max_examples=300)
@given(PARTS, st.integers(8, 40), st.sampled_from(["reject", "truncate", "cut"]), st.sampled_from(["stop", "length"]))
def test_what_is_left_is_a_prefix_whose_spans_are_replies(parts, max_length, policy, finish):
    made = row(*parts, finish=finish)
    kept = fitted(made, max_length, policy)
    whole = len(made.input_ids) <= max_length
    if isinstance(kept, Unfit):
        assert not whole
        return
    assert kept.input_ids == made.input_ids[: len(kept.input_ids)] and len(kept.input_ids) <= max_length
    assert kept.loss_spans[:-1] == made.loss_spans[: len(kept.loss_spans) - 1]
    (start, end), original = kept.loss_spans[-1], made.loss_spans[len(kept.loss_spans) - 1]
    assert start == original[0] and end == len(kept.input_ids)  # nothing of a template is left behind the last reply
    assert end == original[1] or (policy == "cut" and end == max_length and kept.finish_reason == "length")
    assert (kept.finish_reason == "stop") == (kept.input_ids[-1] == END)
