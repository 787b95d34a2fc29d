"""Memory of a GPU that trains, as the engine shares the draft out, and what to change where it does not fit.

In float32, as every engine holds them, n processes hold of the draft's P parameters, in units of 4 P bytes (the held
ones were counted on two and four processes, tests/train/test_memory.py):

              weights  masters  moments  gradients | whole during a pass
    DDP          1        -        2         1     | -
    FSDP2       1/n       -       2/n       1/n    | weights, gradients
    ZeRO-1, 2    1       1/n      2/n       1/n    | gradients
    ZeRO-3      1/n      1/n      2/n       1/n    | weights, gradients
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from draftsmith.core.config import Config
from draftsmith.core.deepspeed_file import read_deepspeed_file
from draftsmith.core.draft_shape import DraftShape
from draftsmith.core.estimate import Amount
from draftsmith.core.plan_hours import workload
from draftsmith.core.sizes import Workload, batch_bytes, draft_parameters, training_memory

GB = 1e9
_SHORTEST = 256  # tokens; to cut samples shorter is no way out
_SHARE = ", share the draft out over more GPUs (train.shard=fsdp2)"
_CUDA_BYTES = 1.5e9  # the context, and what the allocator cannot use
_BUCKET = 500_000_000  # DeepSpeed's, in numbers, where the file names none


def memory_parts(config: Config, amount: Amount, shape: DraftShape, gpus: int) -> dict[str, float]:
    """Bytes on each of the GPUs that train, by what they are for.

    Raises:
        UserError: DeepSpeed's file is missing or has no stage.
    """
    work = workload(config, amount)
    parts = training_memory(shape, work) | {"next batch": batch_bytes(shape, work, config.capture.storage == "fp8")}
    sizes = draft_parameters(shape)
    whole, part = 4.0 * sum(sizes.values()), 4.0 * sum(sizes.values()) / gpus
    half = parts["weights and optimizer"] - 4 * whole  # weights in bfloat16
    average = whole
    if config.train.engine == "deepspeed":
        zero = read_deepspeed_file(config.train.deepspeed_config)[1]["zero_optimization"]
        shared = zero["stage"] == 3
        average = part if shared else whole
        held = average + 4 * part
        if _offloads(zero, "optimizer"):  # masters, moments and gradients
            held -= 4 * part
        if shared and _offloads(zero, "param"):
            held -= part
        buckets = 2 if str(zero.get("overlap_comm")).lower() in ("true", "1") and not shared else 1
        parts |= {"weights and optimizer": held + half, "whole in a pass": (2 if shared else 1) * whole}
        parts["exchange of gradients"] = 4.0 * buckets * _numbers(zero.get("reduce_bucket_size"))
    elif config.train.shard == "fsdp2":
        average = part
        parts |= {"weights and optimizer": 4 * part + half, "whole in a pass": 2 * whole}
        parts["exchange of gradients"] = whole
    elif gpus > 1:  # DDP exchanges gradients in buckets as large as all of them
        parts["exchange of gradients"] = whole
    if config.train.optimizer == "muon":  # one moment instead of two, of the matrices
        parts["weights and optimizer"] -= 4.0 * (sizes["fc"] + sizes["attention"] + sizes["mlp"])
    if config.train.ema_decay is not None:
        parts["average of the weights"] = average
    return {**parts, "CUDA": _CUDA_BYTES}


def _offloads(zero: dict[str, Any], what: str) -> bool:
    """Whether `zero_optimization` keeps optimizer or parameters in host memory, or on a disk."""
    given = zero.get(f"offload_{what}")
    return isinstance(given, dict) and (given.get("device") or "none") != "none"


def _numbers(given: Any) -> float:
    """Of a bucket: DeepSpeed takes `auto` and digits in quotes too; what it refuses, training names."""
    with suppress(TypeError, ValueError, OverflowError):
        return float(int(given))
    return _BUCKET


def memory_problem(config: Config, amount: Amount, shape: DraftShape, gpu: dict[str, Any]) -> tuple[str, str] | None:
    """What does not fit a GPU that trains, with the settings that would.

    Args:
        config: of the run.
        amount: what there is to train on.
        shape: of the draft.
        gpu: of the plan: `bytes`, `count`, and `training`, the parts in bytes.
    """
    room, needed, work = gpu["bytes"], sum(gpu["training"].values()), workload(config, amount)
    if needed <= room:
        return None
    what = f"a training step of {work.tokens:,} tokens takes {needed / GB:,.1f} GB, and a GPU has {room / GB:,.1f} GB."
    rest = room - (needed - gpu["training"]["activations"] - gpu["training"]["next batch"])

    def most(high: int, of: Callable[[int], Workload]) -> int:
        """The largest value below `high` whose activations, and the batch that comes next, fit; 0: none."""
        low = 0
        while high - low > 1:
            middle = (low + high) // 2
            less = of(middle)
            coming = batch_bytes(shape, less, config.capture.storage == "fp8")
            fits = training_memory(shape, less)["activations"] + coming <= rest
            low, high = (middle, high) if fits else (low, middle)
        return low

    if (tokens := most(work.tokens, lambda n: replace(work, tokens=n))) >= amount.longest:
        return what, f"Set train.tokens_per_batch to {tokens} or less."
    ways = []
    if steps := most(work.steps, lambda n: replace(work, tokens=amount.longest, steps=n)):
        ways.append(f"train.ttt_steps to {steps} or less (it is {work.steps})")
    if tokens >= _SHORTEST:
        ways.append(f"data.max_length to {tokens} or less (it is {config.data.max_length:,})")
    if ways:
        return what, f"Set {', or '.join(ways)}, or train on GPUs with more memory."
    share = "" if config.train.engine != "accelerate" or config.train.shard != "none" else _SHARE
    return what, f"Lower data.draft_vocab_size{share}, or train on GPUs with more memory."
