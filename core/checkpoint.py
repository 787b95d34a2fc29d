"""Checkpoint folders `step-NNNNNNN/`: the draft in float32, its shape, and what training needs to go on.

draft.safetensors      parameters under vLLM's names, plus d2t and t2d
draft.json             shape, layer ids, norm form
own.safetensors        parameters that training goes on with, where draft.safetensors holds their running average
optimizer.safetensors  the optimizer's state, `parameter/kind`, whole and in float32 whatever the processes
state.json             step, plan position, inputs; schedule, order, and noise follow from them
COMPLETE               written last; a folder without it does not exist for anyone
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.core.atomic import atomic_folder, write_json
from draftsmith.core.damage import reading
from draftsmith.core.draft import DraftModel
from draftsmith.core.draft_shape import DraftShape
from draftsmith.core.errors import StageFailed, UserError
from draftsmith.core.losses import LossOptions
from draftsmith.core.objective import Objective
from draftsmith.core.run import COMPLETE, RunFolder
from draftsmith.core.target import Target
from draftsmith.core.target_weights import load_target_weights

WEIGHTS, DRAFT, OPTIMIZER, STATE = "draft.safetensors", "draft.json", "optimizer.safetensors", "state.json"
BEST = "best.json"  # beside the checkpoints: which of them had the highest replayed acceptance
OWN = "own.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint, read.

    Attributes:
        folder: where it lies.
        shape: the draft's architecture.
        tensors: parameters by name, without the mapping.
        d2t, t2d: the vocabulary mapping.
        layer_ids, norm_form: of the capture it was trained on.
        state: what training wrote.
    """

    folder: Path
    shape: DraftShape
    tensors: dict[str, Tensor]
    d2t: Tensor
    t2d: Tensor
    layer_ids: list[int]
    norm_form: str
    state: dict[str, Any]

    @property
    def target_ids(self) -> Tensor:
        """int64 [Vd]: target id of every draft id."""
        return self.d2t + torch.arange(len(self.d2t))


def write_checkpoint(
    folder: Path,
    tensors: dict[str, Tensor],
    draft: dict[str, Any],
    optimizer: dict[str, Tensor],
    state: dict[str, Any],
    own: dict[str, Tensor] | None = None,
) -> None:
    """Write one checkpoint, whole or not at all.

    Args:
        folder: `checkpoints/step-NNNNNNN`.
        tensors: the draft's float32 state dict plus `d2t` and `t2d`.
        draft: `shape`, `layer_ids`, `norm_form`.
        optimizer: its state by `parameter/kind`.
        state: JSON-serialisable loop state.
        own: the weights of training, where `tensors` are an average of them.
    """
    with atomic_folder(folder, marker=COMPLETE) as tmp:
        for name, held in ((WEIGHTS, tensors), (OWN, own), (OPTIMIZER, optimizer)):
            if held is not None:
                _save(held, tmp / name)
        write_json(tmp / DRAFT, draft)
        write_json(tmp / STATE, state)


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        save_file({k: v.contiguous() for k, v in tensors.items()}, path)
    except SafetensorError as error:  # its way to say that the disk is full
        raise StageFailed(
            f"{path} could not be written ({error}). Free space and run `draftsmith train` again."
        ) from None


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read a complete checkpoint."""
    with reading(folder, f"Delete {folder} and run `draftsmith train` again."):
        tensors = load_file(folder / WEIGHTS)
        draft = json.loads((folder / DRAFT).read_text(encoding="utf-8"))
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    d2t, t2d = tensors.pop("d2t"), tensors.pop("t2d")
    return Checkpoint(
        folder, DraftShape(**draft["shape"]), tensors, d2t, t2d, draft["layer_ids"], draft["norm_form"], state
    )


def own_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The parameters that training goes on with."""
    path = checkpoint.folder / OWN
    if not path.is_file():
        return checkpoint.tensors
    with reading(path, f"Delete {checkpoint.folder} and run `draftsmith train` again."):
        own: dict[str, Tensor] = load_file(path)
    return own


def optimizer_state(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The optimizer's state by `parameter/kind`; empty where no step had been taken."""
    path = checkpoint.folder / OPTIMIZER
    with reading(path, f"Delete {checkpoint.folder} and run `draftsmith train` again."):
        state: dict[str, Tensor] = load_file(path)
    return state


def final_checkpoint(run: RunFolder, needed_by: str) -> Path:
    """The newest checkpoint of a training that ran to its end.

    Raises:
        UserError: training has not been run, or has not finished.
    """
    done = run.complete_checkpoints()
    if not done:
        raise UserError(
            f"`{needed_by}` needs a trained draft, and {run.checkpoints} has no complete checkpoint.",
            "Run `draftsmith train` with the same config first.",
        )
    with reading(done[-1] / STATE, f"Delete {done[-1]} and run `draftsmith train` again."):
        state = json.loads((done[-1] / STATE).read_text(encoding="utf-8"))
    if state["step"] < state["total_steps"]:
        raise UserError(
            f"training stopped at step {state['step']} of {state['total_steps']} ({done[-1]}).",
            "Run `draftsmith train` again: it goes on from there.",
        )
    return done[-1]


def chosen_checkpoint(run: RunFolder, which: str, needed_by: str) -> Path:
    """The checkpoint that `export.checkpoint` names: `last`, `best`, `step-N`, or a path.

    Raises:
        UserError: there is none of that name, or none that was evaluated.
    """
    if which == "last":
        return final_checkpoint(run, needed_by)
    done = run.complete_checkpoints()
    kept = f"Those kept: {', '.join(p.name for p in done) or 'none'} (train.keep_checkpoints)."
    if which == "best":
        file = run.checkpoints / BEST
        if not file.is_file():
            raise UserError(
                f"{run.checkpoints}: training evaluated no checkpoint on held-out samples.",
                f"Hold samples out (data.eval_share), or name a checkpoint. {kept}",
            )
        with reading(file, f"Name a checkpoint. {kept}"):
            which = json.loads(file.read_text(encoding="utf-8"))["checkpoint"]
    named = which.removeprefix("step-")
    path = run.checkpoints / f"step-{int(named):07d}" if named.isdigit() else Path(which).expanduser()
    if not (path / COMPLETE).is_file():
        raise UserError(f"export.checkpoint: {path} is no complete checkpoint.", kept)
    return path


def build_objective(
    target: Target, shape: DraftShape, target_ids: Tensor, norm_form: Any, loss: LossOptions | None = None
) -> Objective:
    """A draft of random weights beside the target's frozen head over its vocabulary.

    Args:
        target: resolved target.
        shape: the draft's architecture.
        target_ids: int64 [Vd].
        norm_form: the target's final norm, as the capture's probe found it.
        loss: what training minimises; None: soft cross-entropy, which every evaluation reports.
    """
    weights, loss = load_target_weights(target), loss or LossOptions()
    draft = DraftModel(shape, weights.embed_VH)
    head = weights.head(norm_form, target_ids, with_full=loss.needs_full_vocabulary)
    return Objective(draft, head, target_ids, loss)
