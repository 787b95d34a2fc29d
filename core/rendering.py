"""Renders conversations as served."""

from typing import Any

from draftsmith.core.conversations import Message
from draftsmith.core.errors import UserError


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
