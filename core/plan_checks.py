"""Settings that no machine of any size could run, each with its mend, before anything runs."""

from collections.abc import Iterator
from typing import Any

from draftsmith.core.capturable import refusal
from draftsmith.core.config import Config
from draftsmith.core.draft_shape import DraftShape
from draftsmith.core.estimate import Amount
from draftsmith.core.gpus import Gpu
from draftsmith.core.plan_hours import Rates, captures_while_training, workload
from draftsmith.core.store import bytes_per_row
from draftsmith.core.target import Target, context_of

_BEYOND_SAMPLE = 2  # positions that the capturing engine takes after a sample


def setting_problems(
    config: Config,
    amount: Amount,
    target: Target,
    shape: DraftShape,
    gpu: Gpu,
    rates: Rates,
    plan: dict[str, Any],
) -> list[tuple[str, str]]:
    """What the settings ask for and cannot be, as (what, mend).

    Args:
        config: of the run.
        amount: what there is to capture and to train on.
        target: its shape.
        shape: of the draft.
        gpu: that the plan is for.
        rates: what the user states.
        plan: what was planned so far: hours.
    """
    return [
        *_vocabulary(config, target),
        *_length(config, target),
        *_steps(config, amount),
        *_parallel(config, target, shape),
        *_spool(config, amount, shape),
        *_time(config, rates, plan["hours"]),
        *_float8(config, gpu),
        *([found] if (found := refusal(config.capture, target)) else []),
    ]


def _vocabulary(config: Config, target: Target) -> Iterator[tuple[str, str]]:
    size = config.data.draft_vocab_size
    if size and size > target.vocab_size:
        yield (
            f"data.draft_vocab_size is {size:,}, and the target has {target.vocab_size:,} tokens.",
            f"Set it to {target.vocab_size} or less, or to null for the whole vocabulary.",
        )


def _length(config: Config, target: Target) -> Iterator[tuple[str, str]]:
    context, needed = context_of(target.hf_config), config.data.max_length + _BEYOND_SAMPLE
    if context is not None and needed > context:
        yield (
            f"data.max_length is {config.data.max_length:,}, and the target's context holds samples of "
            f"{context - _BEYOND_SAMPLE:,} tokens.",
            f"Set data.max_length to {context - _BEYOND_SAMPLE} or less.",
        )


def _steps(config: Config, amount: Amount) -> Iterator[tuple[str, str]]:
    """Step j is supervised by j + 1 tokens of one reply (core/unroll.py): a shorter one teaches it nothing."""
    steps, reply, of = config.train.ttt_steps, amount.longest - 1, f"samples of {amount.longest:,} tokens at most"
    if config.data.replies == "regenerate" and config.data.sampling.max_tokens < reply:
        reply, of = config.data.sampling.max_tokens, "data.sampling.max_tokens"
    if steps >= reply:
        yield (
            f"train.ttt_steps is {steps:,}, and a reply has {reply:,} tokens at most ({of}): the last steps would "
            "have nothing to learn from.",
            f"Set train.ttt_steps to {max(1, reply - 1)} or less.",
        )


def _parallel(config: Config, target: Target, shape: DraftShape) -> Iterator[tuple[str, str]]:
    """Heads that vLLM cannot divide among an engine's GPUs: the target's, and the draft's, which is served with it."""
    hf, gpus = target.hf_config, config.target.tensor_parallel
    heads = getattr(hf, "num_attention_heads", None) or 1
    kinds = (("the target", heads, getattr(hf, "num_key_value_heads", None) or heads),
             ("the draft", shape.num_heads, shape.num_kv_heads))  # fmt: skip
    for whose, queries, keys in kinds:
        fits = [n for n in range(1, queries + 1) if not queries % n and not (keys % n and n % keys)]
        if gpus not in fits:
            named = ", ".join(map(str, [n for n in fits if n <= 64]))
            yield (
                f"target.tensor_parallel is {gpus}, and {whose} has {queries} attention heads ({keys} for keys).",
                f"Set it to one of {named}{', or change draft.num_heads' if whose == 'the draft' else ''}.",
            )
            break
    block = _expert_block(hf)
    inner = getattr(hf, "moe_intermediate_size", None) or getattr(hf, "intermediate_size", None)
    apart = config.target.engine_args.get("enable_expert_parallel")
    if block and inner and inner % gpus == 0 and (inner // gpus) % block and not apart and heads % gpus == 0:
        yield (
            f"target.tensor_parallel is {gpus}: that leaves {inner // gpus} of an expert's {inner} columns to a GPU, "
            f"and the checkpoint has one float8 scale for every {block}.",
            "Set target.engine_args={enable_expert_parallel: true}, which divides the experts instead, or lower it.",
        )


def _expert_block(hf: Any) -> int:
    """Columns of an expert that share a scale in a float8 checkpoint; 0: no experts or other scales."""
    quantization = getattr(hf, "quantization_config", None) or {}
    experts = any(getattr(hf, key, None) for key in ("num_local_experts", "n_routed_experts", "num_experts"))
    block = quantization.get("weight_block_size") if quantization.get("quant_method") == "fp8" else None
    return int(block[0]) if experts and block else 0


def _spool(config: Config, amount: Amount, shape: DraftShape) -> Iterator[tuple[str, str]]:
    """A spool holds two shards at once, and a shard whole optimizer steps of every process."""
    capture = config.capture
    if capture.mode != "spool" or capture.spool_bytes is None or config.train.engine == "torchspec":
        return
    if amount.prepared:  # by the samples' own sizes then (core/cli_spool.py)
        return
    token, label = bytes_per_row(capture.storage, shape.num_aux, shape.hidden_size)
    work = workload(config, amount)
    step = round(work.tokens * (token + work.supervised * label)) * config.train.grad_accum_steps
    all_of_it = amount.train_share * (amount.tokens * token + amount.reply_tokens * label) * config.train.epochs
    needed = min(2 * max(capture.shard_bytes, step), round(all_of_it))
    if capture.spool_bytes < needed:
        yield (
            f"capture.spool_bytes is {capture.spool_bytes:,}, and two shards take {needed:,} bytes or more: each has "
            f"capture.shard_bytes ({capture.shard_bytes:,}), and at least one optimizer step of {step:,} bytes.",
            f"Set capture.spool_bytes to {needed} or more, or lower capture.shard_bytes.",
        )


def _time(config: Config, rates: Rates, hours: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if hours["all"] <= rates.max_hours:
        return
    days = hours["all"] / 24
    what = f"all of it takes {hours['all']:,.0f} hours ({days:,.0f} days), above --max-hours {rates.max_hours:,.0f}."
    at_once = captures_while_training(config)
    fixed = hours["all"] - hours["together"] + (0 if at_once else hours["capture"])
    each = max(hours["train"], hours["capture"] if at_once else 0) / config.train.epochs
    epochs = int((rates.max_hours - fixed) / each) if each else 0
    if 0 < epochs < config.train.epochs:
        yield what, f"Set train.epochs to {epochs} or less (it is {config.train.epochs:,}), or use more GPUs."
    else:
        yield what, "Use fewer samples (data.sources: limit), more GPUs, or more capture.data_parallel."


def _float8(config: Config, gpu: Gpu) -> Iterator[tuple[str, str]]:
    if config.train.matmul == "fp8" and not gpu.fp8:
        yield f"train.matmul is fp8, and {gpu.name}s have no float8 products.", "Set train.matmul to bf16."
