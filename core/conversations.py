"""Conversations from JSONL files: the user turns that the target is to answer.

A line is an object with `messages` ([{"role", "content"}, ...]) or with `prompt` (one user turn), and optionally
`id`. A line that cannot be used is counted under a reason, never guessed at.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from draftsmith.core.errors import UserError

DEMO = "demo-prompts"
# In OpenAI's chat form, as a client would send it: role; content (text, null or a list of parts); and where they
# apply tool_calls, tool_call_id, name, reasoning_content.
Message = dict[str, Any]


@dataclass(frozen=True)
class TokenTurn:
    """A turn whose ids the source gives itself.

    Attributes:
        prompt_ids: everything the engine was given, earlier turns included.
        reply_ids: what it emitted, its end token included; None: there is no reply yet.
    """

    prompt_ids: list[int]
    reply_ids: list[int] | None


@dataclass(frozen=True)
class Conversation:
    """One conversation as read.

    Attributes:
        id: the line's own `id`, else file stem and line number.
        source: name of the source.
        place: `file, line n`, for messages.
        messages: every turn, as a client would send it; empty where `tokens` are given.
        tools: tool definitions that go with the request.
        author: who wrote the replies, as the row or the config says; None: nobody said.
        finish_reasons: of the replies, in their order, where the row gives them.
        tokens: turns of a pre-tokenised row.
    """

    id: str
    source: str
    place: str
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    author: str | None = None
    finish_reasons: tuple[str, ...] = ()
    tokens: tuple[TokenTurn, ...] = ()

    @property
    def user_turns(self) -> list[int]:
        """Indices of the user messages."""
        return [i for i, m in enumerate(self.messages) if m["role"] == "user"]


@dataclass(frozen=True)
class Skipped:
    """A line or sample that is not used: where it is, why, and of which source."""

    place: str
    reason: str
    detail: str
    source: str = ""


def source_file(path: str) -> Path:
    """File of a source; `demo-prompts` is the package's own.

    Raises:
        UserError: there is no such file.
    """
    if path == DEMO:
        return Path(str(files("draftsmith.data").joinpath("prompts/demo.jsonl")))
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(
            f"data source `{path}`: no such file.",
            f"Check data.sources / eval.sets, or use the embedded `{DEMO}`.",
        )
    return file


def read_conversations(path: str, name: str | None = None) -> Iterator[Conversation | Skipped]:
    """Every line of a source, as a conversation or as the reason why it is none.

    Args:
        path: JSONL file or `demo-prompts`.
        name: of the source, in samples and in made-up ids; None: the file's stem.

    Raises:
        UserError: there is no such file, or it is not UTF-8 text.
    """
    file = source_file(path)
    name = name or (DEMO if path == DEMO else file.stem)
    with file.open(encoding="utf-8-sig") as lines:
        try:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _read_line(line, name, f"{file}, line {number}", number)
        except UnicodeDecodeError as error:
            raise UserError(f"{file}: not UTF-8 text ({error.reason}).", "Sources are JSONL files in UTF-8.") from None


def render_prompt(tokenizer: Any, messages: list[Message], place: str) -> list[int]:
    """Ids of the chat template's render with its generation prompt, as vLLM's server makes them.

    Raises:
        UserError: the template refuses the conversation.
    """
    try:
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    except Exception as error:  # Jinja runs the template's own code
        raise UserError(
            f"{place}: the chat template refuses it ({error}).", "Remove the row or set target.chat_template."
        ) from None
    return [int(i) for i in ids]


def _read_line(line: str, source: str, place: str, number: int) -> Conversation | Skipped:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return Skipped(place, "not_json", str(error))
    if not isinstance(row, dict):
        return Skipped(place, "not_an_object", f"a {type(row).__name__}")
    messages: Any = row.get("messages")
    if messages is None and isinstance(row.get("prompt"), str):
        messages = [{"role": "user", "content": row["prompt"]}]
    problem = _problem(messages)
    if problem:
        return Skipped(place, *problem)
    identity = row.get("id")
    name = str(identity) if isinstance(identity, str | int) and str(identity) else f"{source}-{number:07d}"
    if not name.isprintable():
        return Skipped(place, "unprintable_id", ascii(name))
    clean = tuple({"role": m["role"], "content": m["content"]} for m in messages)
    return Conversation(name, source, place, clean)


def _problem(messages: Any) -> tuple[str, str] | None:
    if not isinstance(messages, list) or not messages:
        return "no_messages", "neither `messages` nor `prompt`"
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ("system", "user", "assistant"):
            return "unknown_role", f"message {i}: {str(message)[:80]}"
        if not isinstance(message.get("content"), str) or not message["content"].strip():
            return "empty_content", f"message {i} ({message['role']})"
        if message["role"] == "system" and i > 0:
            return "late_system", f"message {i} is a system message"
    turns = [m["role"] for m in messages if m["role"] != "system"]
    if "user" not in turns:
        return "no_user_turn", "no user message"
    if any(turn != ("user", "assistant")[i % 2] for i, turn in enumerate(turns)):
        return "turns_out_of_order", " ".join(turns)
    return None
