"""What a training starts from: the run's own vocabulary and random weights, or another draft's (`train.init_from`)."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from draftsmith.core.checkpoint import DRAFT, read_checkpoint
from draftsmith.core.config import Config
from draftsmith.core.draft_folder import read_draft_folder
from draftsmith.core.draft_shape import DraftShape, resolve_shape
from draftsmith.core.errors import UserError
from draftsmith.core.run import COMPLETE, RunFolder
from draftsmith.core.target import Target
from draftsmith.core.vocab import VocabMapping, load_mapping

# The target's are taken; other trainers write what they like there.
_OF_NO_WEIGHT = ("max_position_embeddings", "rms_norm_eps")


@dataclass(frozen=True)
class Start:
    """Where a training begins.

    Attributes:
        shape: the draft's architecture.
        mapping: its vocabulary; that of the draft which it starts from, whatever the run's samples hold.
        tensors: weights of that draft by name; None: it starts from none.
    """

    shape: DraftShape
    mapping: VocabMapping
    tensors: dict[str, Tensor] | None = None


def starting_point(config: Config, run: RunFolder, target: Target, layer_ids: list[int]) -> Start:
    """Vocabulary, shape and, with `train.init_from`, weights to start from.

    Args:
        config: of the run.
        run: its folder.
        target: resolved.
        layer_ids: auxiliary layers of the run's hidden states.

    Raises:
        UserError: the draft to start from is not whole, or differs in shape or layers from what is to be trained.
    """
    own = load_mapping(run.vocab_mapping)
    if config.train.init_from is None:
        return Start(resolve_shape(config.draft, target, len(layer_ids), len(own.d2t)), own)
    # A training that goes on keeps the vocabulary that it began with, and needs nothing else of where it began.
    folder = (run.complete_checkpoints() or [Path(config.train.init_from).expanduser()])[-1]
    given, tensors, target_ids, its_layers = _read(folder, target)
    shape = resolve_shape(config.draft, target, len(layer_ids), len(target_ids))
    here, there = shape.to_dict(), given.to_dict()
    differing = [
        f"{key} is {there[key]} there and {here[key]} here"
        for key in here
        if here[key] != there.get(key) and key not in _OF_NO_WEIGHT
    ]
    if its_layers != layer_ids:
        differing.append(f"its layers are {its_layers} and the hidden states' {layer_ids}")
    if differing:
        raise UserError(
            f"train.init_from: {folder} is of another kind than the draft to be trained: {'; '.join(differing)}.",
            "Set the section draft (and capture.layer_ids) to what it has, or train.init_from to null.",
        )
    ids = target_ids.numpy()
    t2d = np.zeros(shape.vocab_size, dtype=np.bool_)
    t2d[ids] = True
    return Start(shape, VocabMapping(ids - np.arange(len(ids)), t2d), tensors)


def _read(folder: Path, target: Target) -> tuple[DraftShape, dict[str, Tensor], Tensor, list[int]]:
    if (folder / COMPLETE).is_file() and (folder / DRAFT).is_file():
        checkpoint = read_checkpoint(folder)
        return checkpoint.shape, checkpoint.tensors, checkpoint.target_ids, checkpoint.layer_ids
    draft = read_draft_folder(folder, target)
    return draft.shape, draft.tensors, draft.target_ids.to(torch.int64), draft.layer_ids
