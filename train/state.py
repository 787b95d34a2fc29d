"""Loop state: what a checkpoint holds besides the weights, and how training goes on from one."""

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from draftsmith.core.checkpoint import OPTIMIZER, Checkpoint, write_checkpoint
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
        world_size: processes; another number would make another plan.
        inputs: what decides the training (see `train_inputs`).
    """

    step: int
    total_steps: int
    skipped_in_a_row: int
    world_size: int
    inputs: dict[str, Any]


def save(trainer: "Trainer") -> None:
    """Write `checkpoints/step-NNNNNNN` from the main process and drop the oldest beyond `keep_checkpoints`."""
    trainer.accelerator.wait_for_everyone()
    if not trainer.accelerator.is_main_process:
        return
    run = RunFolder.of(trainer.config)
    mapping = load_mapping(run.vocab_mapping)
    draft = trainer.step.objective.draft
    tensors = {k: v.detach().float().cpu() for k, v in draft.state_dict().items()}
    tensors |= {"d2t": torch.from_numpy(mapping.d2t), "t2d": torch.from_numpy(mapping.t2d)}
    manifest = trainer.store.manifest
    described = {
        "shape": draft.shape.to_dict(),
        "layer_ids": manifest["layer_ids"],
        "norm_form": manifest["last_state"]["norm_form"],
    }
    folder = run.checkpoints / f"step-{trainer.state.step:07d}"
    write_checkpoint(folder, tensors, described, trainer.optimizer.state_dict(), asdict(trainer.state))
    for old in run.complete_checkpoints()[: -trainer.config.train.keep_checkpoints]:
        shutil.rmtree(old)


def load_optimizer(checkpoint: Checkpoint, optimizer: Any) -> None:
    """Put the optimizer where the checkpoint left it."""
    path: Path = checkpoint.folder / OPTIMIZER
    with reading(path, f"Delete {checkpoint.folder} and run `draftsmith train` again."):
        optimizer.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
