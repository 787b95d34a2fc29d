"""Loop state: what a checkpoint holds besides the weights, and how training goes on from one."""

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from draftsmith.core.atomic import write_json
from draftsmith.core.checkpoint import BEST, OPTIMIZER, Checkpoint, write_checkpoint
from draftsmith.core.damage import reading
from draftsmith.core.run import RunFolder
from draftsmith.core.vocab import load_mapping

if TYPE_CHECKING:
    from draftsmith.train.loop import Trainer


@dataclass
class TrainState:
    """One readable literal; the data order follows from `step` (see `plan_steps`).

    Attributes:
        step: optimizer steps done.
        total_steps: of the whole plan.
        skipped_in_a_row: steps not taken for a non-finite gradient, up to now.
        batches_per_step: of all processes together; how they are spread changes no step.
        inputs: what decides the training (see `train_inputs`).
        skipped: all steps that were not taken.
        best: step and replayed acceptance length of the best evaluation; None before the first one.
    """

    step: int
    total_steps: int
    skipped_in_a_row: int
    batches_per_step: int
    inputs: dict[str, Any]
    skipped: int = 0
    best: dict[str, Any] | None = None


def save(trainer: "Trainer") -> None:
    """Write `checkpoints/step-NNNNNNN` from the main process.

    The newest `keep_checkpoints` and the best are kept, the others dropped; `checkpoints/best.json` names the best.
    """
    trainer.accelerator.wait_for_everyone()
    if not trainer.accelerator.is_main_process:
        return
    run = RunFolder.of(trainer.config)
    mapping = load_mapping(run.vocab_mapping)
    draft = trainer.step.objective.draft
    weights = _on_cpu(draft)
    tensors = weights
    if trainer.average:
        with trainer.average.in_place():
            tensors = _on_cpu(draft)
    mapped = {"d2t": torch.from_numpy(mapping.d2t), "t2d": torch.from_numpy(mapping.t2d)}
    manifest = trainer.store.manifest
    described = {
        "shape": draft.shape.to_dict(),
        "layer_ids": manifest["layer_ids"],
        "norm_form": manifest["last_state"]["norm_form"],
    }
    folder, state = checkpoint_folder(run, trainer.state.step), trainer.state
    own = weights if trainer.average else None
    write_checkpoint(folder, tensors | mapped, described, trainer.optimizer.state_dict(), asdict(state), own)
    best = checkpoint_folder(run, state.best["step"]) if state.best else folder
    if state.best:
        write_json(run.checkpoints / BEST, {"checkpoint": best.name, **state.best})
    for old in run.complete_checkpoints()[: -trainer.config.train.keep_checkpoints]:
        if old != best:
            shutil.rmtree(old)


def checkpoint_folder(run: RunFolder, step: int) -> Path:
    """Where the checkpoint of an optimizer step lies."""
    return run.checkpoints / f"step-{step:07d}"


def _on_cpu(draft: nn.Module) -> dict[str, Tensor]:
    # A copy: on a CPU the averages and the weights change places.
    return {k: v.detach().to("cpu", torch.float32, copy=True) for k, v in draft.state_dict().items()}


def load_optimizer(checkpoint: Checkpoint, optimizer: Any) -> None:
    """Put the optimizer where the checkpoint left it."""
    path: Path = checkpoint.folder / OPTIMIZER
    with reading(path, f"Delete {checkpoint.folder} and run `draftsmith train` again."):
        optimizer.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
