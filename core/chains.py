"""The draft's chains at every row of a batch, judged: what it would propose, and whether the server would take it.

At temperature 0 a proposal is taken iff it is the reply's own token. At T > 0 it depends on how the server drafts
(vLLM's `draft_sample_method`); p is the target's distribution at T over its full vocabulary, q the draft's at T:

    greedy         the draft's argmax d is proposed whatever T is, and accepted with probability p(d); vLLM's default
    probabilistic  a token is sampled from q, and accepted with probability min(1, p / q): sum over tokens of min(p, q)

Shape suffixes: T packed tokens, R rows of the step at hand, M label rows, V draft vocabulary, J steps, N temperatures.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from draftsmith.core.batch import Batch
from draftsmith.core.objective import Objective, label_index
from draftsmith.core.unroll import unroll

Drafting = Literal["greedy", "probabilistic"]
FUSED_HEAD_DIMS = (16, 32, 64, 128)  # that the hand-written kernels are built for


@dataclass(frozen=True)
class Chains:
    """Of every row of a batch, on the CPU.

    Attributes:
        leading_T: int64, n[t]: leading steps whose proposal is the reply's own token; 0 where nothing can be drafted.
        accept_NTJ: float32, probability that step j's proposal is accepted, given that those before were; 0 where a
            step has no label.
    """

    leading_T: Tensor
    accept_NTJ: Tensor


@torch.no_grad()
def judge_chains(
    objective: Objective, batch: Batch, steps: int, temperatures: Sequence[float] = (), drafting: Drafting = "greedy"
) -> Chains:
    """Judge the chains of a batch, eagerly; the reference of `fused.chains`.

    Args:
        objective: draft and target head; with temperatures, a head that knows the full vocabulary.
        batch: on the objective's device.
        steps: J.
        temperatures: above 0.
        drafting: how the server drafts.
    """
    device = batch.input_ids_T.device
    leading_T = torch.zeros(batch.num_tokens, dtype=torch.int64, device=device)
    accept_NTJ = torch.zeros(len(temperatures), batch.num_tokens, steps, device=device)
    target = TargetProbabilities(objective, batch.last_MH, temperatures) if temperatures else None
    label_at = label_index(batch)
    for step in unroll(objective.draft, batch, steps):
        logits_RV = objective.draft.lm_head(step.hidden_RH)
        match_R = objective.matches(logits_RV, batch.input_ids_T[step.rows_R + step.j + 1])
        leading_T[step.rows_R] += ((leading_T[step.rows_R] == step.j - 1) & (match_R > 0)).long()
        if target:
            rates_NR = target.acceptance(logits_RV, label_at[step.rows_R + step.j], drafting)
            accept_NTJ[:, step.rows_R, step.j - 1] = rates_NR
    return Chains(leading_T.cpu(), accept_NTJ.cpu())


class TargetProbabilities:
    """The target's distributions at label rows, at several temperatures."""

    def __init__(self, objective: Objective, last_MH: Tensor, temperatures: Sequence[float]) -> None:
        """Compute logits over the draft's vocabulary once, and the full one's log-sum-exp at every temperature."""
        head = objective.target_head
        self.temperatures = temperatures
        self.logits_MV = head(last_MH).float()
        self.full_lse_M = [
            (self.logits_MV / t).logsumexp(-1) if (lse := head.full_lse(last_MH, t)) is None else lse
            for t in temperatures
        ]

    def acceptance(self, draft_RV: Tensor, labels_R: Tensor, drafting: Drafting) -> Tensor:
        """float32 [N, R]: probability that the proposal made from the draft's logits is accepted."""
        rates = []
        best_R1 = draft_RV.argmax(-1, keepdim=True)
        for t, lse_M in zip(self.temperatures, self.full_lse_M, strict=True):
            if drafting == "greedy":
                logit_R = self.logits_MV[labels_R, best_R1.squeeze(-1)]
                rates.append((logit_R / t - lse_M[labels_R]).exp())
            else:
                p_RV = (self.logits_MV[labels_R] / t - lse_M[labels_R, None]).exp()
                rates.append(torch.minimum(p_RV, (draft_RV.float() / t).softmax(-1)).sum(-1))
        return torch.stack(rates).clamp(0.0, 1.0)
