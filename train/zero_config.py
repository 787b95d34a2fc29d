"""What of DeepSpeed's JSON file is taken: what DeepSpeed knows and the config of the run does not decide."""

import difflib
import logging
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from draftsmith.core.deepspeed_file import START, read_deepspeed_file
from draftsmith.core.errors import UserError

# What the config of the run decides, by its key there.
_OURS = {
    "optimizer": "train.optimizer", "scheduler": "train.schedule", "gradient_clipping": "train.max_grad_norm",
    "gradient_accumulation_steps": "train.grad_accum_steps", "train_batch_size": "train.tokens_per_batch",
    "train_micro_batch_size_per_gpu": "train.tokens_per_batch", "fp16": "train.precision", "bf16": "train.precision",
    "bfloat16": "train.precision", "torch_autocast": "train.precision", "amp": "train.precision",
    "data_types": "train.precision", "steps_per_print": "train.log_interval",
    "zero_allow_untested_optimizer": "train.optimizer", "zero_force_ds_cpu_optimizer": "train.optimizer",
}  # fmt: skip
# Under stage 3, which gathers all at once; by DeepSpeed's two names.
_PERSISTENCE = ("stage3_param_persistence_threshold", "param_persistence_threshold")
# What DeepSpeed asks for before its own keys, and would split a document over processes by.
_NOT_DONE = {"sequence_parallel_size", "data_parallel_size"}


def load_deepspeed(kind: str) -> Any:
    """The library, told what it would guess, and to speak up where something is wrong only.

    Args:
        kind: of the device that trains, e.g. cuda.

    Raises:
        UserError: it is not installed.
    """
    os.environ.setdefault("DS_ACCELERATOR", kind)
    try:
        import deepspeed
        from deepspeed.ops import __compatible_ops__
    except ImportError:
        raise UserError("train.engine is deepspeed, and it is not installed.", "pip install deepspeed.") from None
    deepspeed.utils.logger.setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    if kind == "cpu":
        __compatible_ops__["deepspeed_shm_comm"] = False  # compiled C++ that gloo can do without
    return deepspeed


def read_deepspeed_config(path: str) -> dict[str, Any]:
    """DeepSpeed's JSON: a file of the user's, or one of configs/deepspeed.

    Raises:
        UserError: there is none, it is no JSON, or holds keys that DeepSpeed or draftsmith would not take.
    """
    file, config = read_deepspeed_file(path)
    load_deepspeed("cuda" if torch.cuda.is_available() else "cpu")
    if wrong := sorted(_OURS.keys() & config.keys()):
        said = ", ".join(f"{key} ({_OURS[key]})" for key in wrong)
        raise UserError(f"{file}: {said} are set in the run's own config.", "Take them out of the file.")
    _check_zero(file, config["zero_optimization"])
    _check_keys(file, config)
    return config


def _check_zero(file: Path, zero: dict[str, Any]) -> None:
    """By DeepSpeed's own schema, which it would look at when training has begun, and for what it lets pass."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError

    try:
        read = DeepSpeedZeroConfig(**zero)
    except ValidationError as error:
        said = "; ".join(_said(DeepSpeedZeroConfig, e) for e in error.errors())
        raise UserError(f"{file}: {said}.", START) from None
    except Exception as error:  # of a key of old together with its successor, for one
        raise UserError(f"{file}: DeepSpeed refuses zero_optimization ({error}).", START) from None
    for key in ("offload_param", "offload_optimizer"):
        offload, at = getattr(read, key), f"{file}: zero_optimization.{key}"
        if not offload or offload.device == "none":
            continue
        if offload.device == "nvme" and read.stage < 3:
            raise UserError(f"{at}.device is nvme, which is stage 3's alone.", "Set it to cpu, or the stage to 3.")
        if offload.device == "nvme" and not offload.nvme_path:
            raise UserError(f"{at}.device is nvme, and there is no nvme_path.", "Set nvme_path, or the device to cpu.")
        if key == "offload_param" and read.stage < 3:
            raise UserError(f"{at} is stage 3's alone.", "Take it out, or set the stage to 3.")
    if read.stage == 3 and (wrong := [key for key in _PERSISTENCE if key in zero]):
        raise UserError(
            f"{file}: zero_optimization.{wrong[0]} is 0 with draftsmith, which gathers all weights at once.",
            "Take it out of the file.",
        )


def _said(model: Any, detail: Any) -> str:
    *outer, last = map(str, detail["loc"] or ("",))
    at = ".".join(("zero_optimization", *outer, last)).rstrip(".")
    if detail["type"] != "extra_forbidden":
        return f"{at}: {detail['msg']}"
    for name in outer:
        models = getattr(model.model_fields[name].annotation, "__args__", ())
        model = next((m for m in models if hasattr(m, "model_fields")), model)
    known = [n for name, field in model.model_fields.items() for n in (name, field.alias) if n]
    return f"{at}: DeepSpeed knows no such key{_near(last, known)}"


def _near(key: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.5)
    return f" (did you mean {near[0]}?)" if near else ""


class _Asked(dict[str, Any]):
    """Notes which keys are asked for: DeepSpeed asks for every one that it knows, and has no list of them."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.asked: set[str] = set()  # which a copy of this shares

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def keys(self) -> Any:
        return self  # `key in config.keys()` asks too


def _check_keys(file: Path, config: dict[str, Any]) -> None:
    """Every key at the top is one that DeepSpeed reads, with a value that it takes.

    Raises:
        UserError: names the key, and the one that is nearest.
    """
    from deepspeed.runtime.config import DeepSpeedConfig

    given = _Asked(deepspeed_config(config, 1.0))
    try:
        DeepSpeedConfig(given)
    except Exception as error:  # of many types, assertions among them
        raise UserError(f"{file}: DeepSpeed refuses it ({' '.join(str(error).split())}).", START) from None
    known = given.asked - _NOT_DONE
    if unknown := [key for key in config if key not in known]:
        said = ", ".join(f"{key}{_near(key, known)}" for key in unknown)
        raise UserError(f"{file}: unknown to DeepSpeed, or not done here: {said}.", "Mend the key, or take it out.")


def deepspeed_config(given: dict[str, Any], max_grad_norm: float) -> dict[str, Any]:
    """The file's config and what is ours in it."""
    zero = dict(given["zero_optimization"])
    if zero["stage"] == 3:
        zero["stage3_param_persistence_threshold"] = 0  # all is gathered at once, small parameters too
    ours = {
        "zero_optimization": zero,
        "train_micro_batch_size_per_gpu": 1,  # a formality: batches are the loop's, and so is their number
        "gradient_accumulation_steps": 1,
        "gradient_clipping": max_grad_norm,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # torch's fused AdamW runs on a CPU, and compiles nothing
        "steps_per_print": 10**9,
    }
    return {**given, **ours}
