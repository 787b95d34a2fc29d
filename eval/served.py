"""Serving on vLLM with and without the draft: acceptance by the engine's own counters, speed by the clock."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.core.config import Config
from draftsmith.core.conversations import Skipped
from draftsmith.core.engine import generate, in_engine_process, vllm_engine
from draftsmith.core.errors import StageFailed, UserError
from draftsmith.core.progress import meter
from draftsmith.core.rendering import render_prompt
from draftsmith.core.run import RunFolder
from draftsmith.core.samples import read_samples
from draftsmith.core.sources import read_conversations, source_name
from draftsmith.core.target import Target, load_tokenizer

HELD_OUT = "held_out"
_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class PromptSet:
    """Prompts of one set: ids as sent to the engine, and the longest reply of each."""

    name: str
    prompts: list[list[int]]
    max_tokens: list[int]


@dataclass
class Served:
    """One measured pass over a set.

    Attributes:
        drafts, accepted, accepted_per_position: differences of the engine's counters; empty without a draft.
        tokens, seconds: output tokens and wall time of the pass.
        replies: output ids by prompt.
    """

    set: str
    temperature: float
    concurrency: int
    tokens: int
    seconds: float
    replies: list[list[int]]
    drafts: int = 0
    accepted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)


def prompt_sets(config: Config, target: Target) -> list[PromptSet]:
    """The held-out prompts, then every set of `eval.sets`.

    Raises:
        UserError: a set is missing, empty, or has a row that cannot be used.
    """
    samples = read_samples(RunFolder.of(config).samples, "eval")
    sets = [_prompt_set(config, HELD_OUT, [p for s in samples for p in s.prompts])] if samples else []
    tokenizer = load_tokenizer(target, config.target) if config.eval.sets else None
    for path in config.eval.sets:
        prompts = []
        for row in read_conversations(path):
            if isinstance(row, Skipped):
                raise UserError(
                    f"eval.sets: {row.place}: {row.reason} ({row.detail}).",
                    "Every row of a set is used: mend it.",
                )
            if row.tokens:
                prompts.append(row.tokens[0].prompt_ids)
            else:
                kwargs = config.target.chat_template_kwargs
                prompts.append(render_prompt(tokenizer, row.request, row.place, row.tools, kwargs))
        name = source_name(path)
        taken = {s.name for s in sets}
        sets.append(_prompt_set(config, name if name not in taken else f"{name}-{len(sets)}", prompts))
    if not sets or not all(s.prompts for s in sets):
        raise UserError(
            "there is no prompt to serve.",
            "Hold samples out (data.eval_share), or name JSONL files in eval.sets.",
        )
    return sets


def _prompt_set(config: Config, name: str, prompts: list[list[int]]) -> PromptSet:
    longest = config.data.max_length
    fitting = [p for p in prompts if len(p) + 2 <= longest][: config.eval.max_prompts]
    if len(fitting) < min(len(prompts), config.eval.max_prompts or len(prompts)):
        raise UserError(f"set `{name}`: a prompt is longer than data.max_length ({longest}).", "Raise data.max_length.")
    return PromptSet(name, fitting, [min(config.data.sampling.max_tokens, longest - len(p)) for p in fitting])


def serve(config: Config, target: Target, sets: list[PromptSet], draft: Path | None, k: int) -> list[Served]:
    """Serve every set at every temperature and concurrency, in an engine process of its own.

    Args:
        config: the run's config.
        target: resolved target.
        sets: prompts to serve.
        draft: exported draft, or None for the target alone.
        k: drafted tokens a round.

    Raises:
        StageFailed: the engine did not start, died, or reports no draft though it was given one.
    """
    return in_engine_process(_serve, config, target, sets, draft, k)


def _serve(config: Config, target: Target, sets: list[PromptSet], draft: Path | None, k: int) -> list[Served]:
    args: dict[str, Any] = {
        "max_model_len": config.data.max_length + k + 1,
        "max_num_seqs": max(config.eval.concurrency),
        "enable_prefix_caching": False,  # it changes acceptance; recorded in the report
        "disable_log_stats": False,  # the counters are what we came for
        "seed": config.run.seed,
    }
    if draft:
        args["speculative_config"] = {"method": "eagle3", "model": str(draft), "num_speculative_tokens": k}
    label = f"served, K = {k}" if draft else "served without draft"
    passes = [(s, t, c) for s in sets for t in config.eval.temperature for c in config.eval.concurrency]
    with vllm_engine(config.target, target, **args) as llm:
        # Kernels are made on the first use of a shape: every concurrency is warmed up, with a few tokens.
        for concurrency in config.eval.concurrency:
            some = sets[0].prompts[: 2 * concurrency]
            _measure(config, llm, PromptSet("warm-up", some, [_WARM_UP_TOKENS] * len(some)), 0.0, concurrency, None)
        with meter(label, sum(len(s.prompts) for s, _, _ in passes), "prompts") as shown:
            results = [_measure(config, llm, s, t, c, shown) for s, t, c in passes]
    if draft and not any(r.drafts for r in results):
        raise StageFailed("the engine was given a draft and counted none: it did not speculate.")
    return results


def _measure(config: Config, llm: Any, prompts: PromptSet, temperature: float, concurrency: int, shown: Any) -> Served:
    from vllm import SamplingParams

    params = [
        SamplingParams(
            temperature=temperature,
            max_tokens=n,
            detokenize=False,
            seed=config.run.seed + i if temperature else None,
        )
        for i, n in enumerate(prompts.max_tokens)
    ]
    before = _counters(llm)
    replies: list[list[int]] = [[] for _ in params]
    begin = time.perf_counter()
    for i, output in generate(llm, prompts.prompts, params, in_flight=concurrency):
        replies[i] = [int(t) for t in output.outputs[0].token_ids]
        if shown:
            shown.advance()
    seconds = time.perf_counter() - begin
    change = {name: [a - b for a, b in zip(now, before[name], strict=True)] for name, now in _counters(llm).items()}
    return Served(
        set=prompts.name,
        temperature=temperature,
        concurrency=concurrency,
        tokens=sum(map(len, replies)),
        seconds=seconds,
        replies=replies,
        drafts=sum(change["drafts"]),
        accepted=sum(change["accepted"]),
        accepted_per_position=change["per_position"],
    )


def _counters(llm: Any) -> dict[str, list[int]]:
    """The engine's speculation counters since its start."""
    found: dict[str, list[int]] = {"drafts": [0], "accepted": [0], "per_position": []}
    for metric in llm.get_metrics():
        match metric.name:
            case "vllm:spec_decode_num_drafts":
                found["drafts"] = [int(metric.value)]
            case "vllm:spec_decode_num_accepted_tokens":
                found["accepted"] = [int(metric.value)]
            case "vllm:spec_decode_num_accepted_tokens_per_pos":
                found["per_position"] = [int(v) for v in metric.values]
    return found


def report_rows(k: int, with_draft: list[Served], without: list[Served]) -> Iterator[dict[str, Any]]:
    """`served` rows of the report: one a pass, beside its baseline."""
    for ours, base in zip(with_draft, without, strict=True):
        assert (ours.set, ours.temperature, ours.concurrency) == (
            base.set,
            base.temperature,
            base.concurrency,
        )
        speed, base_speed = ours.tokens / ours.seconds, base.tokens / base.seconds
        yield {
            "set": ours.set,
            "k": k,
            "temperature": ours.temperature,
            "concurrency": ours.concurrency,
            "prompts": len(ours.replies),
            "acceptance_length": 1.0 + ours.accepted / max(1, ours.drafts),
            "per_position": [n / max(1, ours.drafts) for n in ours.accepted_per_position],
            "drafts": ours.drafts,
            "accepted": ours.accepted,
            "tokens": ours.tokens,
            "tokens_per_second": speed,
            "baseline_tokens_per_second": base_speed,
            "speedup": speed / base_speed,
            # At temperature 0 a draft changes nothing but the speed, near-ties in batched arithmetic apart.
            "identical_replies": sum(a == b for a, b in zip(ours.replies, base.replies, strict=True)),
        }
