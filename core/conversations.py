"""Conversations as they come out of a source, before anything is rendered."""

import itertools
from dataclasses import dataclass
from typing import Any

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
        id: the row's own `id`, else made of source, file and number.
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

    @property
    def request(self) -> tuple[Message, ...]:
        """What a server would be sent: up to the last user turn, or to the first one that has no reply before the next.

        A set of `turns` alone holds no replies: its second turn cannot be sent before the first is answered.
        """
        turns = self.user_turns
        open_turns = (i for i, after in itertools.pairwise(turns) if after == i + 1)
        return self.messages[: next(open_turns, turns[-1]) + 1]


@dataclass(frozen=True)
class Skipped:
    """A row or sample that is not used: where it is, why, and of which source."""

    place: str
    reason: str
    detail: str
    source: str = ""


def texts_of(message: Message) -> list[str]:
    """The text of a message, part by part.

    Raises:
        ValueError: a part is no text.
    """
    content = message.get("content")
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    texts = [part if isinstance(part, str) else part.get("text") for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("a content part that is no text")
    return texts


def text_of(message: Message) -> str:
    """The text of a message, its parts one after another; empty where there is none."""
    return "\n".join(texts_of(message))
