"""One row of a source -> a conversation. The shape is found out row by row; what does not fit one has a reason.

| shape | keys |
|---|---|
| messages | `messages`: OpenAI's, with `tools`, `tool_calls`, tool replies, `reasoning_content`, content parts |
| sharegpt | `conversations`: `from` and `value` (or `role` and `content`), `system` beside it |
| turns | `turns`: user turns alone, as benchmark sets come |
| prompt | `prompt`, and `response` where there is one; `system` beside it |
| token_ids | `prompt_token_ids`, and `response_token_ids` where there are some |

Every row may also have `id`, `tools`, `model` or `author` (who wrote the replies) and `finish_reason(s)`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draftsmith.core.conversations import Conversation, Message, Skipped, TokenTurn

IGNORED = "ignore"
_TEXT_KEYS = ("tool_call_id", "name", "reasoning_content", "reasoning")
_SYSTEM = ("system", "developer")
_FINISH = {"stop": "stop", "tool_calls": "stop", "length": "length"}


class _OddRow(Exception):
    """Why a row is no conversation: reason and detail."""


@dataclass(frozen=True)
class RowContext:
    """What a row does not say of itself.

    Attributes:
        source: name of the source.
        roles: role name in the source -> OpenAI's role, or `ignore`.
        author: who wrote the replies, unless the row says so itself.
        replies_dropped: the target writes its own: what stands in the source's is neither used nor looked at.
    """

    source: str
    roles: Mapping[str, str]
    author: str | None = None
    replies_dropped: bool = False


def to_conversation(
    row: Any, context: RowContext, made_id: str, place: str
) -> tuple[str | None, Conversation | Skipped]:
    """Shape of a row, and the conversation in it or the reason why there is none.

    Args:
        row: as parsed; anything.
        context: what holds for the whole source.
        made_id: the conversation's id where the row has none.
        place: `file, line n`.
    """
    shape = None
    try:
        if not isinstance(row, dict):
            raise _OddRow("not_an_object", f"a {type(row).__name__}")
        shape, messages, tokens = _content(row, context)
        if not tokens:
            _check_turns(messages, shape == "turns", context.replies_dropped)
        named = (row.get(k) for k in ("author", "model"))
        author = next((n for n in named if isinstance(n, str) and n and n.isprintable()), context.author)
        return shape, Conversation(
            id=_identity(row.get("id"), made_id),
            source=context.source,
            place=place,
            messages=tuple(messages),
            tools=_tools(row.get("tools")),
            author=author,
            finish_reasons=() if context.replies_dropped else _finish_reasons(row),
            tokens=tokens,
        )
    except _OddRow as odd:
        reason, detail = odd.args
        return shape, Skipped(place, reason, detail, context.source)


def _content(row: dict[str, Any], context: RowContext) -> tuple[str, list[Message], tuple[TokenTurn, ...]]:
    if row.get("prompt_token_ids") is not None:
        reply = row.get("response_token_ids")
        turn = TokenTurn(
            _ids(row["prompt_token_ids"], "prompt_token_ids"),
            None if reply is None or context.replies_dropped else _ids(reply, "response_token_ids"),
        )
        return "token_ids", [], (turn,)
    system = _system(row)
    if row.get("messages") is not None:
        return "messages", _messages(row["messages"], context, "messages"), ()
    if row.get("conversations") is not None:
        return "sharegpt", [*system, *_messages(row["conversations"], context, "conversations")], ()
    if row.get("turns") is not None:
        turns = row["turns"]
        if not isinstance(turns, list) or not turns:
            raise _OddRow("no_messages", "`turns` is no list of user turns")
        return "turns", [*system, *({"role": "user", "content": _text(t, i)} for i, t in enumerate(turns))], ()
    if isinstance(row.get("prompt"), str):
        reply = row.get("response")
        answer = [] if reply is None or context.replies_dropped else [{"role": "assistant", "content": reply}]
        return "prompt", [*system, {"role": "user", "content": row["prompt"]}, *answer], ()
    raise _OddRow(
        "no_messages", "none of `messages`, `conversations`, `turns`, `prompt`, `prompt_token_ids`: "
        f"it has {', '.join(map(repr, list(row)[:8])) or 'no keys'}"
    )  # fmt: skip


def _system(row: dict[str, Any]) -> list[Message]:
    text = row.get("system")
    return [{"role": "system", "content": text}] if isinstance(text, str) and text.strip() else []


def _messages(given: Any, context: RowContext, key: str) -> list[Message]:
    if not isinstance(given, list) or not given:
        raise _OddRow("no_messages", f"`{key}` is {'empty' if given == [] else 'no list'}")
    messages = []
    for i, message in enumerate(given):
        if not isinstance(message, dict):
            raise _OddRow("not_a_message", f"message {i}: {_short(message)}")
        name = message.get("role") or message.get("from")
        role = context.roles.get(name) if isinstance(name, str) else None
        if role is None:
            raise _OddRow("unknown_role", f"message {i}: {_short(name)}; map it in data.roles")
        if role == IGNORED:
            continue
        if role == "assistant" and context.replies_dropped:
            # Only that there was one, and whether it called tools: later turns hang on that.
            calls = message.get("tool_calls") or message.get("function_call")
            messages.append({"role": role, "content": None, **({"tool_calls": calls} if calls else {})})
            continue
        if message.get("function_call"):
            raise _OddRow("function_call", f"message {i}: the older `function_call`; write it as `tool_calls`")
        content = message["value"] if "content" not in message and "value" in message else message.get("content")
        clean: Message = {"role": role, "content": _parts(content, i) if isinstance(content, list) else content}
        # Parquet gives every message every key: null there means that it is not there.
        clean.update({k: message[k] for k in ("tool_calls", *_TEXT_KEYS) if message.get(k) not in (None, [], "")})
        messages.append(clean)
    if not messages:
        raise _OddRow("no_messages", "every message is of an ignored role")
    return messages


def _parts(parts: list[Any], i: int) -> list[dict[str, Any]]:
    for part in parts:
        if not isinstance(part, dict) or part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
            raise _OddRow("not_text", f"message {i}: {_short(part)}; only text parts are used")
    return [{k: v for k, v in part.items() if v is not None} for part in parts]


def _check_turns(messages: list[Message], alone: bool, replies_dropped: bool) -> None:
    """Refuse what no client would send, so that no template has to be asked for it.

    Args:
        messages: of one conversation.
        alone: they are user turns alone, to be answered one by one.
        replies_dropped: nothing of a reply is used.
    """
    before = ""
    for i, message in enumerate(messages):
        role = message["role"]
        if role != "assistant" or not replies_dropped:
            _check_content(message, i)
        for key in _TEXT_KEYS:
            _check_text(message.get(key, ""), f"message {i} ({role}): {key}")
        if role in _SYSTEM and i > 0:
            raise _OddRow("late_system", f"message {i} is a {role} message")
        if role == "assistant" and before in ("", *_SYSTEM):
            raise _OddRow("assistant_first", f"message {i} is a reply to nothing")
        if role == "user" and before == "user" and not alone:
            raise _OddRow("two_users_running", f"messages {i - 1} and {i}")
        if role == "assistant" and before == "assistant":
            raise _OddRow("two_replies_running", f"messages {i - 1} and {i}")
        if role == "tool" and before not in ("assistant", "tool"):
            raise _OddRow("tool_without_call", f"message {i}")
        if role == "tool" and before == "assistant" and not messages[i - 1].get("tool_calls"):
            raise _OddRow("tool_without_call", f"message {i} follows a reply without tool_calls")
        before = role
    if not any(m["role"] == "user" for m in messages):
        raise _OddRow("no_user_turn", "no user message")


def _check_content(message: Message, i: int) -> None:
    content, role = message["content"], message["role"]
    if role == "assistant" and _has_calls(message, i) and content in (None, "", []):
        return
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise _OddRow("not_text", f"message {i} ({role}): content is a {type(content).__name__}")
    if content is None or (role != "tool" and not content.strip()):  # a tool may well return nothing
        raise _OddRow("empty_content", f"message {i} ({role}): {'null' if content is None else 'no text'}")
    _check_text(content, f"message {i} ({role}): content")


def _check_text(text: Any, what: str) -> None:
    if not isinstance(text, str):
        raise _OddRow("not_text", f"{what} is a {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _OddRow("not_unicode", f"{what} holds half a surrogate pair") from None


def _has_calls(message: Message, i: int) -> bool:
    calls = message.get("tool_calls")
    if calls is None:
        return False
    if not isinstance(calls, list) or any(
        not isinstance(call, dict)
        or not isinstance(call.get("function", call), dict)
        or not isinstance(call.get("function", call).get("name"), str)
        for call in calls
    ):
        raise _OddRow("bad_tool_calls", f"message {i}: {_short(calls)}")
    return True


def _tools(given: Any) -> tuple[dict[str, Any], ...]:
    """Tool definitions; many Parquet sets hold them as JSON text, since their schemas differ from row to row."""
    tools = given
    if isinstance(given, str):
        try:
            tools = json.loads(given) if given.strip() else []
        except ValueError:
            raise _OddRow("bad_tools", f"`tools` is no JSON: {_short(given)}") from None
    if tools is None:
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise _OddRow("bad_tools", f"`tools` is no list of definitions: {_short(given)}")
    return tuple(tools)


def _finish_reasons(row: dict[str, Any]) -> tuple[str, ...]:
    given = row.get("finish_reasons") or row.get("finish_reason") or []
    given = [given] if isinstance(given, str) else given
    if not isinstance(given, list) or not all(isinstance(g, str) and g in _FINISH for g in given):
        raise _OddRow("bad_finish_reason", f"{_short(given)} is none of {', '.join(_FINISH)}")
    return tuple(_FINISH[g] for g in given)


def _ids(given: Any, key: str) -> list[int]:
    if not isinstance(given, list) or not given:
        raise _OddRow("no_token_ids", f"`{key}` is {'empty' if given == [] else 'no list'}")
    if set(map(type, given)) != {int} or min(given) < 0:  # a bool is no id, and a million rows are many
        raise _OddRow("bad_token_ids", f"`{key}` holds something that is no token id")
    return given


def _text(value: Any, i: int) -> str:
    if not isinstance(value, str):
        raise _OddRow("not_text", f"turn {i} is a {type(value).__name__}")
    return value


def _identity(given: Any, made: str) -> str:
    """The row's own id if it is one; it becomes part of a sample's id, a file's line and a terminal's."""
    if isinstance(given, bool) or not isinstance(given, str | int) or not str(given):
        return made
    if not str(given).isprintable():
        raise _OddRow("unprintable_id", ascii(given))
    return str(given)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
