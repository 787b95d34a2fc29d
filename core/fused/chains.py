"""`core/chains.py` on the fused pass's unroll: forward only, no loss, a chunk of logits held at a time."""

from collections.abc import Sequence

import torch

from draftsmith.core.batch import Batch
from draftsmith.core.chains import Chains, Drafting, TargetProbabilities
from draftsmith.core.fused.layout import Layout
from draftsmith.core.fused.products import Products
from draftsmith.core.fused.unroll import FusedUnroll
from draftsmith.core.fused.weights import gather_weights
from draftsmith.core.objective import Objective


@torch.no_grad()
def fused_chains(
    objective: Objective,
    batch: Batch,
    layout: Layout,
    dtype: torch.dtype,
    temperatures: Sequence[float] = (),
    drafting: Drafting = "greedy",
) -> Chains:
    """Judge the chains of a batch; as `chains.judge_chains`.

    Args:
        objective: draft and target head.
        batch: on the device.
        layout: of the batch, on the device; its steps are J.
        dtype: of the matrix products.
        temperatures: above 0.
        drafting: how the server drafts.
    """
    steps, count, device = layout.steps, layout.num_rows, batch.input_ids_T.device
    leading_T = torch.zeros(batch.num_tokens, dtype=torch.int64, device=device)
    accept_NTJ = torch.zeros(len(temperatures), batch.num_tokens, steps, device=device)
    if not count:
        return Chains(leading_T.cpu(), accept_NTJ.cpu())
    draft = objective.draft
    with torch.autocast(device.type, enabled=False):
        weights = gather_weights(draft, dict(draft.named_parameters()), dtype, Products())
        unroll = FusedUnroll(draft, weights, batch, layout)
        flat = unroll.forward().flatten(0, 1)
        truth_T = objective.get_buffer("draft_ids")[batch.input_ids_T]
        rows_R = layout.rows_R.long()
        hits_P = torch.zeros(steps * count, dtype=torch.int64, device=device)
        for chunk in layout.chunks:
            own = slice(chunk.p0, chunk.p1)
            pairs_P = layout.pairs_P[own]
            logits_PV = weights.products.forward(flat.index_select(0, pairs_P), weights.head_VH)
            hits_P[pairs_P] = (logits_PV.argmax(-1) == truth_T[layout.truth_P[own]]).long()
            if temperatures:
                target = TargetProbabilities(objective, batch.last_MH[chunk.m0 : chunk.m1], temperatures)
                rates_NP = target.acceptance(logits_PV, layout.labels_P[own].long() - chunk.m0, drafting)
                accept_NTJ[:, rows_R[pairs_P % count], pairs_P // count] = rates_NP
        leading_T[rows_R] = hits_P.view(steps, count).cumprod(0).sum(0)
    return Chains(leading_T.cpu(), accept_NTJ.cpu())
