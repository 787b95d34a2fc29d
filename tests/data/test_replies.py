"""Several replies to a prompt: seeds, ids, the split, equal ones; on a server: test_server.py, an engine: pipeline."""

import numpy as np
import pytest
from answering import answer_all, reply_to, rows_of
from pydantic import ValidationError

from draftsmith.core.conversations import Conversation
from draftsmith.core.replay import bootstrap_lengths, conversation_of
from draftsmith.core.target import load_tokenizer, resolve_target
from draftsmith.data.dialogues import Dialogues
from draftsmith.data.inputs import Inputs
from draftsmith.data.journal import FILE, Journal
from draftsmith.data.replies import SAME_REPLY, distinct, reply_seed, sample_id
from draftsmith.data.rows import Row
from draftsmith.data.stage import _fitting


def talk(*turns, name="c"):
    return Conversation(name, "s", f"s.jsonl, line {name}", tuple({"role": "user", "content": t} for t in turns))


TALKS = [talk("one", "two", name="1"), talk("three", name="2"), talk("four", "five", "six", name="3")]


@pytest.fixture
def hot(make_config):
    """`hot(replies)`: config, and the target's tokenizer."""

    def make(replies, **data):
        sampling = {"max_tokens": 8, "temperature": 1.0, "replies": replies}
        config = make_config(data={"max_length": 200, "sampling": sampling, **data})
        return config, load_tokenizer(resolve_target(config.target), config.target)

    return make


# ---- what is asked ---------------------------------------------------------------------------------------------------


def test_every_reply_is_a_whole_conversation_of_its_own(hot, tmp_path):
    config, tokenizer = hot(3)
    asked = answer_all(Dialogues(config, tokenizer, TALKS, Journal(tmp_path)))
    places = [(r.conversation, r.reply, r.turn) for r in asked]
    assert sorted(places) == [(c, r, t) for c, turns in enumerate((2, 1, 3)) for r in range(3) for t in range(turns)]
    at = dict(zip(places, asked, strict=True))
    for (c, r, turn), request in at.items():
        said = [tokenizer.decode(reply_to(at[c, r, t])[0][:-1]) for t in range(turn)]
        prompt = tokenizer.decode(request.prompt_ids)
        assert all(text in prompt for text in said), "another reply's history"
    firsts = [at[0, r, 0].prompt_ids for r in range(3)]
    assert firsts[0] == firsts[1] == firsts[2]
    assert len({tuple(at[0, r, 1].prompt_ids) for r in range(3)}) == 3


def test_a_seed_hangs_on_its_place_alone_and_the_first_reply_keeps_the_one_that_it_had(hot, tmp_path):
    def seeds(replies):
        config, tokenizer = hot(replies)
        asked = answer_all(Dialogues(config, tokenizer, TALKS, Journal(tmp_path / str(replies))))
        return {(r.conversation, r.reply, r.turn): r.seed for r in asked}

    one, two, five = seeds(1), seeds(2), seeds(5)
    assert one.items() <= two.items() <= five.items() and len(set(five.values())) == len(five) == 5 * 6
    assert [one[c, 0, t] for c, t in ((0, 0), (1, 0), (0, 1), (2, 2))] == [0, 1, 3, 8]
    assert [reply_seed(7, 100, 4, r, 2) for r in range(3)] == [7000225, 7952675101040731936, 481519251405336981]
    assert all(0 <= reply_seed(2**32 - 1, 10**6, c, r, 3) < 2**63 for c in range(50) for r in range(50))


def test_a_source_s_own_history_and_given_ids_are_asked_again_too(hot, tmp_path):
    config, tokenizer = hot(2, history="source")
    messages = ({"role": "user", "content": "one"}, {"role": "assistant", "content": "kept"})
    asked = answer_all(Dialogues(config, tokenizer, [Conversation("c", "s", "f", messages)], Journal(tmp_path)))
    assert [(r.reply, r.turn) for r in asked] == [(0, 0), (1, 0)] and asked[0].seed != asked[1].seed


def test_what_cannot_be_asked_is_listed_for_every_reply_with_which_it_is(hot, tmp_path):
    config, tokenizer = hot(2)
    dialogues = Dialogues(config, tokenizer, [talk("word " * 200)], Journal(tmp_path))
    assert dialogues.take() is None
    assert [s.place for s in dialogues.skipped] == ["s.jsonl, line c", "s.jsonl, line c, reply 2"]


@pytest.mark.parametrize("done", range(0, 19, 3))
def test_a_stopped_run_goes_on_with_the_same_seeds_and_asks_nothing_twice(hot, tmp_path, done):
    config, tokenizer = hot(3)
    whole = Journal(tmp_path / "whole")
    assert len(answer_all(Dialogues(config, tokenizer, TALKS, whole))) == 18
    stopped = Journal(tmp_path / "stopped")
    answer_all(Dialogues(config, tokenizer, TALKS, stopped), most=done)
    stopped.close()
    with (tmp_path / "stopped" / FILE).open("ab") as file:
        file.write(b"[2,1,0,[1,2")
    again = Journal(tmp_path / "stopped")
    assert len(again) == done
    assert len(answer_all(Dialogues(config, tokenizer, TALKS, again))) == 18 - done
    assert rows_of(again) == rows_of(whole)
    assert [(r[0].conversation, r[0].reply) for r in rows_of(again)] == [(c, r) for c in range(3) for r in range(3)]


# ---- which of them are the same ------------------------------------------------------------------------------------


def row(reply, turn, *ids, conversation=0):
    return Row(conversation, turn, list(ids), [(len(ids) - 1, len(ids))], "stop", "target", reply)


def test_equal_replies_are_used_once_and_the_others_are_listed():
    """Equal in the first turn, not in the second: the second's row stays, and with it what it was asked after."""
    talks = [
        [row(0, 0, 1, 5), row(0, 1, 1, 5, 2, 6)],
        [row(1, 0, 1, 5), row(1, 1, 1, 5, 2, 7)],
        [row(2, 0, 1, 8), row(2, 1, 1, 8, 2, 6)],
        [row(3, 0, 1, 5), row(3, 1, 1, 5, 2, 7)],
        [row(0, 0, 1, 5, conversation=1)],
    ]
    kept, same = zip(*distinct(talks, [talk("a", "b"), talk("a", name="d")]), strict=True)
    assert list(kept) == [talks[0], talks[1][1:], talks[2], [], talks[4]]
    assert [(s.place, s.reason, s.detail) for found in same for s in found] == [
        ("s.jsonl, line c, reply 2", SAME_REPLY, "turn 1: the very ids of reply 1"),
        ("s.jsonl, line c, reply 4", SAME_REPLY, "turn 1: the very ids of reply 1"),
        ("s.jsonl, line c, reply 4", SAME_REPLY, "turn 2: the very ids of reply 2"),
    ]


def test_one_reply_is_never_taken_for_another_turn_s():
    """Given ids may ask the same twice; that is the source's affair."""
    rows = [row(0, 0, 1, 5), row(0, 1, 1, 5)]
    assert list(distinct([rows], [talk("a")])) == [(rows, [])]


# ---- what they are called, and where they go -------------------------------------------------------------------------


def test_no_two_samples_share_an_id_whatever_conversations_are_called():
    names = ["c", "c~1", "c/0", "c/0~1", "c/0~1/0", "~", "c/1", "/"]
    made = {sample_id(n, t, r): n for n in names for t in range(3) for r in range(3)}
    assert len(made) == len(names) * 9
    assert {i: conversation_of(i) for i in made} == made
    assert sample_id("demo-a-001", 0, 0) == "demo-a-001/0" and sample_id("demo-a-001", 0, 1) == "demo-a-001/0~1"


def test_an_interval_takes_all_replies_of_a_conversation_or_none():
    """Every conversation three times over says no more than once: the very same interval."""
    table = np.random.default_rng(0).integers(1, 9, (40, 2)).astype(np.float64)
    once = [conversation_of(sample_id(f"c{i}", 0, 0)) for i in range(40)]
    thrice = [conversation_of(sample_id(f"c{i}", 0, r)) for i in range(40) for r in range(3)]
    one = bootstrap_lengths(once, [table], 100, 0)
    assert np.allclose(one, bootstrap_lengths(thrice, [np.repeat(table, 3, axis=0)], 100, 0))


def test_all_replies_are_on_one_side_in_order_and_told_apart(hot, tally_of, tmp_path):
    config, _ = hot(3)
    held, count = np.arange(10) % 4 == 1, 10
    conversations = [talk(f"question {i}", name=f"id-{i}") for i in range(count)]
    rows = [row(r, t, 5, 6, 100 + t, 200 + r, 9, conversation=c) for t in (1, 0) for r in (2, 0, 1) for c in range(10)]
    rows = [Row(r.conversation, r.turn, r.input_ids, [(3, 5)], "stop", "target", r.reply) for r in rows]
    tally = tally_of(["s"])
    short = Row(4, 0, [5, 6], [(1, 2)], "stop", "target", 2)
    read = Inputs(conversations, held)
    made = list(_fitting(config, [1], read, iter([*rows, short]), tally, tmp_path / "rows"))
    expected = [sample_id(f"id-{c}", t, r) for c in range(count) for r in range(3) for t in range(2)]
    assert [s.sample_id for s in made] == expected
    assert {(s.conversation_id, s.split) for s in made} == {
        (f"id-{c}", "eval" if held[c] else "train") for c in range(count)
    }
    [listed] = tally_of.listed(tally)
    assert (listed.place, listed.reason) == ("s.jsonl, line id-4, reply 3", "reply_too_short")


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"sampling": {"replies": 0, "temperature": 1.0}}, "greater than 0"),
        ({"sampling": {"replies": "2", "temperature": 1.0}}, "valid integer"),
        ({"sampling": {"replies": 2, "max_tokens": 16}}, "2 at temperature 0.*set data.sampling.temperature above 0"),
        (
            {"sampling": {"replies": 2, "temperature": 1.0, "max_tokens": 16}, "replies": "keep"},
            "set data.replies to regenerate",
        ),
        ({"sampling": {"temperature": 2.1}}, "less than or equal to 2"),
        ({"sampling": {"temperature": -0.1}}, "greater than or equal to 0"),
        ({"sampling": {"top_p": 0.0}}, "greater than 0"),
        ({"sampling": {"top_p": 95}}, "less than or equal to 1"),
        ({"sampling": {"top_k": -1}}, "greater than or equal to 0"),
        ({"sampling": {"top_k": 0.9}}, "valid integer"),
        ({"sampling": {"min_p": 1.5}}, "less than or equal to 1"),
        ({"sampling": {"repetition_penalty": 0.0}}, "greater than 0"),
        ({"sampling": {"repetition_penalty": float("inf")}}, "finite"),
        ({"sampling": {"presence_penalty": 2.5}}, "less than or equal to 2"),
        ({"sampling": {"frequency_penalty": -3.0}}, "greater than or equal to -2"),
    ],
    ids=str,
)
def test_a_value_that_makes_no_sense_is_refused_and_said(make_config, data, said):
    with pytest.raises(ValidationError, match=said):
        make_config(data=data)
    assert make_config(data={"sampling": {"replies": 1, "max_tokens": 16}}).data.sampling.replies == 1
