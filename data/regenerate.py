"""The target answers every user turn on a plain vLLM engine; prompt and reply token ids are kept as they were.

A conversation is answered turn by turn, each turn a sample of its own: its prompt is the chat template's render of
the conversation so far, with the target's own earlier replies as a client would send them back. So a sample holds
exactly the ids that a server processes, whatever the template strips from earlier turns.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.core.config import Config
from draftsmith.core.conversations import Conversation, Skipped
from draftsmith.core.engine import generate, in_engine_process, vllm_engine
from draftsmith.core.errors import UserError
from draftsmith.core.progress import meter
from draftsmith.core.rendering import render_prompt
from draftsmith.core.target import Target, load_tokenizer
from draftsmith.data.rows import Row


@dataclass(frozen=True)
class Reply:
    """One answered user turn: ids as the engine was given and emitted them."""

    conversation: int
    turn: int
    prompt_ids: list[int]
    reply_ids: list[int]
    finish_reason: str


def regenerate(
    config: Config, target: Target, conversations: Sequence[Conversation], journal: Path
) -> Iterator[Row | Skipped]:
    """Answer all conversations; rows come sorted by conversation and turn.

    Raises:
        UserError: the target has no tokenizer or chat template.
        StageFailed: the engine died.
    """
    replies, skipped = in_engine_process(_answer, config, target, list(conversations))
    yield from skipped
    for r in replies:
        ids, start = r.prompt_ids + r.reply_ids, len(r.prompt_ids)
        yield Row(r.conversation, r.turn, ids, [(start, len(ids))], r.finish_reason, "target")


def _answer(config: Config, target: Target, conversations: list[Conversation]) -> tuple[list[Reply], list[Skipped]]:
    tokenizer = load_tokenizer(target, config.target)
    replies: list[Reply] = []
    skipped: list[Skipped] = []
    # What a client has seen so far: the source's messages up to the next user turn, with the target's replies.
    open_turns = [
        (c, list(conversations[c].messages[: conversations[c].user_turns[0] + 1])) for c in range(len(conversations))
    ]
    longest = config.data.max_length
    with vllm_engine(config.target, target, max_model_len=longest, seed=config.run.seed) as llm:
        turn = 0
        while open_turns:
            ready = _render(config, tokenizer, conversations, open_turns, skipped)
            answered = _generate(config, llm, ready, turn, len(conversations))
            replies += answered
            texts = {r.conversation: tokenizer.decode(r.reply_ids, skip_special_tokens=True) for r in answered}
            turn += 1
            open_turns = [
                (
                    c,
                    [
                        *messages,
                        {"role": "assistant", "content": texts[c]},
                        conversations[c].messages[at[turn]],
                    ],
                )
                for c, messages, _ in ready
                if len(at := conversations[c].user_turns) > turn
            ]
    return sorted(replies, key=lambda r: (r.conversation, r.turn)), skipped


def _render(
    config: Config,
    tokenizer: Any,
    conversations: list[Conversation],
    turns: list[tuple[int, Any]],
    skipped: list[Skipped],
) -> list[tuple[int, Any, list[int]]]:
    """Prompt ids of every open turn that leaves room for a reply; the others are noted as skipped."""
    ready = []
    for c, messages in turns:
        place = conversations[c].place
        try:
            ids = render_prompt(tokenizer, messages, place)
        except UserError as error:
            skipped.append(Skipped(place, "template_refused", error.what))
            continue
        if len(ids) + 2 > config.data.max_length:  # a reply of one token has no row to supervise
            skipped.append(
                Skipped(place, "prompt_too_long", f"{len(ids)} tokens, data.max_length {config.data.max_length}")
            )
            continue
        ready.append((c, messages, ids))
    return ready


def _generate(config: Config, llm: Any, ready: list[tuple[int, Any, list[int]]], turn: int, total: int) -> list[Reply]:
    from vllm import SamplingParams

    sampling, longest = config.data.sampling, config.data.max_length
    prompts = [ids for _, _, ids in ready]
    params = [
        SamplingParams(
            temperature=sampling.temperature,
            max_tokens=min(sampling.max_tokens, longest - len(ids)),
            detokenize=False,
            # A seed of its own makes a sampled reply independent of what else is in the batch.
            seed=None if sampling.temperature == 0 else config.run.seed * 1_000_003 + turn * total + c,
        )
        for c, _, ids in ready
    ]
    replies, tokens = [], 0
    label = "target's replies" if turn == 0 else f"target's replies, turn {turn + 1}"
    with meter(label, len(prompts), "prompts") as shown:
        for i, output in generate(llm, prompts, params):
            completion = output.outputs[0]
            ids = [int(t) for t in completion.token_ids]
            replies.append(Reply(ready[i][0], turn, prompts[i], ids, str(completion.finish_reason)))
            tokens += len(ids)
            shown.advance(tokens=f"{tokens:,}")
    return replies
