"""TorchSpec's log as our progress and `metrics.jsonl`, and whether it does what it was told to."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import cast

from draftsmith.core.errors import StageFailed
from draftsmith.core.progress import Meter, meter, say
from draftsmith.train.figures import Figures
from draftsmith.train.torchspec.log import Event, events
from draftsmith.train.torchspec.plan import Plan

_LAST_LINES = 200
_SHOWN = {"loss": "loss", "acc": "acc", "acc_len": "accepted", "thru": "samples/s in", "pool": "pool"}


class Follower:
    """Takes line after line.

    Attributes:
        step: optimizer steps done.
        completed: TorchSpec said that it has come to its end.
    """

    def __init__(self, plan: Plan, done: int) -> None:
        """Begin at a step.

        Args:
            plan: what was started.
            done: optimizer steps of an earlier run.
        """
        self.plan, self.step, self.completed = plan, done, False
        self._figures = Figures(plan.run.metrics, done)
        self._cached, self._loaded = set[str](), False
        self._last, self._moved = deque[str](maxlen=_LAST_LINES), time.monotonic()
        self._stack, self._meter = ExitStack(), cast(Meter | None, None)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Progress for the length of the block."""
        with ExitStack() as self._stack:
            yield

    def take(self, line: str | None) -> None:
        """One line of the log; None where there is none yet.

        Raises:
            StageFailed: it does something else than it was told to, or nothing for too long.
        """
        if line is None:
            self._check_moves()
            return
        self._last.append(line)
        if self._meter is None:
            self._moved = time.monotonic()  # starting up: every line is progress
        for event in events(line):
            self._act(event)

    def _act(self, event: Event) -> None:
        match event.kind:
            case "progress":
                self._advance(event.step, event.total, event)
            case "scalars" | "eval":
                if event.kind == "scalars":
                    self._check_started()
                    self._advance(event.step, self.plan.steps, None)
                self._figures.log(event.step, event.values)
            case "cached":
                self._cached.add(event.text)
            case "started_from":
                self._loaded = True
            case "saved":
                say(f"torchspec: saved {event.text}")
            case "not_cached":
                raise StageFailed(
                    f"TorchSpec tokenises the rows itself and not with our token ids (it looked for {event.text}): "
                    "it is not the version that draftsmith knows (requirements/torchspec.txt)."
                )
            case "not_loaded":
                raise StageFailed(f"TorchSpec goes on without what it was told to load: {event.text}")
            case "completed":
                self.completed = True

    def _check_started(self) -> None:
        """Before the first step counts: rows and weights are the ones that were given."""
        rows = [self.plan.files.rows, self.plan.files.eval_rows]
        if len(self._cached) < sum(r is not None for r in rows):
            raise StageFailed("TorchSpec trains without having read our token ids; see requirements/torchspec.txt.")
        if not self._loaded:
            raise StageFailed(f"TorchSpec trains without having loaded the draft from {self.plan.files.start}.")

    def _advance(self, step: int, total: int, event: Event | None) -> None:
        if self._meter is None:
            self._meter = self._stack.enter_context(meter("train", self.plan.steps, "steps", start=self.step))
            if total != self.plan.steps:
                say(f"warning: TorchSpec plans {total} steps, draftsmith {self.plan.steps}")
        if event is not None:
            self._meter.figures(**{name: event.values[key] for key, name in _SHOWN.items() if key in event.values})
        if step > self.step:
            self._meter.advance(step - self.step)
            self.step, self._moved = step, time.monotonic()

    def _check_moves(self) -> None:
        limit = self.plan.config.train.torchspec.stall_seconds
        if time.monotonic() - self._moved > limit:
            raise StageFailed(
                f"TorchSpec made no step for {limit:g} s (step {self.step}): {self.reason()}. Its log: "
                f"{self.plan.folder / 'log.txt'}."
            )

    def reason(self) -> str:
        """The last line that looks like one."""
        errors = [x for x in self._last if any(sign in x for sign in ("Error", "ERROR", "Exception", "draftsmith:"))]
        return (errors or list(self._last) or ["it said nothing"])[-1].strip().rstrip(".")
