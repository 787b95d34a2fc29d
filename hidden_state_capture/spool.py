"""The capture's side of the spool (core/spool.py): shard after shard, while training uses and frees them."""

import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from draftsmith.core.atomic import remove_leftovers, write_json
from draftsmith.core.config import Config
from draftsmith.core.errors import StageFailed, UserError
from draftsmith.core.lineage import check_upstream
from draftsmith.core.manifest import read_manifest, require_manifest
from draftsmith.core.progress import Meter, meter, say
from draftsmith.core.run import RunFolder
from draftsmith.core.samples import TrainSamples
from draftsmith.core.spool import (
    CAPTURE,
    POLL_SECONDS,
    TRAINER,
    SpoolPlan,
    SpoolShard,
    held,
    is_alive,
    made_from,
    read_json,
    spool_inputs,
)
from draftsmith.core.store import shard_name
from draftsmith.core.target import Target, resolve_target
from draftsmith.data.batching import spool_plan
from draftsmith.hidden_state_capture.driver import capture_spool
from draftsmith.hidden_state_capture.shard import committed_shards
from draftsmith.hidden_state_capture.writer import FAILURE

Prefill = Callable[[Config, Target, list[int], TrainSamples, "ShardQueue"], None]


def feed_training(config: Config, prefill: Prefill = capture_spool) -> None:
    """Capture for a training until it has everything; to be called in the engine's process.

    Args:
        config: of the run; its held-out samples are captured.
        prefill: captures what the queue gives (tests have states without an engine).

    Raises:
        UserError: another capture works on the spool, or it is too small.
        StageFailed: the engine failed, the training ended before its time, or too many states are unusable.
    """
    run, target = RunFolder.of(config), resolve_target(config.target)
    if read_manifest(run.checkpoints):
        say(f"spool: the training is done ({run.checkpoints}); nothing to capture")
        return
    states = require_manifest(run.hidden_states, "capture", "capture")
    check_upstream(config, run, target, states)
    folder, inputs = run.spool, spool_inputs(config, states)
    folder.mkdir(exist_ok=True)
    if is_alive(folder, CAPTURE):
        raise UserError(f"another capture works on {folder}.", "Wait for it to end, or end it.")
    write_json(folder / f"{CAPTURE}.json", {"inputs": inputs})
    with held(folder, CAPTURE):
        trainer = Trainer(folder)
        write_json(folder / f"{CAPTURE}.json", {"inputs": inputs, "session": trainer.session})
        samples = TrainSamples(run.samples, states["longest"])
        plan = spool_plan(samples, config, states, trainer.world_size)
        origin = made_from(inputs, trainer.world_size)
        todo = shards_to_make(folder, plan, origin, trainer.steps_done())
        if not todo:
            return
        queue = ShardQueue(config, plan, todo, origin, trainer)
        # Beside a training that started it, the capture leaves the terminal to the training.
        alone = config.capture.spool_capture == "own"
        with meter("hidden states", queue.total, "samples") if alone else nullcontext() as queue.shown:
            prefill(config, target, states["layer_ids"], samples, queue)


class Trainer:
    """The training that the spool feeds, seen from the capture; waits for it to come."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not is_alive(folder, TRAINER):
            say(f"spool: waiting for `draftsmith train` on {folder.parent}")
        while not is_alive(folder, TRAINER):
            time.sleep(POLL_SECONDS)
        self._state = self._read()
        self.session: str = self._state["session"]
        self.world_size: int = self._state["world_size"]
        self._looked = time.monotonic()

    def _read(self) -> dict[str, Any]:
        return read_json(self.folder / f"{TRAINER}.json") or {"session": None}

    def steps_done(self) -> int:
        """Optimizer steps that the training needs no more; looks at most every POLL_SECONDS.

        Raises:
            StageFailed: the training has ended.
        """
        if time.monotonic() - self._looked >= POLL_SECONDS:
            self._looked = time.monotonic()
            alive, state = is_alive(self.folder, TRAINER), self._read()
            if not alive or state["session"] != self.session:
                raise StageFailed(
                    f"the training has ended, at step {self._state['step']}, and the capture with it. Start it again "
                    "to go on."
                )
            self._state = state
        done: int = self._state["step"]
        return done


def shards_to_make(folder: Path, plan: SpoolPlan, origin: str, step: int) -> list[int]:
    """Keep what an earlier capture left and this training can use; the numbers of the shards that are still to be made.

    Args:
        folder: of the spool.
        plan: of the whole training.
        origin: fingerprint of the shards that fit (see `made_from`).
        step: the training goes on from this optimizer step.
    """
    remove_leftovers(folder)
    (folder / FAILURE).unlink(missing_ok=True)
    if step >= len(plan.steps):
        return []
    whole = {
        int(Path(s["shard"]["file"]).stem.split("-")[1])
        for s in committed_shards(folder)
        if s.get("made_from") == origin and _size(folder / s["shard"]["file"]) == s["shard"]["bytes"]
    }
    first = number = plan.shard_of(step).number
    while number in whole and plan.beside[number] <= first:
        number += 1
    kept = {shard_name(n) for n in range(first, number)}
    for path in sorted(folder.glob("shard-*")):  # .json before .safetensors: never a sidecar without its shard
        if path.with_suffix(".safetensors").name not in kept:
            path.unlink()
    return list(range(number, len(plan.shards)))


def _size(file: Path) -> int:
    return file.stat().st_size if file.is_file() else 0


class ShardQueue:
    """What is to be captured next: the samples of one shard after the other, each begun when there is room for it.

    Attributes:
        taken: samples given out.
        total: samples in all.
        shown: counts them, if set.
    """

    def __init__(self, config: Config, plan: SpoolPlan, todo: list[int], origin: str, trainer: Trainer) -> None:
        self.config, self.plan, self.trainer, self.folder = config, plan, trainer, trainer.folder
        self.total = sum(len(plan.samples(plan.shards[n])) for n in todo)
        self.taken = 0
        self.shown: Meter | None = None
        self._todo, self._origin = deque(todo), origin
        self._asked: deque[tuple[int, dict[str, Any]]] = deque()
        self._oldest = plan.shard_of(trainer.steps_done()).number
        self._waited = 0.0
        self._peak = 0
        self._judged = self._oldest
        self._rejected: Counter[str] = Counter()

    def take(self) -> tuple[int, dict[str, Any]] | None:
        """The next sample's number and slot; None while there is no room for its shard, and at the end."""
        if not self._asked and self._todo and self._has_room():
            self._begin(self.plan.shards[self._todo.popleft()])
        if not self._asked:
            return None
        self.taken += 1
        if self.shown:
            self.shown.advance()
        return self._asked.popleft()

    def wait(self) -> bool:
        """Sleep until `take` has something; False when everything was taken.

        Raises:
            StageFailed: the training has ended, or too many states are unusable.
        """
        while not self._asked:
            if not self._todo:
                return False
            began = time.monotonic()
            while not self._has_room():
                time.sleep(POLL_SECONDS)
            self._waited += time.monotonic() - began
            self._begin(self.plan.shards[self._todo.popleft()])
        return True

    def _has_room(self) -> bool:
        """Whether the training is done with all that does not fit beside the next shard; if so, that is deleted."""
        beside = self.plan.beside[self._todo[0]]
        if beside > self._oldest and self.trainer.steps_done() < self.plan.shards[beside - 1].end:
            return False
        self._judge()
        for number in range(self._oldest, beside):
            file = self.folder / shard_name(number)
            file.with_suffix(".json").unlink(missing_ok=True)
            file.unlink(missing_ok=True)
        self._oldest = max(self._oldest, beside)
        return True

    def _begin(self, shard: SpoolShard) -> None:
        numbers = self.plan.samples(shard)
        slot = {"shard": shard.number, "samples": len(numbers), "steps": [shard.first, shard.end]}
        self._asked.extend((n, {**slot, "made_from": self._origin}) for n in numbers)
        there = sum(s.nbytes for s in self.plan.shards[self._oldest : shard.number + 1])
        self._peak = max(self._peak, there)
        told = read_json(self.folder / f"{CAPTURE}.json") or {}
        figures = {"shard": shard.number, "bytes": there, "peak_bytes": self._peak, "waited_seconds": self._waited}
        write_json(self.folder / f"{CAPTURE}.json", {**told, "figures": figures})

    def _judge(self) -> None:
        """Stop where more states are unusable than an epoch may have; shards are looked at before they are deleted."""
        while sidecar := read_json((self.folder / shard_name(self._judged)).with_suffix(".json")):
            self._judged += 1
            for entry in sidecar["rejected"]:
                self._rejected[entry["sample_id"]] += 1
            if len(self._rejected) > self.config.capture.max_rejected_share * self.plan.num_samples:
                worst = sidecar["rejected"][-1]
                raise StageFailed(
                    f"{len(self._rejected)} of {self.plan.num_samples} samples have unusable states "
                    f"(capture.max_rejected_share is {self.config.capture.max_rejected_share:.1%}), e.g. "
                    f"{worst['sample_id']}: {worst['reason']}."
                )
