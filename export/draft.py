"""What an export is made of, wherever it comes from."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from draftsmith.core.checkpoint import Checkpoint
from draftsmith.core.draft_folder import DraftFolder
from draftsmith.core.draft_shape import DraftShape


@dataclass(frozen=True)
class Draft:
    """A draft to be exported.

    Attributes:
        shape: the architecture.
        tensors: its parameters under the names of `DraftModel`, in any floating-point type.
        target_ids: int64 [Vd], the target id of every draft id.
        layer_ids: auxiliary layers by vLLM's ids, in column order.
        origin: where it was read from, for people.
        config: the plain config that it came with; empty for our checkpoints.
    """

    shape: DraftShape
    tensors: dict[str, Tensor]
    target_ids: Tensor
    layer_ids: list[int]
    origin: str
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def d2t(self) -> Tensor:
        """int64 [Vd]: target id less draft id."""
        return self.target_ids - torch.arange(len(self.target_ids))

    @property
    def t2d(self) -> Tensor:
        """The mask, bool [V]: whether the draft can propose a target id."""
        mask = torch.zeros(self.shape.vocab_size, dtype=torch.bool)
        mask[self.target_ids] = True
        return mask


def from_checkpoint(checkpoint: Checkpoint) -> Draft:
    """Of a checkpoint of our training."""
    return Draft(
        checkpoint.shape, checkpoint.tensors, checkpoint.target_ids, checkpoint.layer_ids, checkpoint.folder.name
    )


def from_folder(folder: DraftFolder, origin: str) -> Draft:
    """Of a draft folder that was read."""
    return Draft(folder.shape, folder.tensors, folder.target_ids, folder.layer_ids, origin, folder.config)
