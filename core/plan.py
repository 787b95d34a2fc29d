"""What a run will need, before anything runs: tokens, bytes, hours, memory; and what does not fit, with its mend.

Torch-free and without weights: of a target on the hub only its config.json is fetched.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

from draftsmith.core import embedded
from draftsmith.core.config import Config, TargetConfig
from draftsmith.core.draft_shape import DraftShape, resolve_shape
from draftsmith.core.errors import UserError
from draftsmith.core.estimate import Amount
from draftsmith.core.gpus import H200, Gpu, lookup, named, of_this_machine
from draftsmith.core.plan_checks import setting_problems
from draftsmith.core.plan_hours import Rates, captures_while_training, hours, training_gpus, workload
from draftsmith.core.run import RunFolder
from draftsmith.core.sizes import (
    Workload,
    batch_bytes,
    draft_parameters,
    target_bytes,
    target_parameters,
    training_memory,
)
from draftsmith.core.store import bytes_per_row
from draftsmith.core.target import Target, resolve_layer_ids

_CUDA_BYTES = 1.5e9  # the context, and what the allocator cannot use
_USABLE = 0.9  # of a GPU's memory, for an engine's weights: its cache and activations need the rest
GB = 1e9


def make_plan(config: Config, amount: Amount, rates: Rates, target: Target | None = None) -> dict[str, Any]:
    """The plan, JSON-serialisable; `problems` [{what, mend}] is empty where all fits.

    Args:
        config: of the run.
        amount: what there is to capture and to train on.
        rates: what the user states.
        target: its shape; None: by the config.json of `target.path`.

    Raises:
        UserError: the target's config cannot be read, or the draft's shape does not fit it.
    """
    target = target or target_shape(config.target)
    layer_ids = resolve_layer_ids(config.capture, target.num_layers)
    vocab = min(config.data.draft_vocab_size or target.vocab_size, target.vocab_size)
    shape = resolve_shape(config.draft, target, len(layer_ids), vocab)
    gpu, of, count = _gpu_of(config, rates)
    rates = replace(rates, gpus=count)
    plan = {
        "amount": vars(amount),
        "target": _target(config, target),
        "draft": {"parameters": sum(draft_parameters(shape).values()), "layer_ids": layer_ids},
        "disk": _disk(config, amount, shape),
        "hours": hours(config, amount, target, shape, rates, gpu),
        "gpu": {"name": gpu.name, "bytes": gpu.nbytes, "of": of, "count": count,
                "training": _training(config, amount, shape, count)},
        "host": {"capture_bytes": _host(config), "bytes": psutil.virtual_memory().total},
    }  # fmt: skip
    problems = _problems(config, amount, shape, plan) + setting_problems(
        config, amount, target, shape, gpu, rates, plan
    )
    return {**plan, "problems": [{"what": what, "mend": mend} for what, mend in problems]}


def _gpu_of(config: Config, rates: Rates) -> tuple[Gpu, str, int]:
    """Which GPU the hours and the memory are for, why, and how many train."""
    found = of_this_machine()
    count = rates.gpus or training_gpus(config) or len(found) or 1
    if rates.gpu:
        gpu, of = named(rates.gpu), "as --gpu says"
    elif found:
        known = lookup(found[0][0])
        gpu = replace(known or H200, nbytes=found[0][1])
        of = found[0][0] if known else f"{found[0][0]}, whose speed is not known here: hours are for an H200"
    else:
        gpu, of = H200, "assumed: there is no GPU here; --gpu names another"
    if rates.gpu_bytes:
        gpu, of = replace(gpu, nbytes=rates.gpu_bytes), f"{of}; memory as stated"
    return gpu, of, count


# Of a config.json: whole numbers above zero.
_COUNTS = {
    "num_hidden_layers", "hidden_size", "vocab_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "head_dim", "num_local_experts", "num_experts", "num_experts_per_tok", "moe_intermediate_size",
    "max_position_embeddings",
}  # fmt: skip


def described_folder(path: Path) -> Path:
    """The folder of `--target-config`, which names it or the config.json in it.

    Raises:
        UserError: it is a file of another name, whose neighbour would be read.
    """
    if path.is_file() and path.name != "config.json":
        raise UserError(f"--target-config: {path} is not called config.json.", "Name a folder that holds one.")
    return path.parent if path.is_file() else path


def target_shape(config: TargetConfig, described: Path | None = None) -> Target:
    """The target by its config.json alone.

    Args:
        config: of the target.
        described: a config.json, or its folder, to read instead of the target's own, which need not be there then.

    Raises:
        UserError: there is none, or it is not a causal language model's.
    """
    folder = Path(config.path).expanduser()
    if described is not None:
        folder = described_folder(described)
    elif config.path == embedded.NAME:
        folder = embedded.embedded_checkpoint()
    elif not folder.is_dir():
        folder = _from_hub(config)
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        text = {**raw, **(raw.get("text_config") or {})}
        layers, hidden, vocab = (int(text[key]) for key in ("num_hidden_layers", "hidden_size", "vocab_size"))
        for key, value in text.items():
            if key in _COUNTS and value is not None and not (type(value) is int and value > 0):
                raise ValueError(f"{key} is {value!r}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{folder}/config.json: not the config of a causal language model ({error!r}).",
            "Point target.path, or --target-config, at the folder of a checkpoint.",
        ) from None
    hf: Any = SimpleNamespace(**_with_rope_parameters(text))
    return Target(config.path, folder, config.revision, layers, hidden, vocab, hf)


def _with_rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """As transformers 5 reads it: what version 4 called rope_scaling and rope_theta, under their new name."""
    if config.get("rope_parameters") or not (old := config.get("rope_scaling")):
        return config
    rope = {"rope_type" if key == "type" else key: value for key, value in old.items()}
    return {**config, "rope_parameters": {"rope_theta": config.get("rope_theta", 10000.0), **rope}}


def _from_hub(config: TargetConfig) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(config.path, "config.json", revision=config.revision)).parent
    except Exception as error:  # the hub client raises many unrelated types
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise UserError(
            f"target.path: `{config.path}` is no local folder and was not fetched from the hub: {reason}.",
            "Check the name, target.revision, the network and your access; or say --target-config FOLDER, e.g. one of "
            "configs/targets/, which hold the config.json of the recipes' targets.",
        ) from None


def _target(config: Config, target: Target) -> dict[str, Any]:
    """Parameters, and bytes of the weights: of the files where they are there."""
    every, active = target_parameters(target.hf_config)
    files = sum(f.stat().st_size for f in target.local_path.glob("*.safetensors"))
    quantization = getattr(target.hf_config, "quantization_config", None) or {}
    method = config.target.engine_args.get("quantization") or quantization.get("quant_method")
    nbytes = files or target_bytes(target.hf_config, method)
    return {"path": target.path, "parameters": every, "active_parameters": active, "bytes": nbytes}


def store_bytes(amount: Amount, shape: DraftShape, storage: str) -> int:
    """Bytes of the hidden states of all samples."""
    token, label = bytes_per_row(storage, shape.num_aux, shape.hidden_size)
    return amount.tokens * token + amount.reply_tokens * label


def _disk(config: Config, amount: Amount, shape: DraftShape) -> dict[str, Any]:
    """What the run's folder has to hold beside what it holds already."""
    run = RunFolder.of(config)
    sizes = {storage: store_bytes(amount, shape, storage) for storage in ("bf16", "fp8")}
    states = sizes[config.capture.storage]
    if captures_while_training(config):
        states = round(states * (1 - amount.train_share))
        states += (
            (config.capture.spool_bytes or 0) if config.train.engine != "torchspec" else 0
        )  # Mooncake's, in memory
    # float32 weights and two moments; while a checkpoint is written, the ones that are kept are still there.
    checkpoints = 12 * sum(draft_parameters(shape).values()) * (config.train.keep_checkpoints + 1)
    there = sum(f.stat().st_size for f in run.root.rglob("*.safetensors")) if run.root.is_dir() else 0
    place = next(p for p in (run.root.resolve(), *run.root.resolve().parents) if p.exists())
    return {
        "states": sizes, "states_needed": states, "checkpoints": checkpoints, "there": there, "folder": str(place),
        "needed": max(0, states + checkpoints - there), "free": shutil.disk_usage(place).free,
    }  # fmt: skip


def _training(config: Config, amount: Amount, shape: DraftShape, gpus: int) -> dict[str, float]:
    work = workload(config, amount)
    parts = {**training_memory(shape, work), "next batch": _next_batch(config, shape, work), "CUDA": _CUDA_BYTES}
    sizes = draft_parameters(shape)
    if config.train.optimizer == "muon":  # one moment instead of two, of the matrices
        parts["weights and optimizer"] -= 4.0 * (sizes["fc"] + sizes["attention"] + sizes["mlp"])
    if config.train.ema_decay is not None:
        parts["average of the weights"] = 4.0 * sum(sizes.values())
    # Several processes exchange gradients in buckets as large as all of them.
    return parts if gpus == 1 else {**parts, "exchange of gradients": 4.0 * sum(sizes.values())}


def _next_batch(config: Config, shape: DraftShape, work: Workload) -> float:
    return batch_bytes(shape, work, config.capture.storage == "fp8")


def _host(config: Config) -> int:
    """Host memory of capture: states on their way to the disk, and the shard that is open."""
    capture = config.capture
    return int(capture.data_parallel) * (capture.pending_bytes + capture.shard_bytes)


def _problems(config: Config, amount: Amount, shape: DraftShape, plan: dict[str, Any]) -> list[tuple[str, str]]:
    """What does not fit, each with its mend."""
    found = [
        _disk_problem(config, plan["disk"]),
        _training_problem(config, amount, shape, plan["gpu"]),
        _engine_problem(config, plan),
        _host_problem(plan["host"]),
    ]
    return [problem for problem in found if problem]


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
    work = workload(config, amount)
    room = f"a GPU has {gpu['bytes'] / GB:,.1f} GB"
    what = f"a training step of {work.tokens:,} tokens takes {needed / GB:,.1f} GB, and {room}."
    fixed = needed - gpu["training"]["activations"] - gpu["training"]["next batch"]

    def fits(tokens: int) -> bool:
        less = replace(work, tokens=tokens)
        moving = training_memory(shape, less)["activations"] + _next_batch(config, shape, less)
        return bool(fixed + moving <= gpu["bytes"])

    if not fits(amount.longest):
        return what, "Lower data.max_length or data.draft_vocab_size, or train on GPUs with more memory."
    low, high = amount.longest, work.tokens
    while high - low > 256:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
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
