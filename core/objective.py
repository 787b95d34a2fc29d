"""The objective: per step of the unroll, every supervised row's loss against the target's own distribution.

Sums and row counts are kept apart: the mean is over the rows of a whole optimizer step, on all ranks, so padding,
packing, the split into batches and the number of processes do not change it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from draftsmith.core.batch import Batch
from draftsmith.core.draft import DraftModel
from draftsmith.core.losses import LossOptions, row_losses
from draftsmith.core.target_weights import TargetHead
from draftsmith.core.unroll import Step, reply_runs, unroll


@dataclass(frozen=True)
class StepSums:
    """Figures of a batch per step j = 1..J.

    Attributes:
        loss_J: float32, sum over supervised rows of the loss.
        rows_J: float32, supervised rows.
        hits_J: float32, rows where the draft's argmax is the reply's own token; a token outside the draft vocabulary
            is a miss.
        weighted_J: float32, sum of the losses by their `chain_weights`; None where these are all 1, and in evaluation.
    """

    loss_J: Tensor
    rows_J: Tensor
    hits_J: Tensor
    weighted_J: Tensor | None = None

    @property
    def minimised_J(self) -> Tensor:
        """The sums that training minimises; `loss_J` are those that are reported."""
        return self.loss_J if self.weighted_J is None else self.weighted_J


class Objective(nn.Module):
    """The draft beside what judges it; called on a batch, gives the sums of every step."""

    def __init__(
        self, draft: DraftModel, target_head: TargetHead, target_ids_V: Tensor, loss: LossOptions | None = None
    ) -> None:
        """Put them together.

        Args:
            draft: the draft.
            target_head: the target's output head over the draft vocabulary only.
            target_ids_V: int64 [Vd], target id of every draft id.
            loss: which loss; None: soft cross-entropy in nats. One on the full vocabulary needs a head that has it.
        """
        super().__init__()
        self.draft, self.target_head, self.loss = draft, target_head, loss or LossOptions()
        self.register_buffer("draft_ids", to_draft_ids(target_ids_V, draft.shape.vocab_size), persistent=False)

    def forward(self, batch: Batch, steps: int) -> StepSums:
        """Unroll, compare, sum; gradients flow through `loss_J` and `weighted_J`."""
        zero = batch.aux_TAH.new_zeros((), dtype=torch.float32)
        losses, hits, weighted = [zero] * steps, [zero] * steps, [zero] * steps
        rejected = self.loss.rejected_weight
        alive_T = batch.loss_mask_T.new_ones(batch.num_tokens)  # no draft of the row's chain was rejected so far
        for step, loss_R, match_R in self.judge(batch, steps):
            losses[step.j - 1], hits[step.j - 1] = loss_R.sum(), match_R.sum()
            if rejected != 1.0:
                weighted[step.j - 1] = torch.where(alive_T[step.rows_R], loss_R, rejected * loss_R).sum()
                alive_T[step.rows_R] &= match_R > 0
        weighted_J = None if rejected == 1.0 else torch.stack(weighted)
        return StepSums(torch.stack(losses), supervised_rows(batch, steps), torch.stack(hits), weighted_J)

    def judge(self, batch: Batch, steps: int) -> Iterator[tuple[Step, Tensor, Tensor]]:
        """Every step of the unroll with each row's loss and match (1 or 0), float32 [R]; replay walks on it."""
        label_at = label_index(batch)
        target_MV, full_lse_M = self.labels(batch)
        for step in unroll(self.draft, batch, steps):
            logits_RV, at_R = self.draft.lm_head(step.hidden_RH), label_at[step.rows_R + step.j]
            full_lse_R = None if full_lse_M is None else full_lse_M[at_R]
            loss_R = row_losses(self.loss, logits_RV, target_MV[at_R], full_lse_R)
            yield step, loss_R, self.matches(logits_RV, batch.input_ids_T[step.rows_R + step.j + 1])

    @torch.no_grad()
    def labels(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """The target's logits [M, Vd] at every label row and, where the loss asks, their full log-sum-exp [M]."""
        wanted = self.loss.needs_full_vocabulary
        full_lse_M = self.target_head.full_lse(batch.last_MH, self.loss.temperature) if wanted else None
        return self.target_head(batch.last_MH), full_lse_M

    @torch.no_grad()
    def matches(self, logits_RV: Tensor, true_ids_R: Tensor) -> Tensor:
        """float32 [R]: 1 where the draft's argmax, mapped to the target's vocabulary, is the true token."""
        return (logits_RV.argmax(-1) == self.get_buffer("draft_ids")[true_ids_R]).float()


def chain_weights(hits_JR: Tensor, rejected_weight: float) -> Tensor:
    """float32 [J, R]: 1 where all earlier steps of the row were hits (so at step 1), elsewhere `rejected_weight`.

    Args:
        hits_JR: float32, 1 or 0.
        rejected_weight: `LossOptions.rejected_weight`.
    """
    alive_JR = torch.cat([torch.ones_like(hits_JR[:1]), hits_JR[:-1].cumprod(0)])
    return alive_JR + (1.0 - alive_JR) * rejected_weight


def supervised_rows(batch: Batch, steps: int) -> Tensor:
    """float32 [J]: supervised rows of every step."""
    runs = reply_runs(batch)
    return torch.stack([(runs >= j + 1).sum() for j in range(1, steps + 1)]).float()


def label_index(batch: Batch) -> Tensor:
    """int64 [T]: where row t's last state is in last_MH; -1 where it was not kept (never a label).

    Raises:
        UserError: the last state of a label is missing; it names the sample.
    """
    index = batch.last_rows_M.new_full((batch.num_tokens,), -1)
    index[batch.last_rows_M] = torch.arange(len(batch.last_rows_M), device=index.device)
    labels = torch.nonzero(reply_runs(batch) >= 2)[:, 0] + 1  # of step 1; deeper steps' are among them
    missing = labels[index[labels] < 0]
    if len(missing):
        raise batch.lacks_label(int(missing[0]))
    return index


def to_draft_ids(target_ids_V: Tensor, vocab_size: int) -> Tensor:
    """int64 [V]: the draft id of every target id, -1 outside the draft vocabulary."""
    ids = torch.full((vocab_size,), -1, dtype=torch.int64, device=target_ids_V.device)
    ids[target_ids_V] = torch.arange(len(target_ids_V), device=target_ids_V.device)
    return ids


def step_weights(rows_in_step_J: Tensor, decay: float) -> Tensor:
    """float32 [J]: what one row's loss weighs at step j: decay^(j-1) / supervised rows of the whole optimizer step."""
    steps = torch.arange(len(rows_in_step_J), device=rows_in_step_J.device, dtype=torch.float32)
    return decay**steps / rows_in_step_J.clamp_min(1)
