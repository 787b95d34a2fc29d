"""What the target is asked, and how a stopped run goes on; servers: test_server.py, engines: tests/pipeline."""

import pytest
from answering import answer_all, reply_to, rows_of

from draftsmith.core.conversations import Conversation, Skipped, TokenTurn
from draftsmith.core.target import load_tokenizer, resolve_target
from draftsmith.data.dialogues import Dialogues
from draftsmith.data.journal import FILE, Journal
from draftsmith.data.regenerate import regenerate
from draftsmith.data.rows import Row
from draftsmith.data.tool_calls import call_marker


def says(role, content, **more):
    return {"role": role, "content": content, **more}


def conversation(*messages, name="c", **more):
    return Conversation(name, "s", f"s.jsonl, line {name}", messages, **more)


TWO_TURNS = conversation(says("user", "one"), says("assistant", "dropped"), says("user", "two"))
WITH_TOOL = conversation(
    says("user", "weather?"),
    says("assistant", None, tool_calls=[{"type": "function", "function": {"name": "f", "arguments": "{}"}}]),
    says("tool", "sunny"),
    says("assistant", "It is sunny."),
    says("user", "thanks"),
)


@pytest.fixture
def target(make_config):
    config = make_config(data={"max_length": 64, "sampling": {"max_tokens": 8}})
    resolved = resolve_target(config.target)
    return config, resolved, load_tokenizer(resolved, config.target)


def test_the_second_prompt_holds_the_targets_own_reply(target, tmp_path):
    config, _, tokenizer = target
    dialogues = Dialogues(config, tokenizer, [TWO_TURNS], Journal(tmp_path))
    first, second = answer_all(dialogues)
    said = tokenizer.decode(reply_to(first)[0][:-1])
    assert said in tokenizer.decode(second.prompt_ids) and "dropped" not in tokenizer.decode(second.prompt_ids)
    assert (first.turn, second.turn) == (0, 1) and first.seed is None and not dialogues.skipped


def test_what_no_client_could_send_ends_a_conversation_and_is_listed(target, tmp_path):
    config, _, tokenizer = target
    cut = Dialogues(config, tokenizer, [TWO_TURNS, WITH_TOOL], Journal(tmp_path))
    answer_all(cut, lambda request: ([9] * request.max_tokens, "length"))
    assert [(s.reason, s.place) for s in cut.skipped] == [
        ("after_length_cut", TWO_TURNS.place),
        ("after_length_cut", WITH_TOOL.place),
    ]
    tool = Dialogues(config, tokenizer, [WITH_TOOL], Journal(tmp_path / "tool"))
    assert len(answer_all(tool)) == 1 and tool.skipped[0].reason == "after_tool_turn"


@pytest.mark.parametrize(
    ("name", "marker", "reply"),
    [
        (
            "qwen3",
            "<tool_call>",
            '<think>\nlook\n</think>\n\n<tool_call>\n{"arguments": {}, "name": "f"}\n</tool_call>',
        ),
        ("minimax-m2.5", "<minimax:tool_call><invokename=", 'look\n</think>\n\n<minimax:tool_call>\n<invoke name="f">'),
        ("llama3", '{"name":"', '{"name": "f", "parameters": {}}'),
        ("chatml", None, ""),  # shows no calls, and no tools either
    ],
)
def test_a_tool_call_of_the_target_ends_the_conversation(tokenizer_of, make_config, tmp_path, name, marker, reply):
    """Nobody is there to answer it, and no client would send the user's next turn instead."""
    tokenizer = tokenizer_of(name)
    tools = ({"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}},)
    assert call_marker(tokenizer, tools) == marker
    config = make_config(data={"max_length": 4096})
    offered = conversation(says("user", "weather?"), says("user", "thanks"), tools=tools)
    end = tokenizer.eos_token_id

    def asked(talk, text, folder):
        dialogues = Dialogues(config, tokenizer, [talk], Journal(tmp_path / folder))
        ids = [*tokenizer.encode(text, add_special_tokens=False), end]
        return len(answer_all(dialogues, lambda request: (ids, "stop"))), dialogues.skipped

    assert asked(offered, '<think>\nIt is {"sunny"}, I call it a day.', "plain") == (2, [])
    if marker:
        count, [listed] = asked(offered, reply, "called")
        assert (count, listed.reason) == (1, "after_tool_turn") and "reply 1 calls a tool" in listed.detail
        without = conversation(*offered.messages)
        assert asked(without, reply, "none") == (2, [])  # only its text: there was nothing to call
        last = conversation(offered.messages[0], tools=tools)
        assert asked(last, reply, "last") == (1, [])


def test_history_of_the_source_asks_for_every_reply_after_its_own_messages(target, changed, tmp_path):
    config, _, tokenizer = target
    config = changed(config, data={"history": "source"})
    open_ended = conversation(says("user", "one"), says("assistant", "kept"), says("user", "two"))
    asked = answer_all(Dialogues(config, tokenizer, [open_ended], Journal(tmp_path)))
    assert len(asked) == 2 and "kept" in tokenizer.decode(asked[1].prompt_ids)


def test_given_ids_are_asked_as_they_are(target, tmp_path):
    config, _, tokenizer = target
    given = conversation(tokens=(TokenTurn([4, 5, 6], [7]), TokenTurn([4, 5, 6, 7, 8], None)))
    asked = answer_all(Dialogues(config, tokenizer, [given], Journal(tmp_path)))
    assert [r.prompt_ids for r in asked] == [[4, 5, 6], [4, 5, 6, 7, 8]]


def test_a_prompt_without_room_for_a_reply_is_refused(target, tmp_path):
    config, _, tokenizer = target
    long = conversation(says("user", "word " * 100))
    dialogues = Dialogues(config, tokenizer, [long], Journal(tmp_path))
    assert dialogues.take() is None and dialogues.skipped[0].reason == "prompt_too_long"


def test_sampled_replies_have_a_seed_each_that_only_their_place_decides(target, changed, tmp_path):
    config, _, tokenizer = target
    config = changed(config, data={"sampling": {"max_tokens": 8, "temperature": 1.0, "seed": 3}})
    seeds = [
        {(r.conversation, r.turn): r.seed for r in answer_all(Dialogues(config, tokenizer, talks, Journal(folder)))}
        for talks, folder in (([TWO_TURNS] * 4, tmp_path / "a"), ([TWO_TURNS] * 4, tmp_path / "b"))
    ]
    assert seeds[0] == seeds[1] and len(set(seeds[0].values())) == 8


@pytest.mark.parametrize("done", range(7))
def test_a_stopped_run_goes_on_with_what_it_has(target, tmp_path, done):
    """Stopped after any number of replies, the last line cut: the same rows as in one go, and nothing asked twice."""
    config, _, tokenizer = target
    talks = [TWO_TURNS, WITH_TOOL, conversation(says("user", "three"), name="3"), TWO_TURNS]
    whole = Journal(tmp_path / "whole")
    total = len(answer_all(Dialogues(config, tokenizer, talks, whole)))
    stopped = Journal(tmp_path / "stopped")
    answer_all(Dialogues(config, tokenizer, talks, stopped), most=done)
    stopped.close()
    with (tmp_path / "stopped" / FILE).open("ab") as file:
        file.write(b"[3,0,0,[1,2")
    again = Journal(tmp_path / "stopped")
    assert len(again) == min(done, total)
    dialogues = Dialogues(config, tokenizer, talks, again)
    assert len(answer_all(dialogues)) == total - min(done, total)
    assert rows_of(again) == rows_of(whole) and dialogues.skipped[0].reason == "after_tool_turn"


def test_a_reply_is_never_given_to_another_prompt(target, tmp_path):
    """Sources that read otherwise than before: what was answered under a number is asked again under it."""
    config, _, tokenizer = target
    first, second = conversation(says("user", "one"), name="1"), conversation(says("user", "two"), name="2")
    journal = Journal(tmp_path)
    answer_all(Dialogues(config, tokenizer, [first, second], journal))
    journal = Journal(tmp_path)
    [asked] = answer_all(Dialogues(config, tokenizer, [second], journal))
    [[row]] = rows_of(journal)
    assert row.input_ids == asked.prompt_ids + reply_to(asked)[0]


def test_only_replies_to_todays_prompts_become_rows(target, tmp_path):
    """A source that lost or changed conversations while the run was stopped leaves replies that nobody asks for."""
    config, _, tokenizer = target
    first, other = conversation(says("user", "one"), name="1"), conversation(says("user", "two"), name="2")
    before = Journal(tmp_path)
    answer_all(Dialogues(config, tokenizer, [first, TWO_TURNS, other], before))
    before.close()
    today = Journal(tmp_path)
    assert not answer_all(Dialogues(config, tokenizer, [first], today))
    assert [row.conversation for rows in rows_of(today) for row in rows] == [0]
    today.close()
    shorter = conversation(says("user", "one"), name="c")  # the second turn is gone
    fewer = Journal(tmp_path)
    assert not answer_all(Dialogues(config, tokenizer, [first, shorter], fewer))
    assert [(row.conversation, row.turn) for rows in rows_of(fewer) for row in rows] == [(0, 0), (1, 0)]


@pytest.mark.parametrize(
    "damaged",
    [
        b"[1,0,0,[1,2",
        b"\0\0\0",
        b"{}",
        b"7",
        b"[1,0]",
        b'[1,0,[1],[2],"stop"]',
        b'[1,0,0,[1],["x"],"stop"]',
        b'["a",0,0,[1],[2],"stop"]',
    ],
)
def test_a_damaged_line_costs_one_reply_and_is_said(target, tmp_path, capsys, damaged):
    config, _, tokenizer = target
    talks = [conversation(says("user", f"question {i}"), name=str(i)) for i in range(4)]
    whole = Journal(tmp_path)
    answer_all(Dialogues(config, tokenizer, talks, whole))
    wanted = rows_of(whole)
    whole.close()
    lines = (tmp_path / FILE).read_bytes().splitlines()
    (tmp_path / FILE).write_bytes(b"\n".join([lines[0], damaged, *lines[2:]]) + b"\n")
    again = Journal(tmp_path)
    assert len(again) == 3 and f"{FILE}: damaged at line 2;" in capsys.readouterr().out
    [asked] = answer_all(Dialogues(config, tokenizer, talks, again))
    assert asked.conversation == 1 and rows_of(again) == wanted


def test_nothing_left_to_ask_starts_nothing(target, tmp_path):
    config, resolved, tokenizer = target
    journal = Journal(tmp_path)
    answer_all(Dialogues(config, tokenizer, [TWO_TURNS], journal))
    journal.close()
    rows = list(regenerate(config, resolved, [TWO_TURNS, conversation(says("user", "w " * 90))], tmp_path))
    assert isinstance(rows[0], Skipped) and all(isinstance(r, Row) for r in rows[1:])
