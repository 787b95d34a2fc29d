"""Rows: each shape becomes the same conversation; whatever is none has a reason; nothing ever raises."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.core.config import DEFAULT_ROLES
from draftsmith.core.conversations import Conversation, Skipped
from draftsmith.core.shapes import RowContext, to_conversation
from draftsmith.data.dedup import content_key, opening_key, setting_key
from draftsmith.data.similarity import prompt_words

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def user(text="hi"):
    return {"role": "user", "content": text}


def assistant(text="hello", **more):
    return {"role": "assistant", "content": text, **more}


def system(text="be kind"):
    return {"role": "system", "content": text}


def tool(text="4", **more):
    return {"role": "tool", "content": text, **more}


def calls(content=None):
    return assistant(content, tool_calls=[CALL])


def convert(row, roles=None, author=None):
    return to_conversation(row, RowContext("s", {**DEFAULT_ROLES, **(roles or {})}, author), "s-1", "f, line 1")


def chat(*messages, **more):
    return {"messages": list(messages), **more}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([1, 2], "not_an_object"),
        ("text", "not_an_object"),
        (None, "not_an_object"),
        ({}, "no_messages"),
        (chat(), "no_messages"),
        ({"messages": None}, "no_messages"),
        ({"messages": "hi"}, "no_messages"),
        ({"conversations": []}, "no_messages"),
        ({"turns": []}, "no_messages"),
        ({"turns": [1]}, "not_text"),
        ({"prompt": ["hi"]}, "no_messages"),
        ({"prompt": ""}, "empty_content"),
        ({"prompt": "hi", "response": ""}, "empty_content"),
        ({"prompt": "hi", "response": 3}, "not_text"),
        ({"messages": ["hi"]}, "not_a_message"),
        ({"messages": [{"content": "hi"}]}, "unknown_role"),
        ({"messages": [{"role": "narrator", "content": "hi"}]}, "unknown_role"),
        ({"messages": [{"role": "gpt-4o", "content": "hi"}]}, "unknown_role"),
        ({"messages": [{"role": ["user"], "content": "hi"}]}, "unknown_role"),
        ({"messages": [{"role": "user"}]}, "empty_content"),
        (chat(user("")), "empty_content"),
        (chat(user(" \n")), "empty_content"),
        (chat(user(None)), "empty_content"),
        (chat(user([])), "empty_content"),
        (chat(user([{"type": "text", "text": " "}])), "empty_content"),
        (chat(user([{"type": "image_url", "image_url": {"url": "x"}}])), "not_text"),
        (chat(user(["hi"])), "not_text"),
        (chat(user({"text": "hi"})), "not_text"),
        (chat(user("half a pair: \ud83d")), "not_unicode"),
        (chat(user(), assistant("x", reasoning_content=["y"])), "not_text"),
        (chat(user(), assistant("x", reasoning="\ud83d")), "not_unicode"),
        (chat({**user(), "name": {"first": "Ann"}}), "not_text"),
        (chat(user(), assistant(None)), "empty_content"),
        (chat(user(), assistant("")), "empty_content"),
        (chat(user(), assistant(None, tool_calls=[])), "empty_content"),
        (chat(user(), assistant(None, tool_calls="add(1)")), "bad_tool_calls"),
        (chat(user(), assistant(None, tool_calls=[{"function": {"arguments": "{}"}}])), "bad_tool_calls"),
        (chat(user(), assistant(None, function_call={"name": "add"})), "function_call"),
        (chat(user(), calls(), tool(None)), "empty_content"),
        (chat(user(), system()), "late_system"),
        (chat(system(), system(), user()), "late_system"),
        (chat(system()), "no_user_turn"),
        (chat(assistant()), "assistant_first"),
        (chat(assistant(), user()), "assistant_first"),
        (chat(system(), assistant(), user()), "assistant_first"),
        (chat(user(), user()), "two_users_running"),
        (chat(user(), assistant(), assistant()), "two_replies_running"),
        (chat(user(), tool()), "tool_without_call"),
        (chat(user(), assistant(), tool()), "tool_without_call"),
        (chat(user(), tools="not json"), "bad_tools"),
        (chat(user(), tools={"name": "add"}), "bad_tools"),
        (chat(user(), tools=["add"]), "bad_tools"),
        (chat(user(), id="a\nb"), "unprintable_id"),
        (chat(user(), assistant(), finish_reason="bored"), "bad_finish_reason"),
        ({"prompt_token_ids": []}, "no_token_ids"),
        ({"prompt_token_ids": "1 2"}, "no_token_ids"),
        ({"prompt_token_ids": [1], "response_token_ids": []}, "no_token_ids"),
        ({"prompt_token_ids": [1, -1]}, "bad_token_ids"),
        ({"prompt_token_ids": [1, True]}, "bad_token_ids"),
        ({"prompt_token_ids": [1, 2.0]}, "bad_token_ids"),
    ],
)
def test_an_odd_row_is_skipped_with_its_reason_and_place(row, reason):
    _, read = convert(row)
    assert isinstance(read, Skipped)
    assert (read.reason, read.place, read.source) == (reason, "f, line 1", "s") and read.detail


DEVELOPER = {"role": "developer", "content": "x"}
SAID = [system(), user("q"), assistant("a"), user("r")]
SHAREGPT = [("system", "be kind"), ("human", "q"), ("gpt", "a"), ("human", "r")]


@pytest.mark.parametrize(
    ("row", "shape", "messages"),
    [
        (chat(*SAID), "messages", SAID),
        ({"conversations": [{"from": f, "value": v} for f, v in SHAREGPT]}, "sharegpt", SAID),
        ({"conversations": [{"from": f, "value": v} for f, v in SHAREGPT[1:]], "system": "be kind"}, "sharegpt", SAID),
        ({"conversations": SAID}, "sharegpt", SAID),
        ({"prompt": "q"}, "prompt", [user("q")]),
        ({"prompt": "q", "response": "a"}, "prompt", [user("q"), assistant("a")]),
        ({"prompt": "q", "system": "be kind"}, "prompt", [system(), user("q")]),
        ({"turns": ["q", "r"]}, "turns", [user("q"), user("r")]),
        (chat({**user(), "name": "Ann", "weight": 1}, prompt="ignored"), "messages", [{**user(), "name": "Ann"}]),
        (chat(DEVELOPER, user()), "messages", [DEVELOPER, user()]),
    ],
)  # fmt: skip
def test_every_shape_becomes_the_conversation_in_it(row, shape, messages):
    found, read = convert(row)
    assert found == shape and list(read.messages) == messages


def test_tool_turns_are_kept_as_a_client_sends_them():
    turns = [user(), calls(), tool("4", tool_call_id="c1"), tool("", tool_call_id="c2"), assistant("four")]
    tools = [{"type": "function", "function": {"name": "add"}}]
    _, read = convert(chat(*turns, tools=tools))
    assert list(read.messages) == turns and list(read.tools) == tools
    assert (
        read.messages[1]["content"] is None and read.messages[1]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    )


def test_tools_as_json_text_are_the_tools():
    _, read = convert(chat(user(), tools='[{"name": "add"}]'))
    assert read.tools == ({"name": "add"},)
    assert convert(chat(user(), tools=""))[1].tools == ()


def test_keys_that_parquet_fills_with_null_are_not_there():
    filled = {"tool_calls": None, "tool_call_id": None, "name": None, "reasoning_content": None}
    _, read = convert(chat({**user(), **filled}, {**assistant(), **filled}))
    assert list(read.messages) == [user(), assistant()]


def test_reasoning_and_content_parts_are_kept():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    _, read = convert(chat(user(parts), assistant("x", reasoning_content="because")))
    assert convert(chat(user(), assistant("x", reasoning="why")))[1].messages[1]["reasoning"] == "why"
    assert read.messages[0]["content"] == parts and read.messages[1]["reasoning_content"] == "because"


def test_text_is_kept_as_it_is():
    text = "  naïve 日本語 🙂\u2028 <|im_end|>\r\n"
    assert convert({"prompt": text})[1].messages == (user(text),)


def test_token_ids_are_turns_of_their_own():
    shape, read = convert({"prompt_token_ids": [1, 2], "response_token_ids": [3], "finish_reason": "length"})
    assert shape == "token_ids" and read.messages == ()
    assert (read.tokens[0].prompt_ids, read.tokens[0].reply_ids) == ([1, 2], [3])
    assert read.finish_reasons == ("length",)
    assert convert({"prompt_token_ids": [1]})[1].tokens[0].reply_ids is None


def test_a_role_that_is_mapped_is_that_role_and_an_ignored_one_is_left_out():
    row = chat({"role": "narrator", "content": "once"}, user(), {"role": "claude", "content": "x"})
    _, read = convert(row, roles={"narrator": "ignore", "claude": "assistant"})
    assert list(read.messages) == [user(), assistant("x")]
    only = chat({"role": "narrator", "content": "once"})
    assert convert(only, roles={"narrator": "ignore"})[1].reason == "no_messages"


@pytest.mark.parametrize(
    ("more", "author"),
    [({}, "config"), ({"model": "m"}, "m"), ({"author": "a", "model": "m"}, "a"), ({"model": 3}, "config")],
)
def test_who_wrote_the_replies_is_said_by_the_row_or_the_config(more, author):
    assert convert(chat(user(), **more), author="config")[1].author == author


def test_a_set_of_turns_alone_is_sent_up_to_its_first_turn_and_a_talk_up_to_its_last():
    assert convert({"turns": ["q", "r"]})[1].request == (user("q"),)
    assert convert(chat(*SAID, assistant("b")))[1].request == tuple(SAID)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "messages",
                    "conversations",
                    "turns",
                    "prompt",
                    "response",
                    "system",
                    "tools",
                    "id",
                    "role",
                    "from",
                    "content",
                    "value",
                    "text",
                    "type",
                    "tool_calls",
                    "function",
                    "name",
                    "prompt_token_ids",
                    "response_token_ids",
                    "finish_reason",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
ROLE = st.sampled_from(["user", "human", "assistant", "gpt", "system", "tool", "", "narrator"])
MESSAGE = st.fixed_dictionaries(
    {"role": ROLE, "content": JSON | st.text()}, optional={"tool_calls": JSON, "reasoning_content": JSON, "name": JSON}
)


@settings(deadline=None, derandomize=True, database=None, max_examples=300)
@given(JSON | st.fixed_dictionaries({"messages": st.lists(MESSAGE, max_size=5)}))
def test_no_row_raises_and_what_is_read_is_in_order(row):
    _, read = convert(row)
    assert isinstance(read, Conversation | Skipped)
    if isinstance(read, Conversation):  # nor does what the stage asks of every conversation
        assert prompt_words(read) is not None and opening_key(read) >= 0
        assert setting_key(read) >= 0 and content_key(read, True) >= 0 and content_key(read, False) >= 0
    if isinstance(read, Skipped):
        assert read.reason and read.detail
        return
    roles = [m["role"] for m in read.messages]
    assert read.tokens or "user" in roles
    assert set(roles) <= {"system", "developer", "user", "assistant", "tool"}
    for before, after in zip(["", *roles], roles, strict=False):
        assert after != "assistant" or before in ("user", "tool")
        assert after != "tool" or before in ("assistant", "tool")
