"""What one training step computes: the eager unroll, or the fused pass where there is a GPU for it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from draftsmith.core.batch import Batch
from draftsmith.core.config_train import TrainConfig
from draftsmith.core.draft_shape import DraftShape
from draftsmith.core.engine import multiplies_bfloat16
from draftsmith.core.errors import UserError
from draftsmith.core.objective import Objective, StepSums
from draftsmith.core.replay import chain_matches

if TYPE_CHECKING:
    from draftsmith.core.fused.layout import Layout


@dataclass(frozen=True)
class Work:
    """A batch, where the fused pass puts its rows (None for the eager one), and whether it multiplies in float8."""

    batch: Batch
    layout: "Layout | None"
    fp8: bool = False

    def to(self, device: torch.device) -> "Work":
        """The same work on a device."""
        return Work(self.batch.to(device), None if self.layout is None else self.layout.to(device), self.fp8)


class TrainingStep(nn.Module):
    """The objective as a module whose forward is the loss of one batch; what is wrapped for several processes."""

    def __init__(self, objective: Objective, config: TrainConfig, fused_dtype: torch.dtype | None) -> None:
        """Choose the pass.

        Args:
            objective: draft, target head, loss.
            config: steps and sizes.
            fused_dtype: dtype of the fused pass's products; None: the eager unroll.
        """
        super().__init__()
        self.objective, self.config, self.fused_dtype = objective, config, fused_dtype
        self.entered: Callable[[list[nn.Parameter]], None] | None = None  # told when the parameters are here

    def lay_out(self, batch: Batch, done: float = 0.0) -> Work:
        """What can be prepared on the host, while the GPU works on the batch before.

        Args:
            batch: in host memory.
            done: share of the optimizer steps that come before; the last ones do without float8.
        """
        if self.fused_dtype is None:
            return Work(batch, None)
        from draftsmith.core.fused.layout import lay_out

        shape, steps = self.objective.draft.shape, self.config.ttt_steps
        # All J steps of a chunk's label rows have their logits held at once, in two bytes each.
        label_rows = max(1, self.config.logits_bytes // (2 * steps * shape.draft_vocab_size))
        cudnn = torch.backends.cuda.cudnn_sdp_enabled() and torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]
        whole = self.config.attention == "auto" and self.fused_dtype is torch.bfloat16 and cudnn
        fp8 = self.config.matmul == "fp8" and done < 1.0 - self.config.bf16_tail
        return Work(batch, lay_out(batch, steps, label_rows, shape.sliding_window, whole), fp8)

    def forward(self, work: Work, weights_J: Tensor | None = None) -> tuple[Tensor, StepSums]:
        """sum_j weights[j] * (sum of step j that is minimised), and every step's sums, for reports.

        Args:
            work: on the device.
            weights_J: float32: what a row's loss weighs at every step; None: `matches` is asked instead, through what
                gathers the parameters for a forward pass.
        """
        if weights_J is None:
            return self.matches(work)
        if self.entered:
            self.entered([p for p in self.objective.draft.parameters() if p.requires_grad])
        if self.fused_dtype is not None and work.layout is not None:
            from draftsmith.core.fused.objective import fused_loss

            return fused_loss(self.objective, work.batch, work.layout, weights_J, self.fused_dtype, work.fp8)
        sums: StepSums = self.objective(work.batch, self.config.ttt_steps)
        return (weights_J * sums.minimised_J).sum(), replace(sums, loss_J=sums.loss_J.detach(), weighted_J=None)

    def matches(self, work: Work) -> tuple[Tensor, StepSums]:
        """Leading matches of every row, for replay, by the same pass."""
        if self.fused_dtype is not None and work.layout is not None:
            from draftsmith.core.fused.objective import fused_matches

            return fused_matches(self.objective, work.batch, work.layout, self.fused_dtype)
        return chain_matches(self.objective, work.batch, self.config.ttt_steps)


def fused_dtype(config: TrainConfig, shape: DraftShape, device: torch.device, half: bool) -> torch.dtype | None:
    """Dtype of the fused pass's products, or None where training is eager.

    Args:
        config: `kernels` decides; auto is fused on a GPU where the draft's heads fit its tiles.
        shape: of the draft.
        device: that is trained on.
        half: whether products are in bfloat16.

    Raises:
        UserError: `kernels: fused` where the pass cannot run, or `matmul: fp8` where its products cannot.
    """
    if config.matmul == "fp8":
        _require_fp8(config, shape, device, half)
    fits = shape.head_dim in (16, 32, 64, 128)
    gpu = device.type == "cuda"
    compiles = gpu and (not half or multiplies_bfloat16(device))
    if config.kernels == "eager" or (
        config.kernels == "auto" and config.matmul == "bf16" and not (fits and half and compiles)
    ):
        return None
    if not gpu:
        raise UserError("train.kernels is fused, and there is no GPU here.", "Set train.kernels to auto.")
    if not compiles:
        raise UserError(
            "train.kernels is fused, train.precision bfloat16, and this GPU is older than sm_80: it has no bfloat16.",
            "Set train.precision to float32, or train.kernels to auto.",
        )
    if not fits:
        raise UserError(
            f"the fused pass was asked for, and the draft's head_dim is {shape.head_dim}; its kernels are built for "
            "16, 32, 64 or 128.",
            "Set draft.head_dim to one of these, or train.kernels to eager and train.matmul to bf16.",
        )
    return torch.bfloat16 if half else torch.float32


def _require_fp8(config: TrainConfig, shape: DraftShape, device: torch.device, half: bool) -> None:
    """Float8 products belong to the fused pass in bfloat16, on a GPU that has them."""
    from draftsmith.core.fused.fp8 import MULTIPLE, odd_sizes

    mend = "Set train.matmul to bf16."
    if config.kernels == "eager" or not half:
        raise UserError("train.matmul is fp8, which the fused pass in bfloat16 has and the eager one has not.", mend)
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        raise UserError("train.matmul is fp8, and this machine has no GPU of compute capability 8.9 or higher.", mend)
    if odd := odd_sizes(shape):
        sizes = ", ".join(f"{name} = {size}" for name, size in odd.items())
        raise UserError(f"train.matmul is fp8, whose sizes are multiples of {MULTIPLE}; the draft has {sizes}.", mend)
