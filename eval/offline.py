"""What the store alone can tell: replayed acceptance of the export, and the objective of the final checkpoint."""

import gc
from collections.abc import Iterator
from typing import Any

import torch

from draftsmith.core.batch import Batch
from draftsmith.core.checkpoint import Checkpoint, build_objective
from draftsmith.core.config import Config
from draftsmith.core.draft_folder import DraftFolder
from draftsmith.core.engine import has_cuda
from draftsmith.core.objective import Objective
from draftsmith.core.progress import meter
from draftsmith.core.replay import SampleRounds, acceptance, bootstrap_interval, chain_matches, walk
from draftsmith.core.target import Target
from draftsmith.data.batching import collate, plan_batches
from draftsmith.hidden_state_capture.reader import HiddenStateStore


class HeldOut:
    """The held-out samples, packed in a fixed order and read batch by batch, every time they are iterated."""

    def __init__(self, store: HiddenStateStore, tokens_per_batch: int) -> None:
        """Plan the batches; nothing is read yet."""
        self.store, self.numbers = store, store.numbers("eval")
        self.plan = plan_batches(store.lengths(self.numbers), tokens_per_batch)

    def __len__(self) -> int:
        return len(self.plan)

    def __iter__(self) -> Iterator[Batch]:
        return (collate(self.store, [self.numbers[i] for i in batch]) for batch in self.plan)


def release_memory() -> None:
    """Give the GPU's memory back: the engines that serve next want nearly all of it."""
    gc.collect()
    if has_cuda():
        torch.cuda.empty_cache()


def replay(
    config: Config, target: Target, export: DraftFolder, norm_form: str, batches: HeldOut
) -> tuple[list[dict[str, Any]], dict[int, list[SampleRounds]]]:
    """Replayed acceptance for every K of the config, in one pass.

    Returns:
        `replay` rows of the report, and the rounds by K.
    """
    objective = build_objective(target, export.shape, export.target_ids, norm_form)
    objective.draft.load_state_dict(export.tensors)
    rounds: dict[int, list[SampleRounds]] = {k: [] for k in config.eval.k}
    device = torch.device("cuda" if has_cuda() else "cpu")
    objective.to(device).eval()
    with meter("replay", len(batches), "batches") as shown:
        for batch in batches:
            leading, _ = chain_matches(objective, batch.to(device), max(config.eval.k))
            for k in config.eval.k:
                rounds[k] += walk(batch, leading, k)
            shown.advance()
    sampled = config.data.sampling.temperature
    rows = [
        {
            "k": k,
            "temperature": sampled,
            **acceptance(rounds[k], k),
            "ci95": bootstrap_interval(rounds[k], config.eval.bootstrap, config.run.seed),
            "samples": len(rounds[k]),
            "exact": sampled == 0.0,
        }
        for k in config.eval.k
    ]
    return rows, rounds


def objective_figures(target: Target, checkpoint: Checkpoint, batches: HeldOut) -> dict[str, Any]:
    """`objective` of the report: per-step soft cross-entropy (nats) of the final checkpoint on the held-out samples."""
    objective: Objective = build_objective(target, checkpoint.shape, checkpoint.target_ids, checkpoint.norm_form)
    objective.draft.load_state_dict(checkpoint.tensors)
    steps: int = checkpoint.state["inputs"]["train"]["ttt_steps"]
    device = torch.device("cuda" if has_cuda() else "cpu")
    objective.to(device).eval()
    loss, rows, hits = torch.zeros(3, steps, dtype=torch.float64)
    with torch.no_grad():
        for batch in batches:
            sums = objective(batch.to(device), steps)
            loss, rows, hits = loss + sums.loss_J.cpu(), rows + sums.rows_J.cpu(), hits + sums.hits_J.cpu()
    return {
        "checkpoint": checkpoint.folder.name,
        "loss": "soft_ce",
        "loss_per_step": (loss / rows.clamp_min(1)).tolist(),
        "supervised_rows_per_step": [int(n) for n in rows.tolist()],
        "accuracy_per_step": (hits / rows.clamp_min(1)).tolist(),
    }
