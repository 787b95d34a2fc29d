"""Documents packed into one batch give what they give one by one: losses, matches and gradients."""

import itertools

import pytest
import torch

from draftsmith.core.losses import LossOptions
from draftsmith.core.objective import step_weights, supervised_rows

STEPS, DECAY = 4, 0.8
MASKS = [
    [0, 0, 0, 1, 1, 1, 1, 1, 1],
    [0, 1, 1, 0, 0, 1, 1, 1],
    [0, 0, 0],
    [0, 0, 1],
    [1, 1, 1, 1, 1, 1],
    [0],
    [1, 1, 1],
]


def gradients(objective, batches, rows):
    objective.zero_grad()
    losses = []
    for batch in batches:
        losses.append((step_weights(rows, DECAY) * objective(batch, STEPS).loss_J).sum())
        losses[-1].backward()
    return sum(x.item() for x in losses), {n: p.grad.clone() for n, p in objective.draft.named_parameters()}


@pytest.mark.parametrize("cuts", [[1, 2, 3, 4, 5, 6], [2], [3, 5]], ids=["one by one", "in two", "in three"])
@pytest.mark.parametrize(
    ("loss", "values"),
    [("soft_ce", {}), ("lk_lambda", {"sliding_window": 3}), ("soft_ce_full", {"norm_output": True})],
    ids=["plain", "window", "normed output"],
)
def test_loss_and_gradients_of_a_pack_are_the_sum_over_its_parts(make_objective, make_batch, cut, cuts, loss, values):
    """T4: the mean is over the rows of the whole optimizer step, however it is split."""
    objective, whole = make_objective(LossOptions(loss), **values), make_batch(MASKS)
    rows = supervised_rows(whole, STEPS)
    edges = [0, *cuts, len(MASKS)]
    parts = [cut(whole, a, b) for a, b in itertools.pairwise(edges)]
    assert torch.equal(rows, sum(supervised_rows(p, STEPS) for p in parts))
    assert torch.equal(objective(whole, STEPS).hits_J, sum(objective(p, STEPS).hits_J for p in parts))
    packed, grads = gradients(objective, [whole], rows)
    alone, grads_alone = gradients(objective, parts, rows)
    assert packed == pytest.approx(alone, rel=1e-5)
    for name, grad in grads.items():
        assert torch.allclose(grad, grads_alone[name], rtol=1e-4, atol=1e-6), name


def test_a_document_does_not_depend_on_its_neighbours(make_objective, make_batch, cut):
    """Bit for bit: other tokens and states before and after it change nothing."""
    objective = make_objective()
    one, other = make_batch(MASKS, seed=1), make_batch(MASKS, seed=2)
    begin, end = one.offsets[1], one.offsets[2]
    for name in ("input_ids_T", "aux_TAH"):
        getattr(other, name)[begin:end] = getattr(one, name)[begin:end]
    kept = (one.last_rows_M >= begin) & (one.last_rows_M < end)
    other.last_MH[kept] = one.last_MH[kept]

    def losses(batch):
        pairs = list(objective.judge(batch, STEPS))
        return torch.cat([loss[(s.rows_R >= begin) & (s.rows_R < end)] for s, loss, _ in pairs])

    assert torch.equal(losses(one), losses(other)) and len(losses(one)) > 0
