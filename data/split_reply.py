r"""Which ids of a rendered reply the target emitted, and which the server gave it; or why that cannot be told.

    render up to the reply, with generation prompt:   ...[e~[\n]~b]ai\n<think>\n
    render with the reply:                            ...[e~[\n]~b]ai\n<think>\nhm\n</think>\n\n4[e~[\n
                                                                               |----- reply -----|end|

The split is made in the text, between two renders of the template, and never looks for role markers: what a user's or
a tool's text quotes cannot move it. Prompt and reply are then tokenised apart, as the engine had them. Every doubt
refuses the reply, under a reason of its own:

| reason | what is in doubt |
|---|---|
| prompt_not_prefix | the reply does not follow the generation prompt, e.g. reasoning is missing that the server opens |
| special_token_in_reply | its text spells a special token: the server never shows one, so other tokens made that text |
| rewritten_by_template | the template strips or changes the text, or adds some of its own to it |
| ambiguous_white_space | text and template both bring white space to one place, and no parser tells whose it is |
| no_end_token | the template ends the reply with no token that ends one on the engine |
| text_after_end | the template writes more after it |
| cut_before_its_end | it was cut by length inside a call or its reasoning, which the template closes all the same |
| generation_disagrees | the template's own `{% generation %}` marks something else |
| not_round_trip | the tokens do not give the text back |
"""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from draftsmith.core.conversations import Conversation, Message, texts_of
from draftsmith.core.reasoning import ClientView
from draftsmith.core.rendering import encode, render_text, template_inputs

_WINDOW = 16  # prompt tokens decoded before a reply, where decoding depends on what stands before


class Refused(Exception):
    """A reply that cannot be split: reason and detail."""


class ReplySplitter:
    """Splits replies under one tokenizer and template."""

    def __init__(
        self, tokenizer: Any, end_ids: Sequence[int], template_kwargs: dict[str, Any], view: ClientView
    ) -> None:
        """Look up the special tokens.

        Args:
            tokenizer: the target's, with the chat template in force.
            end_ids: tokens that end a reply on the engine.
            template_kwargs: `target.chat_template_kwargs`.
            view: how a client sees a reply.
        """
        self._view = view
        self._tokenizer, self._end_ids, self._kwargs = tokenizer, frozenset(end_ids), template_kwargs
        self._ends = [self._decode([i]) for i in end_ids]
        added = tokenizer.added_tokens_decoder.values()
        self._special = {str(t) for t in added if t.special} | set(tokenizer.all_special_tokens) | set(self._ends)

    def split(self, conversation: Conversation, at: int, finish_reason: str) -> tuple[list[int], list[int]]:
        """Ids of the prompt and of the reply, its end token included unless it was cut by length.

        Args:
            conversation: with messages.
            at: index of the reply among them.
            finish_reason: `stop` or `length`.

        Raises:
            Refused: there is no exact split.
            UserError: the template refuses the conversation.
        """
        message = conversation.messages[at]
        if finish_reason == "length":
            _check_cut(message)
        self._check_special(message)
        prompt = self._render(conversation, at, generation_prompt=True)
        full = self._render(conversation, at + 1, generation_prompt=False)
        if not full.startswith(prompt):
            raise Refused("prompt_not_prefix", f"the prompt ends in {prompt[-40:]!r}")
        body, end = self._body(full[len(prompt) :])
        self._check_generation(conversation, at, prompt, full, (len(body), len(body) + len(end)))
        body = self._as_written(message, prompt, body)
        prompt_ids = encode(self._tokenizer, prompt)
        return prompt_ids, self._reply_ids(prompt, prompt_ids, body if finish_reason == "length" else body + end)

    def _render(self, conversation: Conversation, upto: int, generation_prompt: bool) -> str:
        return render_text(
            self._tokenizer, conversation.messages[:upto], conversation.place, conversation.tools, self._kwargs,
            generation_prompt,
        )  # fmt: skip

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def _check_special(self, message: Message) -> None:
        for text in _texts(message):
            if found := next((token for token in self._special if token in text), None):
                raise Refused("special_token_in_reply", f"its text spells {found!r}")

    def _body(self, rest: str) -> tuple[str, str]:
        """What stands before the end token, and that token's text."""
        found = [(at, end) for end in self._ends if (at := rest.find(end)) >= 0]
        if not found:
            raise Refused("no_end_token", f"the render ends in {rest[-40:]!r}")
        at, end = min(found)
        if rest[at + len(end) :].strip():
            raise Refused("text_after_end", repr(rest[at + len(end) :][:80]))
        return rest[:at], end

    def _check_generation(
        self, conversation: Conversation, at: int, prompt: str, full: str, ends: tuple[int, int]
    ) -> None:
        """Compare with `{% generation %}`, where the template has it.

        The end token may be inside or outside of it, and so may be what the generation prompt puts before a reply.
        """
        inputs = template_inputs(self._tokenizer, conversation.messages[: at + 1], conversation.tools)
        template = inputs["chat_template"]
        if not re.search(r"\{%-?\s*generation\s*-?%\}", template):
            return
        from transformers.utils.chat_template_utils import render_jinja_template

        variables = {**self._tokenizer.special_tokens_map, **self._kwargs}
        (text,), (marked,) = render_jinja_template(
            [inputs["conversation"]], tools=inputs["tools"], chat_template=template, return_assistant_tokens_mask=True,
            add_generation_prompt=False, **variables,
        )  # fmt: skip
        spans = [(start, stop) for start, stop in marked if stop > len(prompt)]
        if text != full or len(spans) != 1:
            raise Refused("generation_disagrees", f"{{% generation %}} marks {len(spans)} spans in the reply")
        start, stop = spans[0]
        early = start != len(prompt) and not (
            len(self._render(conversation, at, generation_prompt=False)) <= start < len(prompt)
        )
        if early or stop not in (*(len(prompt) + end for end in ends), len(full)):
            raise Refused("generation_disagrees", f"{{% generation %}} marks {full[start:stop][:80]!r}")

    def _as_written(self, message: Message, prompt: str, body: str) -> str:
        """The body, once it is known to be what the target wrote and not what the template made of it.

        The white space that a template puts around reasoning and inside calls counts as the target's where the message
        has none there: the server's parsers took it away, and the template puts it back.
        """
        reasoning, content, calls = _reasoning(message), "".join(_content(message)), message.get("tool_calls")
        if not reasoning and not calls:
            _check_text(content, prompt, body)
            return body
        start = _find_in(body, 0, reasoning) if reasoning else 0
        middle = start + len(reasoning or "")
        text = _find_in(body, middle, content) if content else middle
        if not reasoning and text:
            raise Refused("rewritten_by_template", f"{body[:text][:40]!r} was added before the text")
        if not calls and content and body[text:] != content:
            text = body.rfind(content)
            if body[text:] != content:
                raise Refused("rewritten_by_template", f"{body[text + len(content) :][:40]!r} was added")
        if calls:
            _check_calls(calls, body[text + len(content) :])
        if reasoning:
            return self._unambiguous(reasoning, content, prompt, body, (start, middle, text))
        return body

    def _unambiguous(self, reasoning: str, content: str, prompt: str, body: str, at: tuple[int, int, int]) -> str:
        """Of white space that text and template both bring, only the text's own, if the server's parser agrees.

        Args:
            reasoning: of the message.
            content: of the message.
            prompt: text before the reply.
            body: the reply as the template writes it.
            at: where in the body reasoning starts and ends, and where content starts.
        """
        start, middle, text = at
        before, between = body[:start], body[middle:text]
        doubled = (
            (reasoning[0].isspace() and (before or prompt)[-1:].isspace(), "before the reasoning"),
            (reasoning[-1].isspace() and between[:1].isspace(), "after the reasoning"),
            (content[:1].isspace() and between[-1:].isspace(), "before the text"),
        )
        if not (places := [place for found, place in doubled if found]):
            return body
        if self._view.has_parser:
            between = between.lstrip() if doubled[1][0] else between
            between = between.rstrip() if doubled[2][0] else between
            written = (before.rstrip() if doubled[0][0] else before) + reasoning + between + body[text:]
            upto = len(written) - (len(body) - text) + len(content)  # calls are another parser's
            if self._view.parse(written[:upto]) == (reasoning, content or None):
                return written
        mend = "" if self._view.has_parser else "; set target.reasoning_parser to your server's"
        raise Refused("ambiguous_white_space", ", ".join(places) + mend)

    def _reply_ids(self, prompt: str, prompt_ids: list[int], reply: str) -> list[int]:
        """Ids of the reply: by itself, as the engine made it; else as what follows the prompt in both together.

        The second is for tokenizers that put a space before every text.
        """
        before = prompt_ids[-_WINDOW:]
        expected = self._decode(before) + reply
        together = encode(self._tokenizer, prompt + reply)
        for ids in (encode(self._tokenizer, reply), together[len(prompt_ids) :]):
            if self._decode(before + ids) == expected:
                break
        else:
            raise Refused("not_round_trip", f"{reply[:40]!r}")
        if self._end_ids & set(ids[:-1]):
            raise Refused("special_token_in_reply", "a token that ends replies stands inside it")
        return ids


def _texts(message: Message) -> Iterator[str]:
    """Every text of a reply that the target is said to have written."""
    yield from _content(message)
    if reasoning := _reasoning(message):
        yield reasoning
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        yield function["name"]
        yield from _leaves(_parsed(function.get("arguments")))


def _content(message: Message) -> list[str]:
    return [text for text in texts_of(message) if text]


def _reasoning(message: Message) -> str | None:
    return message.get("reasoning") or message.get("reasoning_content")


def _parsed(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        raise Refused("rewritten_by_template", f"arguments that are no JSON: {arguments[:80]!r}") from None


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, str):
        yield value


def _find_in(body: str, at: int, text: str) -> int:
    found = body.find(text, at)
    if found < 0:
        raise Refused("rewritten_by_template", f"{text[:40]!r} is not in {body[at:][:80]!r}")
    return found


def _check_cut(message: Message) -> None:
    """Only a reply that was cut within its text ends where the target stopped."""
    if message.get("tool_calls"):
        raise Refused("cut_before_its_end", "it was cut by length, and ends in a tool call")
    if _reasoning(message) and not _content(message):
        raise Refused("cut_before_its_end", "it was cut by length, and holds nothing but reasoning")


def _check_text(content: str, prompt: str, body: str) -> None:
    """The body is the text itself, without what the generation prompt had opened of it."""
    opened = content.removesuffix(body)
    stripped = opened and not opened.strip()  # white space that only happens to end the prompt too
    if not body or not content.endswith(body) or not prompt.endswith(opened) or stripped:
        raise Refused("rewritten_by_template", f"{content[:40]!r} became {body[:40]!r}")


def _check_calls(calls: list[dict[str, Any]], body: str) -> None:
    """Names and arguments stand in the template's calls as they are, or as JSON writes them."""
    for call in calls:
        function = call.get("function", call)
        for text in _leaves([function["name"], _parsed(function.get("arguments"))]):
            if text not in body:
                _find_in(body, 0, json.dumps(text, ensure_ascii=False)[1:-1])
