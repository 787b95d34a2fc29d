r"""What a client sees of a reply: the text, and its reasoning apart where the server has a parser for it.

The parsers are vLLM's own, named as for `vllm serve --reasoning-parser`: they differ in which white space they keep,
and a client sends back what it got. MiniMax-M2's reply `hm\n</think>\n\n4` is reasoning `hm`, content `\n\n4`.
"""

from collections.abc import Sequence
from typing import Any

from draftsmith.core.config import TargetConfig
from draftsmith.core.conversations import Message
from draftsmith.core.engine import require_vllm
from draftsmith.core.errors import UserError


class ClientView:
    """Replies of one target as its server returns them."""

    def __init__(self, config: TargetConfig, tokenizer: Any) -> None:
        """Look the parser up.

        Raises:
            UserError: there is no such parser, or it cannot read this tokenizer.
        """
        self._tokenizer, self._kwargs = tokenizer, config.chat_template_kwargs
        self._parser: Any = None
        self._show_special = False
        if config.reasoning_parser:
            self._load(config.reasoning_parser)

    @property
    def has_parser(self) -> bool:
        """Whether reasoning is told apart."""
        return self._parser is not None

    def message(self, reply_ids: Sequence[int], finish_reason: str) -> Message:
        """The assistant message that a client sends back in its next request."""
        shown = reply_ids[:-1] if finish_reason == "stop" else reply_ids  # the token that ends a reply is not shown
        text = self._tokenizer.decode(list(shown), skip_special_tokens=not self._show_special)
        if not self.has_parser:
            return {"role": "assistant", "content": text}
        reasoning, content = self.parse(text)
        apart = {} if reasoning is None else {"reasoning_content": reasoning}
        return {"role": "assistant", "content": content, **apart}

    def parse(self, text: str) -> tuple[str | None, str | None]:
        """Reasoning and content of a reply's text."""
        parser, request = self._new()  # one for every reply, as on the server: some keep state
        reasoning, content = parser.extract_reasoning(text, request)
        return reasoning, content

    def _load(self, name: str) -> None:
        require_vllm("target.reasoning_parser")
        from vllm.reasoning import ReasoningParserManager

        try:
            self._parser = ReasoningParserManager.get_reasoning_parser(name)
            _, request = self._new()
        except (KeyError, RuntimeError, ValueError, AttributeError, ImportError) as error:
            raise UserError(
                f"target.reasoning_parser: vLLM has no usable `{name}` for this tokenizer ({error}).",
                "Use the name that your server is started with (--reasoning-parser), or null.",
            ) from None
        self._show_special = not request.skip_special_tokens

    def _new(self) -> tuple[Any, Any]:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        parser = self._parser(self._tokenizer, chat_template_kwargs=self._kwargs)
        request = ChatCompletionRequest(messages=[{"role": "user", "content": ""}], model="")
        # A parser may ask for its own markers to be shown.
        return parser, parser.adjust_request(request) if hasattr(parser, "adjust_request") else request
