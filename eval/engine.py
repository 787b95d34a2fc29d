"""An engine of ours as a side of the measurement; it lives in a process of its own and stays warm between passes."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.core.config import Config, TargetConfig
from draftsmith.core.draft_folder import refuse_sglang_ids
from draftsmith.core.engine import (
    EngineProcess,
    all_outcomes,
    engine_errors,
    has_cuda,
    outcome,
    seeded_args,
    vllm_engine,
)
from draftsmith.core.errors import StageFailed
from draftsmith.core.target import Target
from draftsmith.eval.passes import Clock, Counters, Job, Pass, Side
from draftsmith.eval.prompts import Prompt

if TYPE_CHECKING:
    from vllm import LLM

_WARM_UP_TOKENS = 8
# Rounds of drafts that fit behind the longest reply. A round is scheduled before the one before it has been read, and
# drafts for the one after: vLLM 0.24 once died of an illegal memory access at K = 7 where there was room for one.
_BEYOND = 5
# What lives in the engine process: one engine, and what ends it.
_running: dict[str, Any] = {}


class EngineSide:
    """Answers jobs on one engine."""

    def __init__(self, process: EngineProcess, draft: Path | None, k: int) -> None:
        """Made by `engine_sides`."""
        self.draft, self._k, self._process = draft, k, process
        self._speculated = False

    @property
    def k(self) -> int:
        """Drafted tokens a round; 0 without a draft."""
        return self._k

    def measure(self, job: Job) -> Pass:
        """Serve a job.

        Raises:
            StageFailed: the engine died, or was given a draft and does not speculate.
        """
        done = self._process.run(_measure, job)
        # A round needs a token after the first: a set of replies of one token counts nothing.
        self._speculated = self._speculated or done.counters.drafts > 0 or max(map(len, done.replies), default=0) < 2
        if self.draft and not self._speculated:
            raise StageFailed("the engine was given a draft and counted none: it did not speculate.")
        return done


@contextmanager
def engine_sides(
    config: Config, target: Target, variants: Sequence[tuple[Path | None, int]], context: int, cache_bytes: int | None
) -> Iterator[list[EngineSide]]:
    """Start an engine for every (draft folder or None, K), for the length of the block.

    Args:
        config: the run's config.
        target: resolved target.
        variants: drafts, None for the target alone, and drafted tokens a round.
        context: tokens of the longest request and its reply.
        cache_bytes: of each engine's KV cache; given, engines start side by side. None: one after another, each
            measuring what memory its share leaves it, which another's start would spoil.

    Raises:
        StageFailed: one did not start.
    """
    limit: int = getattr(target.hf_config, "max_position_embeddings", None) or 2**31
    with ExitStack() as stack:
        processes = [stack.enter_context(EngineProcess()) for _ in variants]
        opened = []
        for process, (draft, k) in zip(processes, variants, strict=True):
            room = min(context + _BEYOND * (k + 1), limit)
            args, of_target = engine_args(config, draft, k, room, 1.0 / len(variants), cache_bytes)
            opened.append(process.submit(_open, of_target, target, args))
            if cache_bytes is None:
                outcome(opened[-1], _open.__name__)
        all_outcomes(opened, _open.__name__)
        yield [EngineSide(process, draft, k) for process, (draft, k) in zip(processes, variants, strict=True)]
        all_outcomes([process.submit(_close) for process in processes], _close.__name__)
        for process in processes:
            process.let_end()


def engine_args(
    config: Config, draft: Path | None, k: int, context: int, share: float, cache_bytes: int | None = None
) -> tuple[dict[str, Any], TargetConfig]:
    """Arguments of `vllm.LLM`, and the target section without those that are among them.

    Args:
        config: the run's config.
        draft: draft folder; None: none.
        k: drafted tokens a round.
        context: tokens that a request, its reply and its drafts may come to.
        share: of the memory that one engine alone would take.
        cache_bytes: of the KV cache; None: what the share leaves.
    """
    given = dict(config.target.engine_args)
    args: dict[str, Any] = {
        "max_model_len": context,
        "max_num_seqs": max(config.eval.concurrency),
        "enable_prefix_caching": False,  # it changes acceptance; recorded in the report
        "disable_log_stats": False,  # the counters are what we came for
        "seed": config.run.seed,
        **seeded_args(),
    }
    if has_cuda() and share < 1.0:
        args["gpu_memory_utilization"] = share * float(given.pop("gpu_memory_utilization", 0.9))
    if cache_bytes is not None:
        args["kv_cache_memory_bytes"] = cache_bytes
    if draft:
        refuse_sglang_ids(draft)
        sampling = config.eval.draft_sampling
        # Left out where it is the default: older engines do not know the key.
        method = {} if sampling == "greedy" else {"draft_sample_method": sampling}
        spec = {"method": "eagle3", "model": str(draft.resolve()), "num_speculative_tokens": k, **method}
        args["speculative_config"] = spec
    return args, config.target.model_copy(update={"engine_args": given})


def warm_up(side: Side, prompts: Sequence[Prompt], config: Config) -> None:
    """Kernels are made on the first use of a shape: every concurrency and way of sampling once, with a few tokens."""
    some = [Prompt(p.id, p.ids, _WARM_UP_TOKENS) for p in prompts]
    for concurrency in config.eval.concurrency:
        for temperature in config.eval.temperature:
            asked = [some[i % len(some)] for i in range(2 * concurrency)]
            side.measure(Job("warm-up", temperature, concurrency, asked))


def _open(config: TargetConfig, target: Target, args: dict[str, Any]) -> None:
    stack = ExitStack()
    _running["llm"] = stack.enter_context(vllm_engine(config, target, **args))
    _running["stack"] = stack


def _close() -> None:
    _running.pop("stack").close()
    _running.clear()


def _measure(job: Job) -> Pass:
    llm: LLM = _running["llm"]
    with engine_errors():
        before = _counters(llm)
        done = _drive(llm, job)
        return replace(done, counters=_counters(llm).since(before))


def _drive(llm: "LLM", job: Job) -> Pass:
    """Keep the engine at the job's concurrency, and watch when tokens come."""
    from vllm import SamplingParams, TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    engine, count, asked = llm.llm_engine, len(job.prompts), 0
    clocks: list[Clock] = []
    replies: list[list[int]] = [[] for _ in job.prompts]
    reasons, running, begin = [""] * count, 0, time.perf_counter()
    while asked < count or running:
        while asked < count and running < job.concurrency:
            prompt = job.prompts[asked]
            params = SamplingParams(
                temperature=job.temperature,
                max_tokens=prompt.max_tokens,
                detokenize=False,
                seed=job.seed + asked if job.temperature else None,
                output_kind=RequestOutputKind.DELTA,
            )
            clocks.append(Clock(time.perf_counter()))
            engine.add_request(str(asked), TokensPrompt(prompt_token_ids=prompt.ids), params)
            asked, running = asked + 1, running + 1
        for output in engine.step():
            i, new = int(output.request_id), output.outputs[0].token_ids
            if new:
                clocks[i].tick(time.perf_counter())
                replies[i] += new
            if output.finished:
                reasons[i], running = str(output.outputs[0].finish_reason), running - 1
    return Pass(
        seconds=time.perf_counter() - begin,
        replies=replies,
        finish_reasons=reasons,
        outputs=[c.outputs for c in clocks],
        first_token=[c.first - c.asked for c in clocks],
        between_tokens=[c.between(len(r)) for c, r in zip(clocks, replies, strict=True)],
    )


def _counters(llm: "LLM") -> Counters:
    metrics: dict[str, Any] = {m.name.removeprefix("vllm:spec_decode_num_"): m for m in llm.get_metrics()}
    if "drafts" not in metrics:
        return Counters()
    drafts, accepted, by_position = (metrics[n] for n in ("drafts", "accepted_tokens", "accepted_tokens_per_pos"))
    return Counters(int(drafts.value), int(accepted.value), tuple(map(int, by_position.values)))
