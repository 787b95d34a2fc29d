"""Samples: token-exact, the mask is exactly the reply, and the draft vocabulary comes from training replies alone."""

import numpy as np
import pytest

from draftsmith.core.conversations import Conversation
from draftsmith.core.errors import UserError
from draftsmith.core.samples import Sample, read_samples, write_samples
from draftsmith.core.target import resolve_target
from draftsmith.data.regenerate import Reply
from draftsmith.data.stage import _figures, _held_out, _mapping, _samples


@pytest.fixture
def made(make_config):
    """`made(replies)`: (config, conversations, samples, skipped) of replies to ten conversations."""

    def make(replies, **data):
        config = make_config(data={"eval_share": 0.2, **data})
        messages = ({"role": "user", "content": f"question {i}"} for i in range(10))
        conversations = [Conversation(f"id-{i}", "src", f"f, line {i + 1}", (m,)) for i, m in enumerate(messages)]
        skipped = []
        return config, conversations, _samples(config, conversations, replies, skipped), skipped

    return make


def reply(conversation, ids, turn=0, prompt=(5, 6, 7)):
    return Reply(conversation, turn, list(prompt), list(ids), "stop")


def ten(ids=(8, 9)):
    return [reply(c, ids) for c in range(10)]


def test_a_sample_is_prompt_and_reply_and_its_mask_is_the_reply(made):
    _, _, samples, _ = made([reply(0, [8, 9, 1], turn=2), *ten()[1:]])
    first = samples[0]
    assert first.input_ids == [5, 6, 7, 8, 9, 1] and first.first_prompt == [5, 6, 7]
    assert first.loss_spans == [(3, 6)] and first.loss_mask.tolist() == [0, 0, 0, 1, 1, 1]
    assert (first.sample_id, first.source, first.finish_reason) == ("id-0/2", "src", "stop")


@pytest.mark.parametrize("ids", [[], [1]])
def test_a_reply_with_nothing_to_draft_is_skipped_at_its_place(made, ids):
    _, _, samples, (skipped,) = made([*ten()[:9], reply(9, ids)])
    assert len(samples) == 9
    assert (skipped.place, skipped.reason) == ("f, line 10", "reply_too_short")


def test_all_turns_of_a_conversation_are_on_one_side(made):
    config, conversations, samples, _ = made([reply(c, [8, 9], turn) for c in range(10) for turn in range(3)])
    held_out = {conversations[i].id for i in _held_out(config, conversations)}
    assert len(held_out) == 2
    assert {s.sample_id for s in samples if s.split == "eval"} == {f"{c}/{t}" for c in held_out for t in range(3)}


def test_no_training_sample_at_all_is_refused(made):
    with pytest.raises(UserError, match=r"no training sample.*lower data\.eval_share"):
        made([])


def test_the_draft_vocabulary_is_of_training_replies_and_special_tokens(made):
    config, conversations, _, _ = made(ten())
    held_out = _held_out(config, conversations)
    # Held-out replies are of token 300, training replies of 200, prompts of 100; 1 ends a turn, 0 is special.
    replies = [reply(c, [300 if c in held_out else 200] * 4, prompt=[100] * 9) for c in range(10)]
    config, _, samples, skipped = made(replies, draft_vocab_size=4)
    mapping = _mapping(config, resolve_target(config.target), [0], samples)
    assert mapping.target_ids.tolist() == [0, 1, 2, 200]
    figures = _figures(samples, skipped, mapping)
    assert (figures["coverage_train"], figures["coverage_eval"]) == (1.0, 0.0)
    assert figures["counts"] == {"train": 8, "eval": 2} and figures["reply_tokens"] == 40


def test_samples_are_read_back_as_they_were_written(tmp_path):
    samples = [
        Sample("a/0", [1, 2, 3, 4], [(1, 2), (3, 4)], "naïve", "length", "train"),
        Sample("b/0", [511], [(0, 1)], "s", "stop", "eval"),
    ]
    write_samples(tmp_path, samples)
    assert read_samples(tmp_path) == samples
    assert read_samples(tmp_path, "eval") == samples[1:]
    assert samples[0].loss_mask.dtype == np.uint8 and samples[0].loss_mask.tolist() == [0, 1, 0, 1]
