"""How a target writes a tool call, as its own chat template shows; so no parser has to be named to notice one."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from draftsmith.core.errors import UserError
from draftsmith.core.rendering import render_text

_NAME, _TEXT = "draftsmithcall", "draftsmithtext"


def call_marker(
    tokenizer: Any, tools: Sequence[dict[str, Any]], template_kwargs: Mapping[str, Any] | None = None
) -> str | None:
    """What stands before the name of the called function, without white space; None where the template shows no calls.

    `<tool_call>` for Qwen, `<minimax:tool_call><invokename=` for MiniMax-M2, `{"name":"` for Llama 3.

    Args:
        tokenizer: the target's, with the chat template in force.
        tools: of the request.
        template_kwargs: `target.chat_template_kwargs`.
    """
    call = {"id": "call00000", "type": "function", "function": {"name": _NAME, "arguments": {}}}
    reply = {"role": "assistant", "content": _TEXT}
    texts = []
    for message in (reply, {**reply, "tool_calls": [call]}):
        try:
            talk = [{"role": "user", "content": "?"}, message]
            texts.append(render_text(tokenizer, talk, "", tools, template_kwargs, generation_prompt=False))
        except UserError:
            return None
    plain, called = texts
    apart = next((i for i, (a, b) in enumerate(zip(plain, called, strict=False)) if a != b), len(plain))
    before, found, _ = called[apart:].partition(_NAME)
    written = "".join(before.replace(_TEXT, "").split())
    # Up to where JSON begins, if anything marks the call before that: its keys may come in another order.
    return (re.split(r'[{\["]', written)[0] or written or None) if found else None
