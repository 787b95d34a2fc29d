"""Where training's batches come from: the store, or the spool that a capture fills meanwhile (core/spool.py)."""

import os
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from draftsmith.core.atomic import remove, write_json
from draftsmith.core.batch import Batch
from draftsmith.core.config import Config
from draftsmith.core.errors import StageFailed, UserError
from draftsmith.core.manifest import differences, read_manifest
from draftsmith.core.progress import say
from draftsmith.core.run import RunFolder
from draftsmith.core.samples import TrainSamples
from draftsmith.core.spool import (
    CAPTURE,
    POLL_SECONDS,
    TRAINER,
    SpoolShard,
    folder_bytes,
    held,
    is_alive,
    made_from,
    read_json,
    spool_inputs,
)
from draftsmith.core.store import shard_name
from draftsmith.data.batching import collate, plan_steps, spool_plan
from draftsmith.hidden_state_capture.reader import HiddenStateStore

# A wait is told once it has lasted this long; an ended capture has this long to say why.
_TELL_SECONDS, _REASON_SECONDS = 10.0, 5.0


def nothing_to_check() -> None:
    """Nobody captures beside this training."""


class Feed:
    """Batches of one rank out of the store.

    Attributes:
        plan: sample numbers of every optimizer step of this rank, over all epochs.
        waited: seconds that training had no batch to work on.
    """

    waited = 0.0

    def __init__(self, store: HiddenStateStore, config: Config, rank: int, world_size: int) -> None:
        self.store = store
        if (numbers := store.numbers("train")) and not any(store.index[n]["supervised_tokens"] for n in numbers):
            raise UserError(
                f"no training sample of {store.folder} has a reply token: there is nothing to learn.",
                "Run `draftsmith prepare --fresh`; `draftsmith data show` prints what is supervised.",
            )
        self.plan = training_plan(store, config, rank, world_size)

    def __enter__(self) -> None:
        """Batches will be asked for."""

    def __exit__(self, *error: object) -> None:
        """None will be asked for any more; a wait that is under way ends."""

    def start(self, step: int) -> None:
        """Training goes on from an optimizer step."""

    def batch(self, step: int) -> Batch:
        """This rank's batch of an optimizer step; may be called from another thread.

        The system reads the next one's states from the disk meanwhile: one batch is in memory, one on its way there.
        """
        if step + 1 < len(self.plan):
            self.store.will_need(self.plan[step + 1])
        return collate(self.store, self.plan[step])

    def names(self, step: int) -> list[str]:
        """Ids of the samples of a step."""
        return [self.store.index[n]["sample_id"] for n in self.plan[step]]

    def done(self, steps: int) -> list[dict[str, str]]:
        """So many optimizer steps have been taken; samples, on any rank, that the last of them had no states of."""
        return []

    def figures(self) -> dict[str, float]:
        """To be logged."""
        return {"data_wait_seconds": self.waited}

    def close(self, finished: bool) -> None:
        """Training has ended."""


class SpoolFeed(Feed):
    """Batches of one rank out of the spool; rank 0 tells the capture how far training is."""

    def __init__(
        self, store: HiddenStateStore, config: Config, rank: int, world_size: int, check: Callable[[], None]
    ) -> None:
        """Plan everything; nothing is waited for.

        Args:
            store: the held-out samples.
            config: of the run.
            rank: of this process.
            world_size: processes that train.
            check: raises what ended the capture.

        Raises:
            UserError: the spool cannot hold two shards.
        """
        run = RunFolder.of(config)
        self.store, self.folder, self.check = store, run.spool, check
        self.inputs = spool_inputs(config, store.manifest)
        self._origin = made_from(self.inputs, world_size)
        self._ids = (samples := TrainSamples(run.samples, store.manifest["longest"])).ids
        self._plan = spool_plan(samples, config, store.manifest, world_size)
        self.plan = [shares[rank] for shares in self._plan.steps]
        self._leads, self._session = rank == 0, {"session": uuid.uuid4().hex, "world_size": world_size}
        self._open: tuple[int, HiddenStateStore, dict[str, int]] | None = None
        self._missing: dict[int, list[dict[str, str]]] = {}
        self._num_missing = 0
        self._capture_seen = False
        self._stop = threading.Event()
        self._held = ExitStack()

    def __exit__(self, *error: object) -> None:
        self._stop.set()

    def start(self, step: int) -> None:
        """Let the capture begin with what step `step` needs."""
        if self._leads:
            self.folder.mkdir(exist_ok=True)
            self._tell(step)
            self._held.enter_context(held(self.folder, TRAINER))

    def batch(self, step: int) -> Batch:
        """Wait for the shard of the step, and read this rank's samples."""
        shard = self._plan.shard_of(step)
        if self._open is None or self._open[0] != shard.number:
            self._open = (shard.number, *self._take(shard))
        _, states, numbers = self._open
        return collate(states, [numbers[name] for name in self.names(step) if name in numbers])

    def names(self, step: int) -> list[str]:
        """Ids of the samples of a step, those included that have no states."""
        return [self._ids[n] for n in self.plan[step]]

    def done(self, steps: int) -> list[dict[str, str]]:
        """Let the capture have the room of a shard whose last step was taken."""
        if self._leads and steps == self._plan.shard_of(steps - 1).end:
            self._tell(steps)
        missing = self._missing.pop(steps - 1, [])
        self._num_missing += len(missing)
        return missing

    def figures(self) -> dict[str, float]:
        """Of rank 0: seconds that either side waited for the other, and bytes in flight."""
        if not self._leads:
            return {}
        told = (read_json(self.folder / f"{CAPTURE}.json") or {}).get("figures", {})
        return {
            "data_wait_seconds": self.waited,
            "capture_wait_seconds": told.get("waited_seconds", 0.0),
            "spool_bytes": folder_bytes(self.folder),
            "spool_peak_bytes": told.get("peak_bytes", 0),
        }

    def close(self, finished: bool) -> None:
        """Let go of the spool; after the last step it is deleted."""
        self._stop.set()
        if self._leads and finished:
            self._report()
            give_up = time.monotonic() + _REASON_SECONDS
            while is_alive(self.folder, CAPTURE) and time.monotonic() < give_up:
                time.sleep(POLL_SECONDS)
            remove(self.folder)
        self._held.close()

    def _report(self) -> None:
        seen = self.figures()
        say(
            f"spool: training waited {seen['data_wait_seconds']:.0f} s for states, capture "
            f"{seen['capture_wait_seconds']:.0f} s for room; {seen['spool_peak_bytes'] / 1e6:,.0f} MB at most"
        )
        if self._num_missing:
            say(f"warning: {self._num_missing} samples were missing, their states unusable (see metrics.jsonl)")

    def _tell(self, step: int) -> None:
        write_json(self.folder / f"{TRAINER}.json", {**self._session, "step": step})

    def _take(self, shard: SpoolShard) -> tuple[HiddenStateStore, dict[str, int]]:
        """Open a shard, once it is whole."""
        sidecar = self._wait_for(self.folder / f"{Path(shard_name(shard.number)).stem}.json")
        planned = sorted(self._ids[n] for n in self._plan.samples(shard))
        assert planned == sorted(e["sample_id"] for e in [*sidecar["rows"], *sidecar["rejected"]]), "lost or repeated"
        ids = {entry["sample_id"]: entry for entry in sidecar["rejected"]}
        for step in range(shard.first, shard.end) if ids else ():
            in_step = [self._ids[n] for share in self._plan.steps[step] for n in share]
            self._missing[step] = [ids[name] for name in in_step if name in ids]
        rows = [{**row, "shard": 0} for row in sidecar["rows"]]
        states = HiddenStateStore.of_shard(self.folder, self.store.manifest, sidecar["shard"], rows)
        return states, {row["sample_id"]: i for i, row in enumerate(rows)}

    def _wait_for(self, path: Path) -> dict[str, Any]:
        """Sleep until the capture has committed a shard.

        Raises:
            UserError: the capture that runs was started with another config.
            StageFailed: it has ended.
        """
        began, told = time.monotonic(), False
        while not (found := self._whole(path)):
            self.check()
            if is_alive(self.folder, CAPTURE):
                if not self._capture_seen:
                    self._compare()
                self._capture_seen = True
            elif self._capture_seen or self._was_begun():
                self._explain(path)
            if not told and time.monotonic() - began > _TELL_SECONDS:
                say(
                    f"spool: training waits for {path.stem}"
                    + ("" if self._capture_seen else "; the capture is not there yet")
                )
                told = True
            if self._stop.wait(POLL_SECONDS):
                raise StageFailed("training has ended.")
        return found

    def _whole(self, path: Path) -> dict[str, Any] | None:
        """The sidecar of a shard, unless that was made from something else or is cut: the capture makes it again."""
        found = read_json(path)
        if found is None or found.get("made_from") != self._origin:
            return None
        file = self.folder / found["shard"]["file"]
        size = file.stat().st_size if file.is_file() else 0
        return found if size == found["shard"]["bytes"] else None

    def _was_begun(self) -> bool:
        """Whether a capture has begun for this training, and be it in a moment when nobody looked."""
        there = (read_json(self.folder / f"{CAPTURE}.json") or {}).get("session")
        ours = self._session if self._leads else read_json(self.folder / f"{TRAINER}.json") or {}
        return there is not None and there == ours.get("session")

    def _compare(self) -> None:
        there = read_json(self.folder / f"{CAPTURE}.json") or {"inputs": {}}
        if found := differences(there["inputs"], self.inputs, "there", "here"):
            raise UserError(
                f"the capture that runs on {self.folder} has other settings: " + "; ".join(found) + ".",
                "Start both with the same config.",
            )

    def _explain(self, path: Path) -> None:
        """The capture is gone: either it has committed the shard in its last moment, or we say what ended it."""
        give_up = time.monotonic() + _REASON_SECONDS
        while time.monotonic() < give_up:
            self.check()
            if self._whole(path) or self._stop.wait(POLL_SECONDS):
                return
        raise StageFailed(
            f"the capture has ended without {path.stem}, and training with it. Its own messages say why; start both "
            "again to go on."
        )


def open_feed(
    store: HiddenStateStore, config: Config, rank: int, world_size: int, check: Callable[[], None] = nothing_to_check
) -> Feed:
    """The feed that `capture.mode` asks for."""
    if config.capture.mode == "spool":
        return SpoolFeed(store, config, rank, world_size, check)
    return Feed(store, config, rank, world_size)


def open_store(config: Config, check: Callable[[], None] = nothing_to_check) -> HiddenStateStore:
    """The hidden states of a run; in spool mode the held-out ones, which another process may be about to finish.

    Raises:
        UserError: capture has not been run.
    """
    folder = RunFolder.of(config).hidden_states
    others = config.capture.spool_capture == "own" or os.environ.get("RANK", "0") != "0"
    if config.capture.mode == "spool" and others and not read_manifest(folder):
        say(f"spool: waiting for the held-out samples' states in {folder} (`draftsmith capture`)")
        while not read_manifest(folder):
            time.sleep(POLL_SECONDS)
    return HiddenStateStore(folder, "train")


def training_plan(store: HiddenStateStore, config: Config, rank: int, world_size: int) -> list[list[int]]:
    """Sample numbers of every optimizer step of one rank, over all epochs; only config and store decide it."""
    numbers = store.numbers("train")
    steps = plan_steps(store.lengths(numbers), config, world_size)
    return [[numbers[i] for i in shares[rank]] for shares in steps]
