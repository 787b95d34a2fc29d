"""The training loop: one optimizer step a batch, the same on one process and on many."""

import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

import torch
from accelerate import Accelerator
from torch import Tensor

from draftsmith.core.config import Config
from draftsmith.core.errors import StageFailed
from draftsmith.core.objective import StepSums, step_weights, supervised_rows
from draftsmith.core.progress import Meter, meter, say
from draftsmith.core.replay import SampleRounds, acceptance, walk
from draftsmith.core.run import RunFolder
from draftsmith.core.vocab import VocabMapping
from draftsmith.data.batching import collate, plan_batches
from draftsmith.hidden_state_capture.reader import HiddenStateStore
from draftsmith.train.ahead import Ahead, Step, first_of
from draftsmith.train.average import Average
from draftsmith.train.clock import Clock
from draftsmith.train.engine import Engine
from draftsmith.train.feed import Feed
from draftsmith.train.metrics import Metrics
from draftsmith.train.noise import add_noise
from draftsmith.train.optim import learning_rate
from draftsmith.train.profiler import Window
from draftsmith.train.signals import Signals
from draftsmith.train.speed import Speed, speed_shown
from draftsmith.train.state import TrainState, save
from draftsmith.train.step import TrainingStep, Work
from draftsmith.train.writer import Writer


@dataclass
class Trainer:
    """What the loop works on.

    Attributes:
        engine: the draft and its optimizer, on the processes that train it.
        feed: this rank's batches, step by step, over all epochs.
        held_out: sample numbers of the held-out split.
        mapping: the draft's vocabulary.
        state: loop state; `state.step` optimizer steps are done.
        average: of the weights, where one is kept.
    """

    config: Config
    accelerator: Accelerator
    store: HiddenStateStore
    engine: Engine
    step: TrainingStep
    feed: Feed
    held_out: list[int]
    metrics: Metrics
    mapping: VocabMapping
    state: TrainState
    average: Average | None = None
    writer: Writer = field(default_factory=Writer)

    def __post_init__(self) -> None:
        self.clock = Clock(self.accelerator.device)
        if self.accelerator.num_processes > 1:
            self.step.entered = self.clock.split

    def run(self) -> bool:
        """Train to the end of the plan, evaluating and saving on the way; False where SIGTERM ended it before."""
        config, total = self.config.train, self.state.total_steps
        speed = Speed(self.config, self.accelerator, self.step.objective.draft.shape, self.clock, self.feed)
        profile = Window(config.profile_steps, RunFolder.of(self.config).profile, self.accelerator.process_index)
        with ExitStack() as stack:
            shown = stack.enter_context(meter("train", total, "steps", start=self.state.step))
            signals = stack.enter_context(Signals())
            stack.enter_context(self.writer)
            stack.callback(profile.close)
            for batches in self._batches(self.state.step):
                profile.begins(self.state.step + 1)
                sums, rows, norm, (end, save_now) = self._optimizer_step(batches, signals.take())
                self._count_step()
                speed.count(batches.works)
                step, last = self.state.step, self.state.step == total
                profile.ended(step)
                if step % config.log_interval == 0 or last:
                    self._log(shown, sums, rows, norm, speed.take())
                if last:
                    self._check_something_was_learned()
                best = (step % config.eval_interval == 0 or last) and self._evaluate()
                if step % config.save_interval == 0 or best or last or end or save_now:
                    save(self)
                shown.advance()
                if end and not last:
                    return False
        return True

    def _count_step(self) -> None:
        self.state.step += 1
        each = self.config.train.grad_accum_steps
        for batches in range((self.state.step - 1) * each + 1, self.state.step * each + 1):
            if rejected := self.feed.done(batches):
                self.metrics.log(self.state.step, rejected_samples=rejected)

    def _check_something_was_learned(self) -> None:
        """Before the last checkpoint, which says that training is done."""
        skipped = self.state.skipped
        if skipped == self.state.step:
            raise StageFailed("no step was taken: no gradient was finite. Capture again, or lower train.learning_rate.")
        if skipped:
            say(f"warning: {skipped} steps were not taken, their gradients not being finite (see metrics.jsonl)")

    def _batches(self, start: int) -> Iterator[Step]:
        """The batches of every step from `start`, the next ones read and laid out while these are worked on."""
        steps = range(start, self.state.total_steps)
        with Ahead(self.accelerator.device) as ahead, ThreadPoolExecutor(1, "read-batches") as pool, self.feed:
            coming = pool.submit(self._works, start) if steps else None
            if coming:
                ahead.begin(partial(first_of, coming))
            for step in steps:
                assert coming is not None
                began = time.monotonic()
                try:
                    works = coming.result()
                except StageFailed:  # a spool's capture has ended: what was learned is kept
                    if step > start:
                        save(self)
                    raise
                self.feed.waited += time.monotonic() - began
                coming = pool.submit(self._works, step + 1) if step + 1 in steps else None
                yield Step(works, ahead, coming)

    def _works(self, step: int) -> list[Work]:
        each = self.config.train.grad_accum_steps
        return [self._work(step * each + i, step) for i in range(each)]

    def _work(self, number: int, step: int) -> Work:
        try:
            return self.step.lay_out(self.feed.batch(number), step / self.state.total_steps)
        except Exception as error:
            error.add_note(f"Raised by the batch of step {step + 1}: {', '.join(self.feed.names(number))}")
            raise

    def _optimizer_step(
        self, batches: Step, asked: tuple[bool, bool]
    ) -> tuple[StepSums, Tensor, float, tuple[bool, bool]]:
        """Sums and rows of the step, the gradient's norm, and what any rank's scheduler asked for."""
        config, accelerator, works = self.config.train, self.accelerator, batches.works
        for group in self.engine.optimizer.param_groups:
            group["lr"] = learning_rate(config, self.state.step, self.state.total_steps)
        own = torch.stack([supervised_rows(work.batch, config.ttt_steps) for work in works]).sum(0)
        with self.clock.part("communication"):
            told = accelerator.reduce(torch.cat([own, torch.tensor(asked, dtype=own.dtype)]).to(accelerator.device))
        rows_J = told[:-2]
        # Gradients are averaged over ranks, and the loss is a sum over them.
        weights_J = step_weights(rows_J, config.step_decay) * accelerator.num_processes
        parts = []
        for i in range(len(works)):
            with self.engine.batch(last=i + 1 == len(works)):
                parts.append(self._backward(batches, i, weights_J))
        with self.clock.part("optimizer"):
            norm = self.engine.take_step(config.max_grad_norm)
        if math.isfinite(norm):
            self.state.skipped_in_a_row = 0
            if self.average:
                self.average.update()
        else:
            self._skip([name for work in works for name in work.batch.sample_ids], norm)
        figures = zip(*((p.loss_J, p.rows_J, p.hits_J) for p in parts), strict=True)
        sums = StepSums(*(torch.stack(part).sum(0) for part in figures))
        end, save_now = (told[-2:] > 0).tolist()
        return sums, rows_J, norm, (end, save_now)

    def _backward(self, batches: Step, number: int, weights_J: Tensor) -> StepSums:
        """Add the next batch's part of the step's gradient, and keep nothing of the batch."""
        config, accelerator = self.config.train, self.accelerator
        # The same number however a step's batches are spread over processes.
        of_all = (self.state.step * config.grad_accum_steps + number) * accelerator.num_processes
        with self.clock.part("data"):
            work = batches.take()
            noisy = add_noise(work.batch, config, self.config.run.seed, of_all + accelerator.process_index)
            work = replace(work, batch=noisy)
        with self.clock.part("forward"), self.engine.autocast():
            loss, sums = self.engine.module(work, weights_J)
        with self.clock.part("backward"):
            self.engine.backward(loss)
        return sums  # type: ignore[no-any-return]

    def _skip(self, sample_ids: list[str], norm: float) -> None:
        """A step whose gradient is not finite is not taken, but never silently."""
        self.state.skipped_in_a_row += 1
        self.state.skipped += 1
        self.metrics.log(self.state.step + 1, skipped_step=1, grad_norm=str(norm), sample_ids=sample_ids)
        if self.state.skipped_in_a_row >= self.config.train.max_skipped_steps:
            raise StageFailed(
                f"the gradient was not finite in {self.state.skipped_in_a_row} steps in a row, last at step "
                f"{self.state.step + 1} (samples {', '.join(sample_ids[:3])}, ...); lower train.learning_rate."
            )

    def _log(self, shown: Meter, sums: StepSums, rows_J: Tensor, norm: float, speed: dict[str, float]) -> None:
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
            eta_seconds=(self.state.total_steps - self.state.step) * speed["step_seconds"],
            **speed,
            **self.feed.figures(),
        )
        shown.figures(loss=f"{loss:.3f}", acc=" ".join(f"{a:.2f}" for a in accuracy), **speed_shown(speed))

    def _evaluate(self) -> bool:
        """Replay the held-out samples (every rank does the same small work); whether the draft is the best so far."""
        if not self.held_out:
            return False
        with self.average.in_place() if self.average else nullcontext(), self.engine.evaluating():
            replayed = torch.tensor(self._replay(), dtype=torch.float64, device=self.accelerator.device)
        # One figure for all ranks: they must agree on whether to save.
        length = float(self.accelerator.reduce(replayed) / self.accelerator.num_processes)
        before = self.state.best
        if before and length <= before["acceptance_length"]:
            return False
        self.state.best = {"step": self.state.step, "acceptance_length": length}
        return True

    def _replay(self) -> float:
        """Acceptance length of the held-out samples; what else came out is logged."""
        config, steps = self.config.train, self.config.train.ttt_steps
        rounds: list[SampleRounds] = []
        totals = torch.zeros(3, steps)
        lengths = self.store.lengths(self.held_out)
        for batch_numbers in plan_batches(lengths, config.tokens_per_batch):
            batch = collate(self.store, [self.held_out[i] for i in batch_numbers])
            work = self.step.lay_out(batch).to(self.accelerator.device)
            with self.engine.autocast():
                leading, sums = self.engine.module(work)
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
        return float(cast(float, figures["acceptance_length"]))
