"""What the store alone can tell: replayed acceptance of a draft, and the objective of a checkpoint."""

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from draftsmith.core.batch import Batch
from draftsmith.core.chains import FUSED_HEAD_DIMS, Chains, Drafting, judge_chains
from draftsmith.core.checkpoint import Checkpoint, build_objective
from draftsmith.core.config import Config
from draftsmith.core.draft_folder import DraftFolder
from draftsmith.core.engine import has_cuda
from draftsmith.core.losses import LossOptions
from draftsmith.core.objective import Objective, StepSums
from draftsmith.core.progress import meter
from draftsmith.core.replay import Table, expected_walk, tally, walks
from draftsmith.core.target import Target
from draftsmith.data.batching import collate, plan_batches
from draftsmith.hidden_state_capture.reader import HiddenStateStore

if TYPE_CHECKING:
    from draftsmith.core.fused.layout import Layout

    _Placed = tuple[Batch, Batch, Layout | None]

A = TypeVar("A")
B = TypeVar("B")


class HeldOut:
    """The held-out samples, packed in a fixed order and read batch by batch, every time they are iterated."""

    def __init__(self, store: HiddenStateStore, tokens_per_batch: int) -> None:
        """Plan the batches; nothing is read yet."""
        self.store, self.numbers = store, store.numbers("eval")
        self.plan = plan_batches(store.lengths(self.numbers), tokens_per_batch)

    def __len__(self) -> int:
        return len(self.plan)

    def __iter__(self) -> Iterator[Batch]:
        """Every batch, the next one read while this one is worked on."""
        return ahead(self._read, self.plan)

    def _read(self, batch: list[int]) -> Batch:
        return collate(self.store, [self.numbers[i] for i in batch])


def ahead(work: Callable[[A], B], items: Iterable[A]) -> Iterator[B]:
    """`work` of every item in order, the next one worked on in a thread meanwhile."""
    with ThreadPoolExecutor(1) as pool:
        coming = None
        for item in items:
            following = pool.submit(work, item)
            if coming:
                yield coming.result()
            coming = following
        if coming:
            yield coming.result()


def release_memory() -> None:
    """Give the GPU's memory back: the engines that serve next want nearly all of it."""
    gc.collect()
    if has_cuda():
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class Replay:
    """Replayed rounds of one draft.

    Attributes:
        sample_ids: of the held-out samples, in the store's order.
        tables: by (K, temperature): rounds and acceptances of every sample, as in `core.replay`.
        methods: by temperature: `exact`, `sampled` (one draw of what a server would count) or `expected`.
    """

    sample_ids: list[str]
    tables: dict[tuple[int, float], Table]
    methods: dict[float, str]


def replay(config: Config, target: Target, draft: DraftFolder, norm_form: str, batches: HeldOut) -> Replay:
    """Replay a draft on the held-out samples: every K of `replay_lengths`, every temperature, one pass.

    The temperature of the replies themselves is walked as it is; those of `eval.temperature` that differ from it and
    are above 0 are walked by expectation.
    """
    sampled, ks, drafting = config.data.sampling.temperature, replay_lengths(config), config.eval.draft_sampling
    others = [t for t in dict.fromkeys(config.eval.temperature) if t > 0 and t != sampled]
    # A sampled reply says what becomes of the draft's argmax, not of a token sampled from the draft.
    by_matches = sampled == 0 or drafting == "greedy"
    expected = others if by_matches else [sampled, *others]
    loss = LossOptions("soft_ce_full") if expected else LossOptions()  # its head knows the full vocabulary
    objective = build_objective(target, draft.shape, draft.target_ids, norm_form, loss)
    objective.draft.load_state_dict(draft.tensors)
    judge = Judge(objective, max(ks), config.train.logits_bytes, expected, drafting)
    ids: list[str] = []
    parts: dict[tuple[int, float], list[Table]] = {(k, t): [] for t in [sampled, *others] for k in ks}
    with meter("replay", len(batches), "batches") as shown:
        for batch, chains in judge.all(batches):
            ids += batch.sample_ids
            if by_matches:
                for k, rounds in zip(ks, walks(batch, chains.leading_T, ks), strict=True):
                    parts[k, sampled].append(tally(rounds, k))
            for t, accept_TJ in zip(expected, chains.accept_NTJ, strict=True):
                for k in ks:
                    parts[k, t].append(expected_walk(batch, accept_TJ, k))
            shown.advance()
    methods = {sampled: "exact" if sampled == 0 else "sampled"} if by_matches else {}
    return Replay(
        ids,
        {key: np.concatenate(tables) for key, tables in parts.items()},
        methods | dict.fromkeys(expected, "expected"),
    )


def replay_lengths(config: Config) -> list[int]:
    """Draft lengths that are replayed: 1 .. `eval.replay_k`, and those that are served."""
    return sorted({*range(1, config.eval.replay_k + 1), *config.eval.k})


class Judge:
    """Judges batches on the GPU where there is one, by the fused pass where the draft's heads fit it."""

    def __init__(
        self,
        objective: Objective,
        steps: int,
        logits_bytes: int,
        temperatures: Sequence[float] = (),
        drafting: Drafting = "greedy",
    ) -> None:
        """Move the objective to its device.

        Args:
            objective: draft and target head.
            steps: J.
            logits_bytes: the fused pass holds at most about this many bytes of logits.
            temperatures: above 0.
            drafting: how the server drafts.
        """
        self.device = torch.device("cuda" if has_cuda() else "cpu")
        self.objective = objective.to(self.device).eval()
        self.steps, self.temperatures, self.drafting = steps, temperatures, drafting
        shape = objective.draft.shape
        self.fused = has_cuda() and shape.head_dim in FUSED_HEAD_DIMS
        self._copies: Any = torch.cuda.Stream() if has_cuda() else None  # type: ignore[no-untyped-call]
        self.label_rows = max(1, logits_bytes // (2 * steps * shape.draft_vocab_size))

    def all(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, Chains]]:
        """Every batch, on the host, with its chains.

        On a GPU copying to it, computing on it and what the caller does with the chains go on side by side.
        """
        return ahead(self._judged, ahead(self._on_device, batches))

    def __call__(self, batch: Batch) -> Chains:
        """Chains of one batch that is on the host."""
        return self._judged(self._on_device(batch))[1]

    @torch.no_grad()
    def sums(self, batch: Batch) -> StepSums:
        """Sums of the objective over one batch that is on the host."""
        _, here, layout = self._on_device(batch)
        if layout is None:
            sums: StepSums = self.objective(here, self.steps)
            return sums
        from draftsmith.core.fused.objective import fused_matches

        return fused_matches(self.objective, here, layout, torch.bfloat16)[1]

    def _on_device(self, batch: Batch) -> "_Placed":
        """The batch, its copy on the device, and where the fused pass puts its rows."""
        layout: Layout | None = None
        if self.fused:
            from draftsmith.core.fused.layout import lay_out

            layout = lay_out(batch, self.steps, self.label_rows, self.objective.draft.shape.sliding_window)
        if self._copies is None:
            return batch, batch.to(self.device), layout
        with torch.cuda.stream(self._copies):  # else the copy would wait for the batch that is computed
            placed = (batch, batch.to(self.device), layout and layout.to(self.device))
        self._copies.synchronize()
        return placed

    @torch.no_grad()
    def _judged(self, placed: "_Placed") -> tuple[Batch, Chains]:
        batch, here, layout = placed
        if layout is None:
            return batch, judge_chains(self.objective, here, self.steps, self.temperatures, self.drafting)
        from draftsmith.core.fused.chains import fused_chains

        return batch, fused_chains(self.objective, here, layout, torch.bfloat16, self.temperatures, self.drafting)


def objective_figures(target: Target, checkpoint: Checkpoint, batches: HeldOut, logits_bytes: int) -> dict[str, Any]:
    """`objective` of the report: per-step soft cross-entropy (nats) of the final checkpoint on the held-out samples."""
    objective: Objective = build_objective(target, checkpoint.shape, checkpoint.target_ids, checkpoint.norm_form)
    objective.draft.load_state_dict(checkpoint.tensors)
    steps: int = checkpoint.state["inputs"]["train"]["ttt_steps"]
    judge = Judge(objective, steps, logits_bytes)
    loss, rows, hits = torch.zeros(3, steps, dtype=torch.float64)
    for batch in batches:
        sums = judge.sums(batch)
        loss, rows, hits = loss + sums.loss_J.cpu(), rows + sums.rows_J.cpu(), hits + sums.hits_J.cpu()
    return {
        "checkpoint": checkpoint.folder.name,
        "loss": "soft_ce",
        "loss_per_step": (loss / rows.clamp_min(1)).tolist(),
        "supervised_rows_per_step": [int(n) for n in rows.tolist()],
        "accuracy_per_step": (hits / rows.clamp_min(1)).tolist(),
    }
