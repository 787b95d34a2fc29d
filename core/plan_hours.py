"""Hours of a run's stages: by rates that the user states, else by what was measured on H200s, scaled by the work.

On another GPU the rates are scaled by its peak and its bandwidth, which the plan says: that is not measured.
"""

from dataclasses import dataclass
from typing import Any

from draftsmith.core.config import Config
from draftsmith.core.draft_shape import DraftShape
from draftsmith.core.estimate import Amount
from draftsmith.core.gpus import H200, Gpu
from draftsmith.core.sizes import (
    H200_CAPTURE_FIXED,
    H200_CAPTURE_PER_PARAMETER,
    H200_TRAINING_FLOPS,
    REPLY_BANDWIDTH,
    REPLY_FIXED,
    REPLY_SEQUENCES,
    Workload,
    cache_bytes,
    target_bytes,
    target_parameters,
    training_flops,
)
from draftsmith.core.target import Target


@dataclass(frozen=True)
class Rates:
    """What the user states; None: from the benchmarks.

    Attributes:
        capture: tokens/s of all engines together.
        train: tokens/s of all training processes together.
        gpus: that train; None: those of this machine, or one.
        gpu_bytes: memory of each; None: this machine's, or that of `gpu`.
        reply: reply tokens/s of regeneration.
        gpu: a name of core/gpus.py; None: this machine's, or an H200.
        max_hours: a run that takes longer does not fit.
    """

    capture: float | None = None
    train: float | None = None
    gpus: int | None = None
    gpu_bytes: float | None = None
    reply: float | None = None
    gpu: str | None = None
    max_hours: float = 720.0


def hours(config: Config, amount: Amount, target: Target, shape: DraftShape, rates: Rates, gpu: Gpu) -> dict[str, Any]:
    """Hours, tokens and rates of `prepare`, `capture` and `train`; `together` of the last two, `all` of all."""
    assert rates.gpus is not None
    at_once = captures_while_training(config)
    power = gpu.flops / H200.flops
    reply = rates.reply or reply_rate(config, amount, target, gpu)
    capture, train = rates.capture, rates.train
    if capture is None:
        active = target_parameters(target.hf_config)[1] / config.target.tensor_parallel / power
        capture = engines(config) / (H200_CAPTURE_FIXED + H200_CAPTURE_PER_PARAMETER * active)
    if train is None:
        flops = H200_TRAINING_FLOPS[config.train.matmul] * power
        train = rates.gpus * flops / training_flops(shape, workload(config, amount))
    measured = f"measured on H200s{'' if gpu.name == 'H200' else f', and by the peak of {gpu.name}s: not measured'}"
    trained_by = f"{measured} (benchmarks/training), scaled by the work"
    if config.train.engine == "torchspec":
        trained_by += "; TorchSpec's own rate was not measured"
    once, epochs = amount.tokens, config.train.epochs
    trained = amount.tokens * amount.train_share * epochs
    if at_once:  # the held-out samples once, the others in every epoch
        once = round(amount.tokens * (1 - amount.train_share) + trained)
    replies = amount.reply_tokens if config.data.replies == "regenerate" and not amount.prepared else 0
    took = {"prepare": replies / reply / 3600, "capture": once / capture / 3600, "train": trained / train / 3600}
    last = took["capture"], took["train"]
    together = max(last) if at_once else sum(last)
    return {
        **took,
        "prepare_tokens": replies, "prepare_rate": reply,
        "prepare_rate_of": "as stated" if rates.reply else f"estimated for {gpu.name}s by bandwidth: not measured",
        "capture_tokens": once, "capture_rate": capture,
        "capture_rate_of": "as stated" if rates.capture else f"{measured}, scaled by the target",
        "train_tokens": round(trained), "train_rate": train,
        "train_rate_of": "as stated" if rates.train else trained_by,
        "together": together, "all": took["prepare"] + together,
    }  # fmt: skip


def captures_while_training(config: Config) -> bool:
    """Whether states pass to training as they are made, every epoch anew."""
    return config.capture.mode == "spool" or config.train.engine == "torchspec"


def engines(config: Config) -> int:
    """That prefill side by side."""
    if config.train.engine == "torchspec":
        return max(1, config.train.torchspec.inference_gpus // config.target.tensor_parallel)
    return int(config.capture.data_parallel)


def training_gpus(config: Config) -> int | None:
    """That the config itself names."""
    if config.train.engine != "torchspec":
        return None
    return int(config.train.torchspec.training_nodes * config.train.torchspec.training_gpus_per_node)


def reply_rate(config: Config, amount: Amount, target: Target, gpu: Gpu) -> float:
    """Reply tokens/s of one engine: host, weights and cache read each step, products."""
    hf, gpus = target.hf_config, config.target.tensor_parallel
    quantization = getattr(hf, "quantization_config", None) or {}
    weights = target_bytes(hf, config.target.engine_args.get("quantization") or quantization.get("quant_method"))
    length = amount.tokens / max(1, amount.samples)
    context = length - amount.reply_tokens / max(1, amount.samples) / 2  # what a mean reply token looks back over
    cached = context * cache_bytes(hf)
    room = 0.9 * gpus * gpu.nbytes - weights  # for the cache; where the weights themselves do not fit, the plan says so
    sequences = min(float(REPLY_SEQUENCES), max(1.0, room / max(1.0, cached))) if room > 0 else REPLY_SEQUENCES
    bandwidth = gpus * gpu.bandwidth * REPLY_BANDWIDTH
    active = target_parameters(hf)[1] / gpus / (gpu.flops / H200.flops)
    products = H200_CAPTURE_PER_PARAMETER * active
    return 1 / (REPLY_FIXED + weights / bandwidth / sequences + cached / bandwidth + products)


def workload(config: Config, amount: Amount) -> Workload:
    """What a training step works on."""
    train, mean = config.train, amount.tokens / max(1, amount.samples)
    return Workload(
        tokens=max(train.tokens_per_batch, amount.longest),  # a longer sample makes a batch of its own
        supervised=amount.reply_tokens / max(1, amount.tokens),
        length=mean,
        steps=train.ttt_steps,
        full_vocabulary=train.loss not in ("soft_ce",),
        logits_bytes=train.logits_bytes,
        matmul=train.matmul,
    )
