"""Loop state: what a checkpoint holds besides the weights, and how training goes on from one."""

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from draftsmith.core.atomic import TMP_MARK, write_json
from draftsmith.core.checkpoint import BEST, write_checkpoint
from draftsmith.core.run import RunFolder

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
    """Write `checkpoints/step-NNNNNNN` from the main process, on the writer's thread: the tensors are copies.

    The newest `keep_checkpoints` and the best are kept, the others dropped; `checkpoints/best.json` names the best.
    """
    engine, average = trainer.engine, trainer.average
    trainer.accelerator.wait_for_everyone()
    weights, optimizer = engine.weights(), engine.optimizer_state()
    tensors = weights
    if average:
        with average.in_place():
            tensors = engine.weights()
    if not trainer.accelerator.is_main_process:
        return
    run, mapping, manifest = RunFolder.of(trainer.config), trainer.mapping, trainer.store.manifest
    mapped = {"d2t": torch.from_numpy(mapping.d2t), "t2d": torch.from_numpy(mapping.t2d)}
    described = {
        "shape": trainer.step.objective.draft.shape.to_dict(),
        "layer_ids": manifest["layer_ids"],
        "norm_form": manifest["last_state"]["norm_form"],
    }
    state, own = asdict(trainer.state), weights if average else None
    keep = trainer.config.train.keep_checkpoints
    trainer.writer.submit(lambda: _write(run, {**tensors, **mapped}, described, optimizer, state, own, keep))


def _write(
    run: RunFolder,
    tensors: dict[str, Tensor],
    described: dict[str, Any],
    optimizer: dict[str, Tensor],
    state: dict[str, Any],
    own: dict[str, Tensor] | None,
    keep: int,
) -> None:
    folder = checkpoint_folder(run, state["step"])
    write_checkpoint(folder, tensors, described, optimizer, state, own)
    best = folder
    if state["best"]:
        best = checkpoint_folder(run, state["best"]["step"])
        write_json(run.checkpoints / BEST, {"checkpoint": best.name, **state["best"]})
    for old in run.complete_checkpoints()[:-keep]:
        if old != best:
            going = old.with_name(f"{TMP_MARK}{old.name}")  # no folder is half deleted under its own name
            old.rename(going)
            shutil.rmtree(going)


def checkpoint_folder(run: RunFolder, step: int) -> Path:
    """Where the checkpoint of an optimizer step lies."""
    return run.checkpoints / f"step-{step:07d}"
