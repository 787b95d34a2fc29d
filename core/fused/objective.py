"""The fused pass as training calls it."""

from typing import Any

import torch
from torch import Tensor

from draftsmith.core.batch import Batch
from draftsmith.core.fused.fp8 import Fp8Products
from draftsmith.core.fused.layout import Layout
from draftsmith.core.fused.loss import loss_pass
from draftsmith.core.fused.products import Products
from draftsmith.core.fused.unroll import FusedUnroll
from draftsmith.core.fused.weights import gather_weights
from draftsmith.core.objective import Objective, StepSums


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        objective: Objective,
        batch: Batch,
        layout: Layout,
        weights_J: Tensor,
        dtype: torch.dtype,
        products: Products,
        names: list[str],
        *params: Tensor,
    ) -> tuple[Tensor, ...]:
        draft = objective.draft
        weights = gather_weights(draft, dict(zip(names, params, strict=True)), dtype, products)
        unroll = FusedUnroll(draft, weights, batch, layout)
        hidden = unroll.forward()
        done = loss_pass(objective, hidden, unroll.w, batch, layout, weights_J)
        ctx.saved = (draft, unroll, done, names)
        ctx.set_materialize_grads(False)
        sums = done.sums
        ctx.mark_non_differentiable(sums.loss_J, sums.rows_J, sums.hits_J)
        return (weights_J * sums.minimised_J).sum(), sums.loss_J, sums.rows_J, sums.hits_J

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        (draft, unroll, done, names), scale = ctx.saved, grads[0]
        del ctx.saved  # one batch's activations are gigabytes, and a graph is run backward once
        assert scale is not None
        head = None if done.grad_head is None else done.grad_head.mul_(scale)
        by_name = unroll.backward(done.grad_hidden, scale).by_name(draft, head)
        return (None,) * 7 + tuple(by_name[name] for name in names)


def fused_loss(
    objective: Objective, batch: Batch, layout: Layout, weights_J: Tensor, dtype: torch.dtype, fp8: bool = False
) -> tuple[Tensor, StepSums]:
    """sum_j weights[j] * minimised[j] of a batch, to be run backward, and the sums of every step, for reports.

    Args:
        objective: draft and target head.
        batch: on the device.
        layout: of the batch, on the device.
        weights_J: float32: what a nat of each step weighs.
        dtype: of the matrix products and of what is kept between them.
        fp8: matrix products in float8 instead (`fp8.py`).
    """
    named = dict(objective.draft.named_parameters())
    if not layout.num_rows or not layout.chunks:
        # Nothing to learn, but still part of the graph: a rank without supervised rows must reach every gradient.
        zeros = weights_J.new_zeros(len(weights_J))
        loss = sum((0.0 * p.sum() for p in named.values()), start=weights_J.new_zeros(()))
        return loss, StepSums(zeros, zeros, zeros)
    products = Fp8Products() if fp8 else Products()
    with torch.autocast(batch.input_ids_T.device.type, enabled=False):
        loss, *sums = _Pass.apply(objective, batch, layout, weights_J, dtype, products, list(named), *named.values())
    return loss, StepSums(*sums)


@torch.no_grad()
def fused_matches(objective: Objective, batch: Batch, layout: Layout, dtype: torch.dtype) -> tuple[Tensor, StepSums]:
    """Leading matches of every packed row, int64 [T] on the CPU, and the sums; as `replay.chain_matches`."""
    steps = layout.steps
    leading_T = torch.zeros(batch.num_tokens, dtype=torch.int64)
    if not layout.num_rows:
        return leading_T, StepSums(*(torch.zeros(steps) for _ in range(3)))
    draft = objective.draft
    with torch.autocast(batch.input_ids_T.device.type, enabled=False):
        weights = gather_weights(draft, dict(draft.named_parameters()), dtype, Products())
        unroll = FusedUnroll(draft, weights, batch, layout)
        done = loss_pass(objective, unroll.forward(), unroll.w, batch, layout, None)
    leading_T[layout.rows_R.cpu().long()] = done.hits_JR.cumprod(0).sum(0).long().cpu()
    sums = done.sums
    return leading_T, StepSums(sums.loss_J.cpu(), sums.rows_J.cpu(), sums.hits_J.cpu())
