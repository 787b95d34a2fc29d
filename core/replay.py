"""Offline acceptance: walk each reply as the server does, with the draft's own chains at every row.

n[t] is the number of leading matches of steps 1..K at row t. A round at row t emits its n[t] accepted tokens and one
more of the target's, so the next round is at row t + n[t] + 1; the first is at the row before the reply's first
token, and no round counts tokens past the reply's end. Acceptance length = 1 + accepted / rounds, as vLLM counts it.
Exact for replies made at temperature 0. For replies sampled at T > 0 it is one draw of what the server would count:
vLLM proposes the draft's argmax and accepts it with the target's probability, and a sampled reply holds it as often.

For another temperature than the replies', `expected_walk` takes the probability of every acceptance instead of its
outcome, along the reply that is there: an estimate, since the server would have gone on from other tokens.

A table is float64 [S, 1 + K]: of every sample its rounds, then the rounds whose i-th draft was accepted.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftsmith.core.batch import Batch
from draftsmith.core.objective import Objective, StepSums, supervised_rows
from draftsmith.core.unroll import reply_runs

Table = NDArray[np.float64]


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
    return walks(batch, leading_T, [k])[0]


def walks(batch: Batch, leading_T: Tensor, ks: Sequence[int]) -> list[list[SampleRounds]]:
    """`walk` for several draft lengths, what they share worked out once."""
    leading, runs, mask = leading_T.tolist(), reply_runs(batch).tolist(), batch.loss_mask_T.tolist()
    starts = [list(_reply_starts(mask, a, b)) for a, b in zip(batch.offsets, batch.offsets[1:], strict=False)]
    return [
        [
            SampleRounds(sample_id, [n for start in at for n in _rounds(leading, runs, start - 1, k)])
            for sample_id, at in zip(batch.sample_ids, starts, strict=True)
        ]
        for k in ks
    ]


def _rounds(leading: list[int], runs: list[int], row: int, k: int) -> list[int]:
    accepted = []
    while runs[row] >= 2:  # x[row + 1] is known; a round needs a reply token after it
        n = min(leading[row], k)
        accepted.append(n)
        row += n + 1
    return accepted


def _reply_starts(mask: list[bool], begin: int, end: int) -> Iterable[int]:
    return (t for t in range(begin + 1, end) if mask[t] and not mask[t - 1])


def expected_walk(batch: Batch, accept_TJ: Tensor, k: int) -> Table:
    """The rounds that a server is expected to make at draft length `k`, as a table.

    A row is reached with the probability that some round starts there; from it, a round that accepts n drafts leads to
    row t + n + 1. With probabilities of 0 and 1 this is `walk`.

    Args:
        batch: packed documents.
        accept_TJ: on the CPU: probability that the draft of step j is accepted, given that those before were; J >= k.
        k: drafted tokens a round.
    """
    runs, mask = reply_runs(batch).tolist(), batch.loss_mask_T.tolist()
    reach_TK = accept_TJ[:, :k].double().cumprod(1).numpy()  # P(n >= i)
    table = np.zeros((len(batch.sample_ids), 1 + k))
    starts_at = np.zeros(batch.num_tokens + k + 1)
    for d in range(len(batch.sample_ids)):
        for start in _reply_starts(mask, batch.offsets[d], batch.offsets[d + 1]):
            starts_at[start - 1] = 1.0
            row = start - 1
            while runs[row] >= 2:
                steps = min(k, runs[row] - 1)
                reach = starts_at[row] * np.append(reach_TK[row, :steps], 0.0)
                table[d, 0] += starts_at[row]
                table[d, 1 : steps + 1] += reach[:-1]
                starts_at[row + 1] += starts_at[row] - reach[0]
                starts_at[row + 2 : row + 2 + steps] += reach[:-1] - reach[1:]
                row += 1
    return table


def tally(rounds: Sequence[SampleRounds], k: int) -> Table:
    """The table of rounds at draft length `k`."""
    table = np.zeros((len(rounds), 1 + k))
    for row, sample in zip(table, rounds, strict=True):
        counts = np.bincount(sample.accepted, minlength=k + 1) if sample.accepted else np.zeros(k + 1)
        row[:] = counts[::-1].cumsum()[::-1]  # n accepted drafts were accepted at positions 1..n
    return table


def table_figures(table: Table) -> dict[str, object]:
    """Acceptance length, unconditional per-position rates and round count.

    Returns:
        `acceptance_length` (1 to K + 1), `per_position` (share of rounds whose i-th draft was accepted), `rounds`
        (an int where they were counted, else the expected number).
    """
    total = table.sum(0)
    rounds = float(total[0])
    rates = [float(n) / rounds if rounds else 0.0 for n in total[1:]]
    return {
        "acceptance_length": 1.0 + sum(rates),
        "per_position": rates,
        "rounds": int(rounds) if rounds.is_integer() else rounds,
    }


def acceptance(rounds: list[SampleRounds], k: int) -> dict[str, object]:
    """`table_figures` of rounds."""
    return table_figures(tally(rounds, k))


def bootstrap_lengths(groups: Sequence[str], tables: Sequence[Table], draws: int, seed: int) -> NDArray[np.float64]:
    """Acceptance lengths [draws, len(tables)] of resampled groups, the same groups for every table.

    Args:
        groups: of every sample, what is resampled as a whole: turns of one conversation are not independent.
        tables: of the same samples, in the same order.
        draws: how many.
        seed: of the draws.
    """
    _, group_S = np.unique(np.asarray(groups), return_inverse=True)
    count = int(group_S.max(initial=-1)) + 1
    sums = np.zeros((len(tables), count, 2))
    for total, table in zip(sums, tables, strict=True):
        np.add.at(total, group_S, np.stack([table[:, 0], table[:, 1:].sum(1)], axis=1))
    generator = np.random.default_rng(seed)
    lengths = np.ones((draws, len(tables)))
    for i in range(draws if count else 0):  # one draw at a time: all of them would be draws x groups
        times = np.bincount(generator.integers(0, count, size=count), minlength=count)
        rounds, accepted = np.moveaxis(times @ sums, -1, 0)
        lengths[i] += accepted / np.maximum(rounds, 1e-9)
    return lengths


def interval(values: NDArray[np.float64]) -> list[float]:
    """95 % interval [low, high] of bootstrap draws."""
    return [float(x) for x in np.quantile(values, [0.025, 0.975])]


def conversation_of(sample_id: str) -> str:
    """The conversation that a sample is a turn of."""
    return sample_id.rsplit("/", 1)[0]
