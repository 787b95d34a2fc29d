"""Which prompts the target is to answer, in which order: a conversation's next turn is asked once its last is answered.

`history: own` plays the client: each prompt holds the target's own earlier replies, as its server would have returned
them. It ends early where the source goes on as no client could: with a tool's answer to a call that the target may not
have made, with a user's turn after a call that it did make, or after a reply that was cut. `history: source` asks for
every reply that the source has, after the source's own messages; pre-tokenised turns are asked as they are either way.
With `data.sampling.replies` every conversation is held that many times, each with replies of its own.
"""

import itertools
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from draftsmith.core.config import Config
from draftsmith.core.conversations import Conversation, Message, Skipped
from draftsmith.core.errors import StageFailed, UserError
from draftsmith.core.reasoning import ClientView
from draftsmith.core.rendering import render_prompt
from draftsmith.data.journal import Journal
from draftsmith.data.replies import place, reply_seed
from draftsmith.data.tool_calls import call_marker

# Conversations that have rows and could have had more: listed, but no fault of the source.
ENDED_EARLY = ("after_tool_turn", "after_length_cut", "history_too_long")

_Asked = tuple[int, list[int]]  # turn, prompt ids
_Answered = tuple[list[int], str]  # reply ids, finish reason
_Talk = Generator[_Asked, _Answered, None]
_Whose = tuple[int, int]  # conversation, and which of its replies


@dataclass(frozen=True)
class Request:
    """One prompt for the target.

    Attributes:
        reply: which of several to the conversation, counted from 0.
        seed: of its own, so that a sampled reply does not depend on what else is in the batch; None: greedy.
    """

    conversation: int
    reply: int
    turn: int
    prompt_ids: list[int]
    max_tokens: int
    seed: int | None


class Dialogues:
    """All conversations, each as far as it has been answered."""

    def __init__(self, config: Config, tokenizer: Any, conversations: Sequence[Conversation], journal: Journal) -> None:
        self._config, self._tokenizer, self._conversations = config, tokenizer, conversations
        self._journal, self._view = journal, ClientView(config.target, tokenizer)
        self._unopened: Iterator[tuple[_Whose, _Talk]] = self._talks()
        self._ready: deque[Request] = deque()
        self._talking: dict[tuple[int, int, int], _Talk] = {}
        self.skipped: list[Skipped] = []

    def take(self) -> Request | None:
        """The next prompt; None while there is none before another reply is in."""
        while not self._ready:
            opened = next(self._unopened, None)
            if opened is None:
                return None
            self._go_on(*opened, None)
        return self._ready.popleft()

    def accept(self, request: Request, reply_ids: list[int], finish_reason: str) -> None:
        """Record a reply; the conversation's next prompt goes before those of unopened ones.

        Raises:
            StageFailed: the reply was neither ended by the target nor cut by its length.
        """
        if finish_reason not in ("stop", "length"):
            raise StageFailed(
                f"{self._conversations[request.conversation].place}: the engine ended a reply with `{finish_reason}`. "
                "The replies so far are kept: run the same command."
            )
        whose = (request.conversation, request.reply)
        self._journal.add(*whose, request.turn, request.prompt_ids, reply_ids, finish_reason)
        self._go_on(whose, self._talking.pop((*whose, request.turn)), (reply_ids, finish_reason))

    def _go_on(self, whose: _Whose, talk: _Talk, answered: _Answered | None) -> None:
        """Run a talk to its next unanswered prompt."""
        data = self._config.data
        try:
            turn, prompt_ids = talk.send(answered) if answered else next(talk)
            while done := self._journal.get(*whose, turn, prompt_ids):
                turn, prompt_ids = talk.send(done)
        except StopIteration:
            return
        seed = None
        if data.sampling.temperature > 0:
            base = self._config.run.seed if data.sampling.seed is None else data.sampling.seed
            seed = reply_seed(base, len(self._conversations), *whose, turn)
        self._talking[*whose, turn] = talk
        room = min(data.sampling.max_tokens, data.max_length - len(prompt_ids))
        self._ready.append(Request(*whose, turn, prompt_ids, room, seed))

    def _talks(self) -> Iterator[tuple[_Whose, _Talk]]:
        for c in range(len(self._conversations)):
            conversation = self._conversations[c]
            for reply in range(self._config.data.sampling.replies):
                for talk in self._talks_of(replace(conversation, place=place(conversation, reply))):
                    yield (c, reply), talk

    def _talks_of(self, conversation: Conversation) -> Iterator[_Talk]:
        if conversation.tokens:
            for turn, given in enumerate(conversation.tokens):
                yield self._single(conversation, turn, given.prompt_ids)
        elif self._config.data.history == "source" and not _asks_twice(conversation):
            messages = conversation.messages
            ends = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
            if messages[-1]["role"] in ("user", "tool"):
                ends.append(len(messages))
            for turn, end in enumerate(ends):
                yield self._single(conversation, turn, messages[:end])
        else:
            yield self._own(conversation)

    def _single(self, conversation: Conversation, turn: int, prompt: list[int] | tuple[Message, ...]) -> _Talk:
        ids = prompt if isinstance(prompt, list) else self._render(conversation, list(prompt))
        if ids is not None and self._fits(conversation, ids, "prompt_too_long"):
            yield turn, ids

    def _own(self, conversation: Conversation) -> _Talk:
        said: list[Message] = []
        at = -1
        turns = conversation.user_turns
        for turn, end in enumerate(turns):
            between = conversation.messages[at + 1 : end + 1]
            if any(m["role"] == "tool" for m in between):
                self._skip(conversation, "after_tool_turn", f"user turn {turn + 1} follows a tool's answer")
                return
            said += [m for m in between if m["role"] != "assistant"]
            at = end
            ids = self._render(conversation, said)
            if ids is None or not self._fits(conversation, ids, "history_too_long" if turn else "prompt_too_long"):
                return
            reply_ids, finish_reason = yield turn, ids
            if turn + 1 < len(turns) and finish_reason != "stop":
                self._skip(conversation, "after_length_cut", f"reply {turn + 1} was cut at {len(reply_ids)} tokens")
                return
            if turn + 1 < len(turns) and self._calls_tool(conversation, reply_ids):
                self._skip(
                    conversation, "after_tool_turn", f"reply {turn + 1} calls a tool, and nobody is there to answer"
                )
                return
            said.append(self._view.message(reply_ids, finish_reason))
        if any(m["role"] == "tool" for m in conversation.messages[at + 1 :]):
            self._skip(conversation, "after_tool_turn", "its last turns follow a tool's answer")

    def _calls_tool(self, conversation: Conversation, reply_ids: list[int]) -> bool:
        if not conversation.tools:
            return False
        marker = call_marker(self._tokenizer, conversation.tools, self._config.target.chat_template_kwargs)
        text: str = self._tokenizer.decode(reply_ids, skip_special_tokens=False)
        return marker is not None and marker in "".join(text.split())

    def _render(self, conversation: Conversation, messages: list[Message]) -> list[int] | None:
        try:
            return render_prompt(
                self._tokenizer,
                messages,
                conversation.place,
                tools=conversation.tools,
                template_kwargs=self._config.target.chat_template_kwargs,
            )
        except UserError as error:
            self._skip(conversation, "template_refused", error.what)
            return None

    def _fits(self, conversation: Conversation, ids: list[int], reason: str) -> bool:
        longest = self._config.data.max_length
        fits = len(ids) + 2 <= longest  # a reply of one token has no row to supervise
        if not fits:
            self._skip(conversation, reason, f"{len(ids)} tokens, data.max_length {longest}")
        return fits

    def _skip(self, conversation: Conversation, reason: str, detail: str) -> None:
        self.skipped.append(Skipped(conversation.place, reason, detail, conversation.source))


def _asks_twice(conversation: Conversation) -> bool:
    """Whether a user turn follows another without a reply, as in sets of `turns`: the target writes it."""
    roles = [m["role"] for m in conversation.messages]
    return any(a == b == "user" for a, b in itertools.pairwise(roles))
