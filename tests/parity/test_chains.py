"""Judged chains against the objective's own matches, and acceptance probabilities against sums written out."""

import pytest
import torch

from draftsmith.core.chains import judge_chains
from draftsmith.core.losses import LossOptions
from draftsmith.core.objective import label_index
from draftsmith.core.replay import chain_matches
from draftsmith.core.unroll import unroll

MASKS = [[0, 0, 0, 1, 1, 1, 1, 1], [0, 1, 1, 0, 0, 1, 1, 1], [0, 0, 0], [1, 1, 1, 1, 1]]
STEPS = 3


def written_out(objective, batch, temperature, drafting):
    """Acceptance probability by (row, step), one pair at a time in float64."""
    head, at, found = objective.target_head, label_index(batch), {}
    for step in unroll(objective.draft, batch, STEPS):
        for row, hidden in zip(step.rows_R.tolist(), step.hidden_RH, strict=True):
            draft = objective.draft.lm_head(hidden).double().detach()
            last = batch.last_MH[at[row + step.j]][None]
            rows = head.get_buffer("head_VH") if head.full_VH is None else head.full_VH
            full = (head._logits(last, rows)[0].double() / temperature).softmax(-1)
            ids = objective.get_buffer("draft_ids")
            of_draft = torch.stack([full[int((ids == i).nonzero())] for i in range(len(draft))])
            if drafting == "greedy":
                found[row, step.j] = float(of_draft[draft.argmax()])
            else:
                found[row, step.j] = float(torch.minimum(of_draft, (draft / temperature).softmax(-1)).sum())
    return found


@pytest.mark.parametrize("drafting", ["greedy", "probabilistic"])
@pytest.mark.parametrize("values", [{}, {"draft_vocab_size": 40, "norm_output": True}], ids=str)
def test_acceptance_is_the_servers(make_objective, make_batch, drafting, values):
    objective, batch = make_objective(LossOptions("soft_ce_full"), **values), make_batch(MASKS)
    temperatures = [0.6, 1.0, 1.7]
    chains = judge_chains(objective, batch, STEPS, temperatures, drafting)
    leading, _ = chain_matches(objective, batch, STEPS)
    assert chains.leading_T.tolist() == leading.tolist()
    for n, temperature in enumerate(temperatures):
        wanted = written_out(objective, batch, temperature, drafting)
        for (row, j), rate in wanted.items():
            assert float(chains.accept_NTJ[n, row, j - 1]) == pytest.approx(rate, abs=1e-5)
        outside = chains.accept_NTJ[n].clone()
        for row, j in wanted:
            outside[row, j - 1] = 0.0
        assert not outside.any() and len(wanted) == 19


def test_sampling_from_the_draft_is_what_lk_alpha_trains(make_objective, make_batch):
    """sum min(p, q), from another implementation."""
    objective, batch = make_objective(LossOptions("lk_alpha")), make_batch(MASKS)
    chains = judge_chains(objective, batch, STEPS, [1.0], "probabilistic")
    for step, loss_R, _ in objective.judge(batch, STEPS):
        torch.testing.assert_close(chains.accept_NTJ[0, step.rows_R, step.j - 1], (-loss_R).exp())


def test_near_temperature_zero_a_greedy_draft_is_accepted_where_it_is_the_targets_choice(make_objective, make_batch):
    objective, batch = make_objective(LossOptions("soft_ce_full")), make_batch(MASKS)
    cold = judge_chains(objective, batch, STEPS, [1e-4]).accept_NTJ[0]
    assert set(cold.round(decimals=3).flatten().tolist()) <= {0.0, 1.0}


def test_a_batch_without_a_reply(make_objective, make_batch):
    for masks in ([], [[0, 0]], [[0, 1]]):
        chains = judge_chains(make_objective(LossOptions("soft_ce_full")), make_batch(masks), STEPS, [1.0])
        assert not chains.leading_T.any() and not chains.accept_NTJ.any()
