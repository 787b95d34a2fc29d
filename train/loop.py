"""The training loop: one optimizer step a batch, the same on one process and on many."""

import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from accelerate import Accelerator
from torch import Tensor

from draftsmith.core.batch import Batch
from draftsmith.core.config import Config
from draftsmith.core.errors import StageFailed
from draftsmith.core.objective import StepSums, step_weights, supervised_rows
from draftsmith.core.progress import Meter, meter, say
from draftsmith.core.replay import SampleRounds, acceptance, walk
from draftsmith.data.batching import collate, plan_batches
from draftsmith.hidden_state_capture.reader import HiddenStateStore
from draftsmith.train.feed import Feed
from draftsmith.train.metrics import Metrics
from draftsmith.train.noise import add_noise
from draftsmith.train.optim import learning_rate
from draftsmith.train.state import TrainState, save
from draftsmith.train.step import TrainingStep, Work


@dataclass
class Trainer:
    """What the loop works on.

    Attributes:
        module: the training step as Accelerate prepared it; `step` is the module itself.
        feed: this rank's batches, step by step, over all epochs.
        held_out: sample numbers of the held-out split.
        state: loop state; `state.step` optimizer steps are done.
        skipped: steps of this process that were not taken.
    """

    config: Config
    accelerator: Accelerator
    store: HiddenStateStore
    module: torch.nn.Module
    step: TrainingStep
    optimizer: torch.optim.Optimizer
    feed: Feed
    held_out: list[int]
    metrics: Metrics
    state: TrainState
    skipped: int = 0

    def run(self) -> None:
        """Train to the end of the plan, evaluating and saving on the way."""
        config, total = self.config.train, self.state.total_steps
        tokens, since = 0, time.monotonic()
        with meter("train", total, "steps", start=self.state.step) as shown:
            for work in self._batches(self.state.step):
                sums, rows, norm = self._optimizer_step(work)
                self.state.step += 1
                if rejected := self.feed.done(self.state.step):
                    self.metrics.log(self.state.step, rejected_samples=rejected)
                tokens += work.batch.num_tokens * self.accelerator.num_processes
                step, last = self.state.step, self.state.step == total
                if step % config.log_interval == 0 or last:
                    now = time.monotonic()
                    self._log(shown, sums, rows, norm, tokens / (now - since))
                    tokens, since = 0, now
                if step % config.eval_interval == 0 or last:
                    self._evaluate()
                if step % config.save_interval == 0 or last:
                    save(self)
                shown.advance()
        if self.skipped:
            say(f"warning: {self.skipped} steps were not taken, their gradients not being finite (see metrics.jsonl)")
        if self.skipped and self.skipped == self.state.step:
            raise StageFailed("no step was taken: no gradient was finite. Capture again, or lower train.learning_rate.")

    def _batches(self, start: int) -> Iterator[Work]:
        """The plan's batches from step `start`, the next one read and laid out while this one is worked on."""
        with ThreadPoolExecutor(1) as pool, self.feed:
            coming = pool.submit(self._work, start) if start < self.state.total_steps else None
            for step in range(start, self.state.total_steps):
                assert coming is not None
                began = time.monotonic()
                work = coming.result()
                self.feed.waited += time.monotonic() - began
                if step + 1 < self.state.total_steps:
                    coming = pool.submit(self._work, step + 1)
                yield work.to(self.accelerator.device)

    def _work(self, step: int) -> Work:
        return self.step.lay_out(self.feed.batch(step))

    def _optimizer_step(self, work: Work) -> tuple[StepSums, Tensor, float]:
        config, accelerator = self.config.train, self.accelerator
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(config, self.state.step, self.state.total_steps)
        noise = (config, self.config.run.seed, self.state.step, accelerator.process_index)
        work = replace(work, batch=add_noise(work.batch, *noise))
        rows_J = accelerator.reduce(supervised_rows(work.batch, config.ttt_steps))
        # Gradients are averaged over ranks, and the loss is a sum over them.
        weights_J = step_weights(rows_J, config.step_decay) * accelerator.num_processes
        with accelerator.autocast():
            loss, sums = self.module(work, weights_J)
        accelerator.backward(loss)
        norm = float(accelerator.clip_grad_norm_(self.step.objective.draft.parameters(), config.max_grad_norm))
        if math.isfinite(norm):
            self.optimizer.step()
            self.state.skipped_in_a_row = 0
        else:
            self._skip(work.batch, norm)
        self.optimizer.zero_grad()
        return sums, rows_J, norm

    def _skip(self, batch: Batch, norm: float) -> None:
        """A step whose gradient is not finite is not taken, but never silently."""
        self.state.skipped_in_a_row += 1
        self.skipped += 1
        self.metrics.log(self.state.step + 1, skipped_step=1, grad_norm=str(norm), sample_ids=list(batch.sample_ids))
        if self.state.skipped_in_a_row >= self.config.train.max_skipped_steps:
            raise StageFailed(
                f"the gradient was not finite in {self.state.skipped_in_a_row} steps in a row, last at step "
                f"{self.state.step + 1} (samples {', '.join(batch.sample_ids[:3])}, ...); lower train.learning_rate."
            )

    def _log(self, shown: Meter, sums: StepSums, rows_J: Tensor, norm: float, rate: float) -> None:
        config = self.config.train
        loss_J = self.accelerator.reduce(sums.loss_J) / rows_J.clamp_min(1)
        hits_J = self.accelerator.reduce(sums.hits_J) / rows_J.clamp_min(1)
        loss = float(sum(config.step_decay**j * x for j, x in enumerate(loss_J.tolist())))
        accuracy = hits_J.tolist()
        self.metrics.log(
            self.state.step,
            loss=loss,
            loss_per_step=loss_J.tolist(),
            accuracy_per_step=accuracy,
            learning_rate=learning_rate(config, self.state.step - 1, self.state.total_steps),
            grad_norm=norm if math.isfinite(norm) else None,
            tokens_per_second=rate,
            **self.feed.figures(),
        )
        figures = {
            "loss": f"{loss:.3f}",
            "acc": " ".join(f"{a:.2f}" for a in accuracy),
            "tok/s": f"{rate:,.0f}",
        }
        shown.figures(**figures)

    def _evaluate(self) -> None:
        """Replay the held-out samples with the draft as it is (every rank does the same small work)."""
        if not self.held_out:
            return
        config, steps = self.config.train, self.config.train.ttt_steps
        rounds: list[SampleRounds] = []
        totals = torch.zeros(3, steps)
        lengths = self.store.lengths(self.held_out)
        for batch_numbers in plan_batches(lengths, config.tokens_per_batch):
            batch = collate(self.store, [self.held_out[i] for i in batch_numbers])
            work = self.step.lay_out(batch).to(self.accelerator.device)
            with self.accelerator.autocast():
                leading, sums = self.step.matches(work)
            rounds += walk(work.batch, leading, steps)
            totals += torch.stack([sums.loss_J, sums.rows_J, sums.hits_J])
        rows = totals[1].clamp_min(1)
        figures = acceptance(rounds, steps)
        self.metrics.log(
            self.state.step,
            eval_loss_per_step=(totals[0] / rows).tolist(),
            eval_accuracy_per_step=(totals[2] / rows).tolist(),
            eval_acceptance_length=figures["acceptance_length"],
            eval_per_position=figures["per_position"],
        )
