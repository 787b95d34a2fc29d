"""A batch of packed documents: the one input of the draft's unroll, in training and in replay."""

from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from draftsmith.core.errors import UserError
from draftsmith.core.fp8_states import decode

T = TypeVar("T")


def moved(value: T, device: torch.device) -> T:
    """A copy of a dataclass with its tensors on a device."""
    tensors = {k: v.to(device, non_blocking=True) for k, v in vars(value).items() if isinstance(v, Tensor)}
    return cast(T, replace(cast(Any, value), **tensors))


@dataclass(frozen=True)
class Batch:
    """Documents laid one after another; no padding.

    Attributes:
        sample_ids: one a document.
        offsets: document d is rows offsets[d] .. offsets[d + 1]; the last one is T.
        input_ids_T: int64.
        loss_mask_T: bool, r[t].
        positions_T: int64, counting from 0 in each document.
        aux_TAH: auxiliary states.
        last_MH: last states before the final norm, of the rows last_rows_M (int64, ascending).
        aux_scales_TA, last_scales_M: where the states are in float8 still (core/fp8_states.py); `to` decodes them.
    """

    sample_ids: tuple[str, ...]
    offsets: tuple[int, ...]
    input_ids_T: Tensor
    loss_mask_T: Tensor
    positions_T: Tensor
    aux_TAH: Tensor
    last_MH: Tensor
    last_rows_M: Tensor
    aux_scales_TA: Tensor | None = None
    last_scales_M: Tensor | None = None

    def to(self, device: torch.device) -> "Batch":
        """The same batch on a device, its states decoded there: float8 is half of the bytes to move."""
        there = moved(self, device)
        if there.aux_scales_TA is None or there.last_scales_M is None:
            return there
        aux, last = decode(there.aux_TAH, there.aux_scales_TA), decode(there.last_MH, there.last_scales_M)
        return replace(there, aux_TAH=aux, last_MH=last, aux_scales_TA=None, last_scales_M=None)

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.offsets[-1]

    def lacks_label(self, row: int) -> UserError:
        """What to raise where a packed row that is a label has no last state: the store is not what capture wrote."""
        document = bisect_right(self.offsets, row) - 1
        return UserError(
            f"sample {self.sample_ids[document]}: its token {row - self.offsets[document]} is supervised, and the "
            "hidden states hold no last state of the target there.",
            "They are damaged; run `draftsmith capture --fresh`.",
        )
