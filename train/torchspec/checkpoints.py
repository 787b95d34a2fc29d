"""TorchSpec's checkpoints: the first one that it starts from, the newest whole one, and what they are as ours.

    output/checkpoints/iter_NNNNNNN/    NNNNNNN is the step after the last one that is in it
        model/ optimizer/ lr_scheduler/     torch.distributed.checkpoint, .metadata written after their data
        rng.pt
        meta.json                           written last; `global_step` is the number of optimizer steps done
    output/checkpoints/latest_checkpointed_iteration.txt      the one that it resumes from

It saves in place, so a killed save leaves a folder that is cut; what counts is what is whole.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save

from draftsmith.core.atomic import write_text
from draftsmith.core.checkpoint import write_checkpoint
from draftsmith.core.distributed import alone, is_whole, load_distributed
from draftsmith.core.draft_folder import tensor_shapes
from draftsmith.core.draft_shape import DraftShape
from draftsmith.core.errors import StageFailed
from draftsmith.core.target_weights import TargetWeights
from draftsmith.core.vocab import VocabMapping

TRACKER = "latest_checkpointed_iteration.txt"
_EMBEDDING = "embed_tokens.weight"


@dataclass(frozen=True)
class Iteration:
    """A whole checkpoint of TorchSpec's.

    Attributes:
        folder: `iter_NNNNNNN`.
        number: the one in its name.
        step: optimizer steps done.
    """

    folder: Path
    number: int
    step: int


def newest_whole(folder: Path) -> Iteration | None:
    """The whole checkpoint with the most steps in a folder of them."""
    found = [whole for path in folder.glob("iter_*") if (whole := _whole(path))]
    return max(found, key=lambda i: i.step, default=None)


def _whole(path: Path) -> Iteration | None:
    """The checkpoint, if every file of it is there and as long as its metadata says."""
    number = path.name.removeprefix("iter_")
    try:
        meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
        step = meta["global_step"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    parts = ("model", "optimizer", "lr_scheduler")
    if not (number.isdigit() and isinstance(step, int) and (path / "rng.pt").is_file()):
        return None
    return Iteration(path, int(number), step) if all(is_whole(path / part) for part in parts) else None


def resume_from(iteration: Iteration) -> None:
    """Name the checkpoint that TorchSpec is to go on from: a killed save may have left the name of another one."""
    write_text(iteration.folder.parent / TRACKER, str(iteration.number))


def write_start(folder: Path, tensors: dict[str, Tensor], mapping: VocabMapping) -> None:
    """A checkpoint of weights alone that a training begins from, with `continual_training`.

    Args:
        folder: gets `iter_0000000/model` and the tracker.
        tensors: the draft's, with the target's embedding, under vLLM's names.
        mapping: of its vocabulary.
    """
    model = {f"draft_model.{name}": t.detach().to("cpu", torch.bfloat16) for name, t in tensors.items()}
    if not mapping.is_full:
        model["draft_model.d2t"] = torch.from_numpy(mapping.d2t)
        model["draft_model.t2d"] = torch.from_numpy(mapping.t2d)
    model = {name: tensor.contiguous().clone() for name, tensor in model.items()}
    path = folder / "iter_0000000" / "model"
    path.mkdir(parents=True, exist_ok=True)
    with alone():
        save({"model_state": {"model": model}}, checkpoint_id=str(path), no_dist=True)
    write_text(folder / TRACKER, "0")


def convert(
    iteration: Iteration,
    folder: Path,
    shape: DraftShape,
    mapping: VocabMapping,
    weights: TargetWeights,
    described: dict[str, Any],
    state: dict[str, Any],
) -> None:
    """Write a checkpoint of TorchSpec's as one of ours, its bfloat16 weights in float32; export and eval take it.

    Args:
        iteration: what is converted.
        folder: `checkpoints/step-NNNNNNN`.
        shape: the draft's, as the config says.
        mapping: the vocabulary of the run; the checkpoint's own buffers must say the same.
        weights: the target's, whose embedding the draft shares.
        described: `layer_ids` and `norm_form`.
        state: loop state.

    Raises:
        StageFailed: the checkpoint is not the draft that the config describes.
    """
    tensors = load_distributed(iteration.folder)
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    problems = []
    if not mapping.is_full:
        ours = torch.from_numpy(mapping.d2t), torch.from_numpy(mapping.t2d)
        if d2t is None or t2d is None or not (torch.equal(d2t, ours[0]) and torch.equal(t2d, ours[1])):
            problems.append("its vocabulary (d2t, t2d) is not the run's")
    embedding = tensors.pop(_EMBEDDING, None)
    if embedding is not None and not torch.equal(
        embedding[: len(weights.embed_VH)].to(torch.bfloat16), weights.embed_VH.to(torch.bfloat16)
    ):
        problems.append("its embedding is not the target's")
    wanted = tensor_shapes(shape)
    problems += [f"{name} is missing" for name in sorted(wanted.keys() - tensors.keys())]
    problems += [f"{name} is not known" for name in sorted(tensors.keys() - wanted.keys())]
    for name in sorted(wanted.keys() & tensors.keys()):
        if tuple(tensors[name].shape) != tuple(wanted[name]):
            problems.append(f"{name} has shape {tuple(tensors[name].shape)}, not {tuple(wanted[name])}")
        elif not torch.isfinite(tensors[name]).all():
            problems.append(f"{name} has values that are not finite")
    if problems:
        raise StageFailed(f"{iteration.folder} is not the draft that was to be trained: {'; '.join(problems)}.")
    whole = {name: tensor.float() for name, tensor in tensors.items()}
    mapped = {"d2t": torch.from_numpy(mapping.d2t), "t2d": torch.from_numpy(mapping.t2d)}
    write_checkpoint(folder, whole | mapped, {"shape": shape.to_dict(), **described}, {}, state)
