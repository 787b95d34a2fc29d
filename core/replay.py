"""Exact offline acceptance: walk each reply as the server does, with the draft's own chains at every row.

n[t] is the number of leading matches of steps 1..K at row t. A round at row t emits its n[t] accepted tokens and one
more of the target's, so the next round is at row t + n[t] + 1; the first is at the row before the reply's first
token, and no round counts tokens past the reply's end. Acceptance length = 1 + accepted / rounds, as vLLM counts it.
Exact for replies made at temperature 0; an estimate for sampled ones.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftsmith.core.batch import Batch
from draftsmith.core.objective import Objective, StepSums, supervised_rows
from draftsmith.core.unroll import reply_runs


@dataclass(frozen=True)
class SampleRounds:
    """Rounds of one sample: accepted[i] drafts were accepted in its i-th round, of at most K."""

    sample_id: str
    accepted: list[int]


@torch.no_grad()
def chain_matches(objective: Objective, batch: Batch, steps: int) -> tuple[Tensor, StepSums]:
    """Leading matches of every row, and the objective's sums from the same pass.

    Returns:
        int64 [T] on the CPU: n[t] for K = steps (for a smaller K, min(n, K)); 0 where nothing can be drafted.
    """
    leading_T = torch.zeros(batch.num_tokens, dtype=torch.int64, device=batch.input_ids_T.device)
    losses, hits = torch.zeros(steps), torch.zeros(steps)
    for step, loss_R, match_R in objective.judge(batch, steps):
        losses[step.j - 1], hits[step.j - 1] = loss_R.sum(), match_R.sum()
        unbroken = leading_T[step.rows_R] == step.j - 1
        leading_T[step.rows_R] += (unbroken & (match_R > 0)).long()
    return leading_T.cpu(), StepSums(losses, supervised_rows(batch, steps).cpu(), hits)


def walk(batch: Batch, leading_T: Tensor, k: int) -> list[SampleRounds]:
    """The server's rounds at draft length `k` over every document of a batch.

    Args:
        batch: the batch that `leading_T` was computed on.
        leading_T: n[t] of `chain_matches` with steps >= k.
        k: drafted tokens a round.
    """
    leading, runs, mask = leading_T.tolist(), reply_runs(batch).tolist(), batch.loss_mask_T.tolist()
    out = []
    for d, sample_id in enumerate(batch.sample_ids):
        accepted: list[int] = []
        for start in _reply_starts(mask, batch.offsets[d], batch.offsets[d + 1]):
            row = start - 1
            while runs[row] >= 2:  # x[row + 1] is known; a round needs a reply token after it
                accepted.append(min(leading[row], k))
                row += accepted[-1] + 1
        out.append(SampleRounds(sample_id, accepted))
    return out


def _reply_starts(mask: list[bool], begin: int, end: int) -> Iterable[int]:
    return (t for t in range(begin + 1, end) if mask[t] and not mask[t - 1])


def acceptance(rounds: list[SampleRounds], k: int) -> dict[str, object]:
    """Acceptance length, unconditional per-position rates and round count over samples.

    Returns:
        `acceptance_length` (1 to k + 1), `per_position` (share of rounds whose i-th draft was accepted), `rounds`.
    """
    flat = np.array([n for sample in rounds for n in sample.accepted], dtype=np.int64)
    if not len(flat):
        return {"acceptance_length": 1.0, "per_position": [0.0] * k, "rounds": 0}
    return {
        "acceptance_length": 1.0 + float(flat.mean()),
        "per_position": [float((flat >= i).mean()) for i in range(1, k + 1)],
        "rounds": len(flat),
    }


def bootstrap_interval(rounds: list[SampleRounds], draws: int, seed: int) -> list[float]:
    """95 % interval of the acceptance length, [low, high], resampling whole conversations.

    Turns of one conversation stay together: their rounds are not independent.
    """
    totals: dict[str, list[int]] = {}
    for sample in rounds:
        total = totals.setdefault(sample.sample_id.rsplit("/", 1)[0], [0, 0])
        total[0] += sum(sample.accepted)
        total[1] += len(sample.accepted)
    table = np.array(list(totals.values()), dtype=np.float64)
    picks = np.random.default_rng(seed).integers(0, len(table), size=(draws, len(table)))
    sums = table[picks].sum(axis=1)
    lengths = 1.0 + sums[:, 0] / np.maximum(sums[:, 1], 1)
    return [float(x) for x in np.quantile(lengths, [0.025, 0.975])]
