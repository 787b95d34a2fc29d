"""The prompts that are served: ids as the engine is given them, by set.

A set's further turns need the target's own earlier replies. They are asked for once, at temperature 0 and without a
draft, and then every pass is given the same ids, whatever its draft, temperature and concurrency.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from draftsmith.core.atomic import write_atomic
from draftsmith.core.config import Config
from draftsmith.core.conversations import Conversation, Message, Skipped, text_of
from draftsmith.core.errors import UserError
from draftsmith.core.reasoning import ClientView
from draftsmith.core.rendering import render_prompt
from draftsmith.core.revisions import pinned, recorded_revisions
from draftsmith.core.run import RunFolder
from draftsmith.core.samples import read_samples
from draftsmith.core.sources import read_conversations, source_name
from draftsmith.core.target import Target, load_tokenizer

HELD_OUT = "held_out"
_TURN_TOKENS = 64
# Prompts and longest replies in; reply ids and finish reason of each out.
Answer = Callable[[list[list[int]], list[int]], list[tuple[list[int], str]]]


@dataclass(frozen=True)
class Prompt:
    """One request: conversation and turn as its id, ids as sent, longest reply in tokens."""

    id: str
    ids: list[int]
    max_tokens: int


@dataclass
class Dialogue:
    """A conversation of a set.

    Attributes:
        id: of the conversation.
        prompts: its turns so far.
        messages: what the last of them rendered.
        later: messages up to each further user turn, which wait for the reply before them.
        tools: definitions that go with every request.
    """

    id: str
    prompts: list[Prompt]
    messages: list[Message] = field(default_factory=list)
    later: list[list[Message]] = field(default_factory=list)
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class PromptSet:
    """Conversations of one set."""

    name: str
    dialogues: list[Dialogue]

    @property
    def prompts(self) -> list[Prompt]:
        """Every turn of every conversation."""
        return [p for d in self.dialogues for p in d.prompts]

    def some(self, count: int | None) -> list[Prompt]:
        """About `count` prompts, whole conversations spread evenly over the set; None: all."""
        if count is None or count >= len(self.prompts):
            return self.prompts
        wanted = max(1, count * len(self.dialogues) // len(self.prompts))
        return [p for d in spread(self.dialogues, wanted) for p in d.prompts]


def spread(values: Sequence[Any], count: int | None) -> list[Any]:
    """`count` of the values at even distances, or all where there are no more."""
    if count is None or count >= len(values):
        return list(values)
    return [values[i * len(values) // count] for i in range(count)]


class PromptSets:
    """The held-out prompts and those of `eval.sets`."""

    def __init__(self, config: Config, target: Target) -> None:
        """Read and render them, further turns apart.

        Raises:
            UserError: a set is missing, empty, or has a row that cannot be used.
        """
        self.config, self.target = config, target
        # A request may be as long as the engine's context, which also holds the drafts.
        self.context: int = getattr(target.hf_config, "max_position_embeddings", None) or 2**31
        self._tokenizer: Any = load_tokenizer(target, config.target) if config.eval.sets else None
        held_out = self._held_out()
        self.sets = [held_out] if held_out.dialogues else []
        for path in config.eval.sets:
            self.sets.append(PromptSet(self._free_name(source_name(path)), self._dialogues(path)))
        if not self.sets or not all(s.dialogues for s in self.sets):
            raise UserError(
                "there is no prompt to serve.",
                "Hold samples out (data.eval_share), or name JSONL files in eval.sets.",
            )

    @property
    def longest(self) -> int:
        """Tokens that the longest request and its reply may come to, replies that are still waited for included."""
        return max(self._length(d) for s in self.sets for d in s.dialogues)

    def _length(self, dialogue: Dialogue) -> int:
        known = max(len(p.ids) + p.max_tokens for p in dialogue.prompts)
        # A turn that waits is not rendered yet: its text, with room for what the template writes around it.
        texts = [text_of(m) for messages in dialogue.later for m in messages]
        coming = sum(len(self._tokenizer.encode(t)) + _TURN_TOKENS for t in texts)
        return min(known + coming + len(dialogue.later) * (self._longest_reply + _TURN_TOKENS), self.context)

    @property
    def _longest_reply(self) -> int:
        return self.config.eval.max_tokens or self.config.data.sampling.max_tokens

    def complete(self, answer: Answer) -> None:
        """Have the target answer what later turns wait for."""
        while waiting := [d for s in self.sets for d in s.dialogues if d.later]:
            last = [d.prompts[-1] for d in waiting]
            replies = answer([p.ids for p in last], [p.max_tokens for p in last])
            view = ClientView(self.config.target, self._tokenizer)
            for dialogue, (reply, finish_reason) in zip(waiting, replies, strict=True):
                dialogue.messages += [view.message(reply, finish_reason), *dialogue.later.pop(0)]
                self._ask(dialogue)

    def _free_name(self, name: str) -> str:
        taken = {s.name for s in self.sets}
        return name if name not in taken else f"{name}-{len(self.sets)}"

    def _held_out(self) -> PromptSet:
        """As `prepare` asked them, so that replay and serving are about the same replies."""
        data = self.config.data
        dialogues = [
            Dialogue(
                s.sample_id,
                [
                    Prompt(f"{s.sample_id}#{i}" if i else s.sample_id, ids, min(data.sampling.max_tokens, room))
                    for i, ids in enumerate(s.prompts)
                    if (room := data.max_length - len(ids)) >= 2
                ],
            )
            for s in read_samples(RunFolder.of(self.config).samples, "eval")
        ]
        return PromptSet(HELD_OUT, spread([d for d in dialogues if d.prompts], self.config.eval.max_prompts))

    def _dialogues(self, path: str) -> list[Dialogue]:
        read, source = [], pinned(path, recorded_revisions(RunFolder.of(self.config)))
        for row in read_conversations(source, roles=self.config.data.roles):
            if isinstance(row, Skipped):
                raise UserError(
                    f"eval.sets: {row.place}: {row.reason} ({row.detail}).", "Every row of a set is used: mend it."
                )
            read.append(row)
        return [self._dialogue(row) for row in spread(read, self.config.eval.max_prompts)]

    def _dialogue(self, row: Conversation) -> Dialogue:
        if row.tokens:
            return Dialogue(row.id, [self._prompt(row.id, 0, row.tokens[0].prompt_ids)])
        begin = len(row.request)
        ends = [i + 1 for i in row.user_turns if i >= begin]
        later = [
            [m for m in row.messages[a:b] if m["role"] != "assistant"]  # these replies are to be the target's own
            for a, b in zip([begin, *ends], ends, strict=False)
        ]
        dialogue = Dialogue(row.id, [], list(row.request), later, row.tools)
        self._ask(dialogue)
        return dialogue

    def _ask(self, dialogue: Dialogue) -> None:
        kwargs = self.config.target.chat_template_kwargs
        ids = render_prompt(self._tokenizer, dialogue.messages, dialogue.id, dialogue.tools, kwargs)
        dialogue.prompts.append(self._prompt(dialogue.id, len(dialogue.prompts), ids))

    def _prompt(self, name: str, turn: int, ids: list[int]) -> Prompt:
        room = self.context - len(ids) - max(self.config.eval.k) - 1
        if room < 2:
            raise UserError(
                f"eval.sets: `{name}`, turn {turn + 1}: its prompt of {len(ids)} tokens is longer than the target's "
                f"context of {self.context} has room for.",
                "Remove the row.",
            )
        return Prompt(f"{name}/{turn}", ids, min(self._longest_reply, room))


def write_prompts(path: Path, sets: Sequence[PromptSet]) -> None:
    """Write every prompt's set, id, ids and longest reply as Parquet: what it takes to send the same requests again."""
    columns = {
        "set": [s.name for s in sets for _ in s.prompts],
        "prompt_id": [p.id for s in sets for p in s.prompts],
        "prompt_ids": pa.array([p.ids for s in sets for p in s.prompts], pa.list_(pa.int32())),
        "max_tokens": pa.array([p.max_tokens for s in sets for p in s.prompts], pa.int32()),
    }
    write_atomic(path, lambda tmp: pq.write_table(pa.table(columns), tmp, compression="zstd"))
