"""What a run will need, before anything runs: tokens, bytes, hours, memory; and what does not fit, with its mend.

Torch-free and without weights: of a target on the hub only its config.json is fetched.
"""

import json
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

from draftsmith.core import embedded
from draftsmith.core.config import Config, TargetConfig
from draftsmith.core.draft_shape import DraftShape, resolve_shape
from draftsmith.core.errors import UserError
from draftsmith.core.estimate import Amount
from draftsmith.core.run import RunFolder
from draftsmith.core.sizes import (
    H200_CAPTURE_FIXED,
    H200_CAPTURE_PER_PARAMETER,
    H200_TRAINING_FLOPS,
    Workload,
    draft_parameters,
    target_parameters,
    training_flops,
    training_memory,
)
from draftsmith.core.store import bytes_per_row
from draftsmith.core.target import Target, resolve_layer_ids

H200_BYTES = 141e9
_CUDA_BYTES = 1.5e9  # the context, and what the allocator cannot use
_USABLE = 0.9  # of a GPU's memory, for an engine's weights: its cache and activations need the rest
GB = 1e9


@dataclass(frozen=True)
class Rates:
    """What the user states; None: from the benchmarks.

    Attributes:
        capture: tokens/s of all engines together.
        train: tokens/s of all training processes together.
        gpus: that train; None: those of this machine, or one.
        gpu_bytes: memory of each; None: this machine's, or an H200's.
    """

    capture: float | None = None
    train: float | None = None
    gpus: int | None = None
    gpu_bytes: float | None = None


def make_plan(config: Config, amount: Amount, rates: Rates) -> dict[str, Any]:
    """The plan, JSON-serialisable; `problems` [{what, mend}] is empty where all fits.

    Raises:
        UserError: the target's config cannot be read, or the draft's shape does not fit it.
    """
    target = target_shape(config.target)
    layer_ids = resolve_layer_ids(config.capture, target.num_layers)
    vocab = min(config.data.draft_vocab_size or target.vocab_size, target.vocab_size)
    shape = resolve_shape(config.draft, target, len(layer_ids), vocab)
    found = _gpus()
    gpus = rates.gpus or len(found) or 1
    gpu_bytes = rates.gpu_bytes or (found[0][1] if found else H200_BYTES)
    where = "stated" if rates.gpu_bytes else found[0][0] if found else "an H200, assumed: there is no GPU here"
    plan = {
        "amount": vars(amount),
        "target": _target(config, target),
        "draft": {"parameters": sum(draft_parameters(shape).values()), "layer_ids": layer_ids},
        "disk": _disk(config, amount, shape),
        "hours": _hours(config, amount, target, shape, replace(rates, gpus=gpus)),
        "gpu": {"bytes": gpu_bytes, "of": where, "count": gpus, "training": _gpu(config, amount, shape, gpus)},
        "host": {"capture_bytes": _host(config), "bytes": psutil.virtual_memory().total},
    }
    return {**plan, "problems": _problems(config, amount, shape, plan)}


def target_shape(config: TargetConfig) -> Target:
    """The target by its config.json alone.

    Raises:
        UserError: there is none, or it is not a causal language model's.
    """
    folder = Path(config.path).expanduser()
    if config.path == embedded.NAME:
        folder = embedded.embedded_checkpoint()
    elif not folder.is_dir():
        folder = _from_hub(config)
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        text = {**raw, **(raw.get("text_config") or {})}
        layers, hidden, vocab = (int(text[key]) for key in ("num_hidden_layers", "hidden_size", "vocab_size"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{folder}/config.json: not the config of a causal language model ({error!r}).",
            "Point target.path at a checkpoint folder.",
        ) from None
    hf: Any = SimpleNamespace(**text)
    return Target(config.path, folder, config.revision, layers, hidden, vocab, hf)


def _from_hub(config: TargetConfig) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(config.path, "config.json", revision=config.revision)).parent
    except Exception as error:  # the hub client raises many unrelated types
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise UserError(
            f"target.path: `{config.path}` is no local folder and was not fetched from the hub: {reason}.",
            "Check the name, target.revision, the network and your access; or give a folder with its config.json.",
        ) from None


def _target(config: Config, target: Target) -> dict[str, Any]:
    """Parameters, and bytes of the weights: of the files where they are there."""
    every, active = target_parameters(target.hf_config)
    files = sum(f.stat().st_size for f in target.local_path.glob("*.safetensors"))
    quantization = getattr(target.hf_config, "quantization_config", None) or {}
    method = config.target.engine_args.get("quantization") or quantization.get("quant_method")
    each = 2 if method is None else 1
    return {"path": target.path, "parameters": every, "active_parameters": active, "bytes": files or each * every}


def store_bytes(amount: Amount, shape: DraftShape, storage: str) -> int:
    """Bytes of the hidden states of all samples."""
    token, label = bytes_per_row(storage, shape.num_aux, shape.hidden_size)
    return amount.tokens * token + amount.reply_tokens * label


def _disk(config: Config, amount: Amount, shape: DraftShape) -> dict[str, Any]:
    """What the run's folder has to hold beside what it holds already."""
    run = RunFolder.of(config)
    sizes = {storage: store_bytes(amount, shape, storage) for storage in ("bf16", "fp8")}
    states = sizes[config.capture.storage]
    if config.capture.mode == "spool":
        states = round(states * (1 - amount.train_share)) + (config.capture.spool_bytes or 0)
    # float32 weights and two moments; while a checkpoint is written, the ones that are kept are still there.
    checkpoints = 12 * sum(draft_parameters(shape).values()) * (config.train.keep_checkpoints + 1)
    there = sum(f.stat().st_size for f in run.root.rglob("*.safetensors")) if run.root.is_dir() else 0
    place = next(p for p in (run.root.resolve(), *run.root.resolve().parents) if p.exists())
    return {
        "states": sizes, "states_needed": states, "checkpoints": checkpoints, "there": there, "folder": str(place),
        "needed": max(0, states + checkpoints - there), "free": shutil.disk_usage(place).free,
    }  # fmt: skip


def _hours(config: Config, amount: Amount, target: Target, shape: DraftShape, rates: Rates) -> dict[str, Any]:
    assert rates.gpus is not None
    capture, train = rates.capture, rates.train
    if capture is None:
        active = target_parameters(target.hf_config)[1] / config.target.tensor_parallel
        capture = int(config.capture.data_parallel) / (H200_CAPTURE_FIXED + H200_CAPTURE_PER_PARAMETER * active)
    if train is None:
        train = rates.gpus * H200_TRAINING_FLOPS[config.train.matmul] / training_flops(shape, _workload(config, amount))
    train_from = "measured on H200s (benchmarks/training), scaled by the work"
    once, epochs = amount.tokens, config.train.epochs
    trained = amount.tokens * amount.train_share * epochs
    if config.capture.mode == "spool":  # the held-out samples once, the others in every epoch
        once = round(amount.tokens * (1 - amount.train_share) + trained)
    hours = once / capture / 3600, trained / train / 3600
    return {
        "capture": hours[0], "capture_tokens": once, "capture_rate": capture,
        "capture_rate_of": "stated" if rates.capture else "measured on H200s, scaled by the target",
        "train": hours[1], "train_tokens": round(trained), "train_rate": train,
        "train_rate_of": "stated" if rates.train else train_from,
        "together": max(hours) if config.capture.mode == "spool" else sum(hours),
    }  # fmt: skip


def _workload(config: Config, amount: Amount) -> Workload:
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


def _gpu(config: Config, amount: Amount, shape: DraftShape, gpus: int) -> dict[str, float]:
    parts = {**training_memory(shape, _workload(config, amount)), "CUDA": _CUDA_BYTES}
    sizes = draft_parameters(shape)
    if config.train.optimizer == "muon":  # one moment instead of two, of the matrices
        parts["weights and optimizer"] -= 4.0 * (sizes["fc"] + sizes["attention"] + sizes["mlp"])
    if config.train.ema_decay is not None:
        parts["average of the weights"] = 4.0 * sum(sizes.values())
    # Several processes exchange gradients in buckets as large as all of them.
    return parts if gpus == 1 else {**parts, "exchange of gradients": 4.0 * sum(sizes.values())}


def _host(config: Config) -> int:
    """Host memory of capture: states on their way to the disk, and the shard that is open."""
    capture = config.capture
    return int(capture.data_parallel) * (capture.pending_bytes + capture.shard_bytes)


def _gpus() -> list[tuple[str, float]]:
    """Name and bytes of every GPU of this machine."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
        return [(name.strip(), float(mib) * 1024**2) for name, mib in (line.rsplit(",", 1) for line in lines)]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


def _problems(config: Config, amount: Amount, shape: DraftShape, plan: dict[str, Any]) -> list[dict[str, str]]:
    """What does not fit, each with its mend."""
    found = [
        _disk_problem(config, plan["disk"]),
        _training_problem(config, amount, shape, plan["gpu"]),
        _engine_problem(config, plan),
        _host_problem(plan["host"]),
    ]
    return [{"what": what, "mend": mend} for what, mend in filter(None, found)]


def _disk_problem(config: Config, disk: dict[str, Any]) -> tuple[str, str] | None:
    short = disk["needed"] - disk["free"]
    if short <= 0:
        return None
    what = (
        f"{disk['needed'] / GB:,.1f} GB more are needed in {disk['folder']}, and {disk['free'] / GB:,.1f} GB are free."
    )
    if config.capture.mode == "spool":
        return what, f"Lower capture.spool_bytes by {short / GB:,.1f} GB, or put run.dir on a larger disk."
    saved = disk["states"]["bf16"] - disk["states"]["fp8"]
    if config.capture.storage == "bf16" and saved >= short:
        return what, f"Set capture.storage=fp8 ({disk['states']['fp8'] / GB:,.1f} GB), or put run.dir on a larger disk."
    room = max(2 * config.capture.shard_bytes, disk["free"] // 2)
    return what, f"Set capture.mode=spool and capture.spool_bytes={room}, or put run.dir on a larger disk."


def _training_problem(config: Config, amount: Amount, shape: DraftShape, gpu: dict[str, Any]) -> tuple[str, str] | None:
    needed = sum(gpu["training"].values())
    if needed <= gpu["bytes"]:
        return None
    work = _workload(config, amount)
    room = f"a GPU has {gpu['bytes'] / GB:,.1f} GB"
    what = f"a training step of {work.tokens:,} tokens takes {needed / GB:,.1f} GB, and {room}."
    fixed = needed - gpu["training"]["activations"]
    least = training_memory(shape, replace(work, tokens=amount.longest))["activations"]
    if fixed + least > gpu["bytes"]:
        return what, "Lower data.max_length or data.draft_vocab_size, or train on GPUs with more memory."
    low, high = amount.longest, work.tokens
    while high - low > 256:
        middle = (low + high) // 2
        fits = fixed + training_memory(shape, replace(work, tokens=middle))["activations"] <= gpu["bytes"]
        low, high = (middle, high) if fits else (low, middle)
    return what, f"Set train.tokens_per_batch to {low} or less."


def _engine_problem(config: Config, plan: dict[str, Any]) -> tuple[str, str] | None:
    weights, parallel, room = plan["target"]["bytes"], config.target.tensor_parallel, _USABLE * plan["gpu"]["bytes"]
    if weights / parallel <= room:
        return None
    needed = 2 ** (int(-(-weights // room)) - 1).bit_length()
    return (
        f"the target's weights are {weights / GB:,.0f} GB, {weights / parallel / GB:,.0f} GB on each of "
        f"{parallel} GPUs of {plan['gpu']['bytes'] / GB:,.0f} GB.",
        f"Set target.tensor_parallel to {needed} or more.",
    )


def _host_problem(host: dict[str, Any]) -> tuple[str, str] | None:
    if host["capture_bytes"] <= _USABLE * host["bytes"]:
        return None
    return (
        f"capture may hold {host['capture_bytes'] / GB:,.1f} GB in host memory, and this machine has "
        f"{host['bytes'] / GB:,.1f} GB.",
        "Lower capture.pending_bytes or capture.shard_bytes.",
    )
