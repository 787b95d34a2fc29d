"""What TorchSpec cannot do, said before anything is started: it would train another draft than the config describes."""

import json
from typing import Any

from draftsmith.core.config import Config
from draftsmith.core.draft_shape import DraftShape
from draftsmith.core.errors import UserError
from draftsmith.core.target import Target
from draftsmith.core.target_weights import weight_names

# Settings that TorchSpec has one value of, written into its code (eagle3_trainer.py, optimizer.py, llama3_eagle.py).
_ONLY: dict[str, tuple[Any, ...]] = {
    "train.step_decay": (0.8,),
    "train.rejected_weight": (1.0,),
    "train.loss": ("soft_ce",),
    "train.loss_temperature": (1.0,),
    "train.hidden_noise": (0.0,),
    "train.precision": ("auto", "bfloat16"),
    "train.matmul": ("bf16",),
    "train.optimizer": ("adamw",),
    "train.betas": ([0.9, 0.95], [0.9, 0.999]),  # the default means: what the engine does, which is the second
    "train.ema_decay": (None,),
    "train.init_from": (None,),
    "train.profile_steps": (None,),
    "draft.norm_before_residual": (False,),
    "draft.norm_before_fc": (False,),
    "draft.fc_norm": (False,),
    "draft.norm_output": (False,),
    "draft.partial_rotary_factor": (None, 1.0),
    "draft.train_embedding": (False,),
    "draft.train_lm_head": (True,),
}
_LINEAR_BASE = 10000.0
_NUM_AUX = 3


def check_settings(config: Config, shape: DraftShape, layer_ids: list[int]) -> None:
    """Refuse a draft or a training that TorchSpec has no way to make.

    Raises:
        UserError: names every setting, with the values that it may have.
    """
    tree = config.model_dump()
    problems = []
    for name, allowed in _ONLY.items():
        section, key = name.split(".")
        if (value := tree[section][key]) not in allowed:
            problems.append(f"{name} is {value} (it has {' or '.join(str(a) for a in allowed)})")
    if len(layer_ids) != _NUM_AUX:
        problems.append(f"{len(layer_ids)} auxiliary layers (it has {_NUM_AUX})")
    if min(layer_ids) < 1:
        problems.append("capture.layer_ids has the embedding, 0, which its ids cannot name")
    if shape.sliding_window:
        problems.append(f"the draft has a sliding window of {shape.sliding_window} (it has none)")
    if shape.rope["rope_type"] == "linear" and shape.rope["rope_theta"] != _LINEAR_BASE:
        problems.append(f"rope of type linear with theta {shape.rope['rope_theta']:g} (it has {_LINEAR_BASE:g})")
    if "trackio" in config.train.trackers:
        problems.append("train.trackers has trackio (it has wandb and tensorboard)")
    if problems:
        raise UserError(
            f"train.engine is torchspec, and TorchSpec cannot do all that is asked: {'; '.join(problems)}.",
            "Change these, or use train.engine: accelerate.",
        )
    _check_gpus(config)


def _check_gpus(config: Config) -> None:
    theirs, parallel = config.train.torchspec, config.target.tensor_parallel
    if parallel > theirs.inference_gpus_per_node:
        raise UserError(
            f"target.tensor_parallel is {parallel}, and an inference host has {theirs.inference_gpus_per_node} GPUs "
            "(train.torchspec.inference_gpus_per_node).",
            "An engine of ours lives on one host: lower it.",
        )
    if theirs.inference_gpus % parallel:
        raise UserError(
            f"train.torchspec.inference_gpus ({theirs.inference_gpus}) is no multiple of target.tensor_parallel "
            f"({parallel}).",
            "Change one of them.",
        )


def check_target(config: Config, target: Target) -> tuple[str, str, str]:
    """Names of the target's embedding, final norm and lm_head, as TorchSpec will find them.

    It only warns where it cannot load the norm, and then trains against states that were never normed.

    Raises:
        UserError: TorchSpec would not find one of them, or would run code that the config has not allowed.
    """
    folder = target.local_path
    names = weight_names(target)
    indices = sorted(folder.glob("*.index.json"))
    files = sorted(folder.glob("*.safetensors"))
    if len(indices) > 1:
        raise UserError(
            f"{folder} has {len(indices)} index files ({', '.join(p.name for p in indices)}), and TorchSpec takes any.",
            "Give it a copy of the folder with the one of the safetensors files.",
        )
    if indices:
        known = json.loads(indices[0].read_text(encoding="utf-8"))["weight_map"]
        if missing := sorted(set(names) - known.keys()):
            raise UserError(f"{indices[0]} lacks {', '.join(missing)}.", "Fetch the target again, whole.")
    elif [f.name for f in files] != ["model.safetensors"]:
        raise UserError(
            f"{folder} has {', '.join(f.name for f in files) or 'no safetensors files'} and no index; TorchSpec reads "
            "model.safetensors, or what an index names.",
            "Rename the file, or fetch the target again, whole.",
        )
    if not config.target.trust_remote_code and (file := _own_code(target)):
        raise UserError(
            f"{file} names code of its own (auto_map), and TorchSpec always runs such code.",
            "Read it; if you trust it, set target.trust_remote_code=true.",
        )
    return names


def _own_code(target: Target) -> str:
    """The file that asks for code out of the target's folder; empty: none."""
    for name in ("config.json", "tokenizer_config.json"):
        file = target.local_path / name
        if file.is_file() and "auto_map" in json.loads(file.read_text(encoding="utf-8")):
            return str(file)
    return ""
