"""The target answers: on a plain vLLM engine of our own, or on a running server. Ids are kept exactly as they were.

A sample holds the ids that the engine was given and emitted. `dialogues.py` says what is asked; every reply goes to the
journal as it comes in, so a killed run asks only for what it lacks.
"""

from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from draftsmith.core.config import Config
from draftsmith.core.config_replies import SamplingConfig
from draftsmith.core.conversations import Conversation, Skipped
from draftsmith.core.engine import answer, in_engine_process, seeded_args, vllm_engine
from draftsmith.core.progress import Meter, meter, say
from draftsmith.core.target import Target, load_tokenizer
from draftsmith.data.dialogues import Dialogues, Request
from draftsmith.data.journal import Journal
from draftsmith.data.merge import merge
from draftsmith.data.replies import distinct
from draftsmith.data.rows import Row
from draftsmith.data.server import answer_on_server

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams


def regenerate(
    config: Config, target: Target, conversations: Sequence[Conversation], journal: Path
) -> Iterator[Row | Skipped]:
    """Answer all conversations, each `data.sampling.replies` times; rows come in their order.

    Args:
        config: of the run.
        target: the resolved target.
        conversations: what the sources hold; only one is in memory at a time.
        journal: folder of the replies so far; it must not have been made with other settings.

    Raises:
        UserError: the target has no tokenizer or chat template, or the server is not the target's.
        StageFailed: the engine or the server died.
    """
    _say_unused(config.data.sampling)
    if config.data.server is None:
        skipped, places = in_engine_process(_answer, config, target, conversations, journal)
    else:
        skipped, places = _answer(config, target, conversations, journal)
    yield from skipped
    replies = Journal(journal)
    for rows, same in distinct(replies.rows(places), conversations):
        yield from same
        yield from merge(rows, config.data.max_length)
    replies.close()


def _say_unused(sampling: SamplingConfig) -> None:
    """A setting that does nothing is said: who copies a model's recommendations may have left out the temperature."""
    choosing = {name: getattr(SamplingConfig(), name) for name in ("top_p", "top_k", "min_p")}
    unused = [f"data.sampling.{name}" for name, off in choosing.items() if getattr(sampling, name) != off]
    if unused and sampling.temperature == 0:
        say(f"warning: at data.sampling.temperature 0 replies are greedy, whatever {', '.join(unused)} says")


def _answer(
    config: Config, target: Target, conversations: Sequence[Conversation], folder: Path
) -> "tuple[list[Skipped], array[int]]":
    """What was not asked, and the places of all replies in the journal."""
    journal = Journal(folder)
    if len(journal):
        say(f"replies: {len(journal):,} are there already, from a run that was stopped")
    dialogues = Dialogues(config, load_tokenizer(target, config.target), conversations, journal)
    if first := dialogues.take():
        with meter("target's replies", None, "replies", start=len(journal)) as shown:
            if config.data.server is None:
                _answer_here(config, target, dialogues, first, shown)
            else:
                answer_on_server(config, dialogues, first, shown)
    places = journal.confirmed()
    journal.close()
    return dialogues.skipped, places


def _answer_here(config: Config, target: Target, dialogues: Dialogues, first: Request, shown: Meter) -> None:
    longest = config.data.max_length
    args = {"max_model_len": longest, "seed": config.run.seed, **seeded_args()}
    with vllm_engine(config.target, target, **args) as llm:
        answer_on_engine(config, llm, dialogues, first, shown)


def answer_on_engine(config: Config, llm: "LLM", dialogues: Dialogues, first: Request, shown: Meter) -> None:
    """Keep a running engine full until there is nothing more to ask."""
    waiting, tokens = [first], 0

    def take() -> "tuple[Request, list[int], SamplingParams] | None":
        request = waiting.pop() if waiting else dialogues.take()
        return (request, request.prompt_ids, sampling_params(config, request)) if request else None

    # Twice what runs at once: the scheduler never looks for work, and the prompts of a million rows stay on disk.
    room = 2 * llm.llm_engine.vllm_config.scheduler_config.max_num_seqs
    for request, output in answer(llm, take, room):
        completion = output.outputs[0]
        ids = [int(t) for t in completion.token_ids]
        dialogues.accept(request, ids, str(completion.finish_reason))
        tokens += len(ids)
        shown.advance(tokens=f"{tokens:,}")


def sampling_params(config: Config, request: Request) -> "SamplingParams":
    """A request's parameters for the engine."""
    from vllm import SamplingParams

    sampling = config.data.sampling
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        max_tokens=request.max_tokens,
        seed=request.seed,
        detokenize=False,
    )
