"""Every side over every cell of the sweep, pass by pass in turns, so that a speed-up is a ratio from one run."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from draftsmith.core.config import Config
from draftsmith.core.engine import has_cuda
from draftsmith.core.errors import UserError
from draftsmith.core.progress import Meter, meter, say
from draftsmith.core.target import Target, weight_bytes
from draftsmith.eval.engine import engine_sides, warm_up
from draftsmith.eval.journal import PassJournal
from draftsmith.eval.passes import Job, Pass, Side
from draftsmith.eval.prompts import Prompt, PromptSets
from draftsmith.eval.server import ServerSide, server_sides

# Beside its weights an engine holds a cache, graphs and buffers; a CPU engine's cache is 2 GiB.
_ENGINE_BYTES = 4 * 1024**3


@dataclass(frozen=True)
class Variant:
    """What is served: a draft at a draft length, or (None, 0) the target alone."""

    draft: Path | None
    k: int


@dataclass(frozen=True)
class Measured:
    """A pass, and the one without a draft that it is compared with.

    Attributes:
        variant, job, done: what was served, what was asked, what came of it.
        baseline: the same job without a draft; None: there is no such side.
        interleaved: whether both sides were alive and took turns.
    """

    variant: Variant
    job: Job
    done: Pass
    baseline: Pass | None
    interleaved: bool


BASELINE = Variant(None, 0)


def serve(
    config: Config, target: Target, sets: PromptSets, variants: Sequence[Variant], journal: PassJournal | None = None
) -> list[Measured]:
    """Measure drafts on engines of our own, beside the target alone.

    Args:
        config: the run's config.
        target: resolved target.
        sets: prompts; what later turns wait for is answered first.
        variants: drafts and lengths.
        journal: cells that it has are not measured again, others are added to it.

    Raises:
        StageFailed: an engine did not start, died, or does not speculate.
    """
    groups = _groups(config, target, variants)
    say(f"engines: {' | '.join(' + '.join(_name(v) for v in group) for group in groups)}")
    measured: list[Measured] = []
    baselines: dict[int, Pass] = {}
    for group in groups:
        engines = [(v.draft, v.k) for v in group]
        with engine_sides(config, target, engines, sets.longest, _cache_bytes(config, target, len(group))) as sides:
            if any(d.later for s in sets.sets for d in s.dialogues):
                sets.complete(partial(_answer, sides[0], config, journal))
            for side in sides:
                warm_up(side, sets.sets[0].prompts, config)
            together = len(group) > 1
            for number, job, passes in _in_turns(config, sets, sides, [_name(v) for v in group], journal):
                if group[0] == BASELINE:
                    baselines[number] = passes[0]
                measured += [
                    Measured(variant, job, done, baselines.get(number), together)
                    for variant, done in zip(group, passes, strict=True)
                    if variant != BASELINE
                ]
    return measured


def serve_on_server(config: Config, sets: PromptSets) -> tuple[list[Measured], list[ServerSide]]:
    """Measure the server of `eval.server`, beside the one without a draft where there is one.

    Raises:
        UserError: a server is not there, is busy, or is not what the config says.
        StageFailed: it stopped answering.
    """
    with server_sides(config) as sides:
        if (room := min(side.context for side in sides)) < sets.longest:
            raise UserError(
                f"eval.server has a context of {room} tokens, and the longest request may take {sets.longest}.",
                "Start it with a larger --max-model-len, or lower eval.max_tokens.",
            )
        sets.complete(partial(_answer, sides[0], config, None))
        for side in sides:
            warm_up(side, sets.sets[0].prompts, config)
        measured = []
        for _, job, passes in _in_turns(config, sets, sides, ["served"], None):
            baseline = passes[0] if len(sides) > 1 else None
            measured.append(Measured(Variant(None, sides[-1].k), job, passes[-1], baseline, len(sides) > 1))
        return measured, sides


def _groups(config: Config, target: Target, variants: Sequence[Variant]) -> list[list[Variant]]:
    """Engines that are alive at once."""
    together, pairs = [[BASELINE, *variants]], [[BASELINE, v] for v in variants]
    choice = config.eval.engines
    if choice == "auto":
        fits = _engines_that_fit(config, target)
        choice = "together" if fits > len(variants) else "pairs" if fits > 1 else "apart"
    if choice == "apart":
        return [[BASELINE], *([v] for v in variants)]
    return together if choice == "together" else pairs


def _engines_that_fit(config: Config, target: Target) -> int:
    one = weight_bytes(target) / config.target.tensor_parallel + _ENGINE_BYTES
    if not has_cuda():
        # Float32 weights take twice what the checkpoint's do.
        return int(psutil.virtual_memory().available * 0.7 / (one + weight_bytes(target)))
    import torch

    free, _ = torch.cuda.mem_get_info()
    return int(free * 0.9 / one)


def _cache_bytes(config: Config, target: Target, engines: int) -> int | None:
    """A KV cache for each of several engines on one GPU, so that they may start side by side.

    None where there is no such choice: one engine, a CPU, sizes given by the user, or no more than vLLM's own
    measuring would find room for.
    """
    own_sizes = {"gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override"}
    if engines == 1 or not has_cuda() or own_sizes & config.target.engine_args.keys():
        return None
    import torch

    free, _ = torch.cuda.mem_get_info()
    taken = weight_bytes(target) / config.target.tensor_parallel + 2 * _ENGINE_BYTES
    each = free * 0.9 / engines - taken
    return int(each) if each > taken else None


def _in_turns(
    config: Config, sets: PromptSets, sides: Sequence[Side], names: list[str], journal: PassJournal | None
) -> Iterator[tuple[int, Job, list[Pass]]]:
    """Every cell with one pass of every side; who begins changes from cell to cell."""
    jobs = list(_jobs(config, sets))
    with meter(" + ".join(names), sum(len(job.prompts) for job in jobs) * len(sides), "prompts") as shown:
        for number, job in enumerate(jobs):
            if journal and (before := journal.get(names, job)):
                journal.used += 1
                shown.advance(len(job.prompts) * len(sides), set=job.set)
                yield number, job, before
                continue
            passes: dict[int, Pass] = {}
            for i in range(len(sides)):
                at = (i + number) % len(sides)
                passes[at] = sides[at].measure(job)
                _show(shown, job, passes[at])
            in_order = [passes[i] for i in range(len(sides))]
            if journal:
                journal.add(names, job, in_order)
            yield number, job, in_order


def _jobs(config: Config, sets: PromptSets) -> Iterator[Job]:
    waves = config.eval.waves
    for prompt_set in sets.sets:
        for temperature in config.eval.temperature:
            for concurrency in config.eval.concurrency:
                prompts = prompt_set.some(waves * concurrency if waves else None)
                yield Job(prompt_set.name, temperature, concurrency, prompts, config.run.seed)


def _show(shown: Meter, job: Job, done: Pass) -> None:
    shown.advance(
        len(job.prompts),
        set=job.set,
        T=f"{job.temperature:g}",
        in_flight=str(job.concurrency),
        tokens=f"{done.tokens / done.seconds:,.0f}/s",
    )


def _answer(
    side: Side, config: Config, journal: PassJournal | None, ids: list[list[int]], longest: list[int]
) -> list[tuple[list[int], str]]:
    prompts = [Prompt(str(i), p, n) for i, (p, n) in enumerate(zip(ids, longest, strict=True))]
    job = Job("earlier turns", 0.0, max(config.eval.concurrency), prompts, config.run.seed)
    before = journal.get([], job) if journal else None  # the cells of a set of several turns are those of its answers
    done = before[0] if before else side.measure(job)
    if journal and not before:
        journal.add([], job, [done])
    return list(zip(done.replies, done.finish_reasons, strict=True))


def _name(variant: Variant) -> str:
    if variant.draft is None:
        return "no draft"
    return f"{variant.draft.name} at K = {variant.k}"
