"""A conversation -> the prompt that vLLM's OpenAI server makes of it, id for id.

The server changes messages before the template sees them, and templates see the difference: `content` becomes text or a
list of parts (as the template reads it), null becomes empty, JSON text in `tool_calls` becomes a mapping, reasoning is
known under both its names, keys that are no part of the API are dropped. Then the template renders, and the text is
tokenised without the tokenizer's own special tokens: the template has written them (no second BOS). Special tokens that
a user's text spells become special tokens, as they do on the server.

Nothing of vLLM is imported: `tests/parity/test_rendering.py` compares with the server's own path.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from draftsmith.core.content_format import ContentFormat, content_format
from draftsmith.core.conversations import Message, text_of, texts_of
from draftsmith.core.errors import UserError

# vLLM drops this line of a client's system prompt: it differs from request to request.
_BILLING_HEADER = "x-anthropic-billing-header"


def render_prompt(
    tokenizer: Any,
    messages: Sequence[Message],
    place: str,
    tools: Sequence[dict[str, Any]] = (),
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Ids that the engine is given when a client sends `messages`.

    Args:
        tokenizer: the target's, with the chat template in force.
        messages: as the client sends them.
        place: names the conversation in errors.
        tools: tool definitions of the request.
        template_kwargs: `target.chat_template_kwargs`.

    Raises:
        UserError: the template refuses the conversation.
    """
    return encode(tokenizer, render_text(tokenizer, messages, place, tools, template_kwargs))


def render_text(
    tokenizer: Any,
    messages: Sequence[Message],
    place: str,
    tools: Sequence[dict[str, Any]] = (),
    template_kwargs: Mapping[str, Any] | None = None,
    generation_prompt: bool = True,
) -> str:
    """Text of the same; without `generation_prompt`, the conversation as the template writes it to its end.

    Raises:
        UserError: the template refuses the conversation.
    """
    try:
        text: str = tokenizer.apply_chat_template(
            **template_inputs(tokenizer, messages, tools),
            **{**(template_kwargs or {}), "add_generation_prompt": generation_prompt, "continue_final_message": False},
            tokenize=False,
        )
    except Exception as error:  # Jinja runs the template's own code
        raise UserError(
            f"{place}: the chat template refuses it ({error}).", "Remove the row or set target.chat_template."
        ) from None
    return text


def encode(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text that holds its special tokens already."""
    return [int(i) for i in tokenizer.encode(text, add_special_tokens=False)]


def template_inputs(tokenizer: Any, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """`conversation`, `tools` and `chat_template` as the server gives them to `apply_chat_template`."""
    definitions = [_tool(tool) for tool in tools] or None  # the API has no empty list of tools
    template: str = tokenizer.get_chat_template(None, tools=definitions)
    served = [_message(message, content_format(template)) for message in messages]
    if any(m["role"] == "developer" for m in served) and not ('"developer"' in template or "'developer'" in template):
        served = _developer_as_system(served)
    return {"conversation": served, "tools": definitions, "chat_template": template}


def _message(message: Message, form: ContentFormat) -> Message:
    role = message["role"]
    texts = texts_of(message)
    if role == "system":
        texts = [rest for text in texts if (rest := _without_billing_header(text)) is not None]
    # A tool's answer is text for every template: few of them can read parts there.
    as_text = form == "string" or role == "tool"
    served: Message = {
        "role": role,
        "content": "\n".join(texts) if as_text else [{"type": "text", "text": text} for text in texts],
    }
    if role == "assistant":
        if calls := message.get("tool_calls"):
            served["tool_calls"] = [_tool_call(call) for call in calls]
        reasoning = message.get("reasoning")
        reasoning = message.get("reasoning_content") if reasoning is None else reasoning
        if reasoning is not None:
            served["reasoning"] = served["reasoning_content"] = reasoning
    elif role == "tool" and message.get("tool_call_id") is not None:
        served["tool_call_id"] = message["tool_call_id"]
    if isinstance(message.get("name"), str):
        served["name"] = message["name"]
    return served


def _without_billing_header(text: str) -> str | None:
    if not text.startswith(_BILLING_HEADER):
        return text
    return text.partition("\n")[2] or None


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """In the key order of the API's own types, which some templates print as they are."""
    function = call.get("function", call)
    served = {"function": {"arguments": _arguments(function.get("arguments")), "name": function["name"]}}
    return {**({"id": call["id"]} if "id" in call else {}), **served, "type": "function"}


def _arguments(given: Any) -> dict[str, Any]:
    """A mapping, as templates expect it; what is none is an empty one, as on the server."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            return {}
    return given if isinstance(given, dict) else {}


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """The API's own fields in their order, absent ones null: templates print definitions as JSON."""
    function = tool.get("function", tool)
    fields = {key: function.get(key) for key in ("name", "description", "parameters")}
    strict = {"strict": function["strict"]} if function.get("strict") is not None else {}
    return {"type": "function", "function": {**fields, **strict}}


def _developer_as_system(messages: list[Message]) -> list[Message]:
    """For templates without that role; system messages become one, at the start."""
    renamed = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
    system = [m for m in renamed if m["role"] == "system"]
    if len(system) == 1 and renamed[0] is system[0]:
        return renamed
    texts = [text_of(m) for m in system]
    others = [m for m in renamed if m["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(text for text in texts if text)}, *others]
