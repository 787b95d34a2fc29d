"""Packs samples into shards on threads of its own; a shard is on disk whole, with its index rows, or not at all.

Every thread fills a shard of its own (`shard.py`), so hashing and writing run side by side: one thread writes and
hashes about a gigabyte a second. Threads beyond the first start only when batches pile up.
"""

import errno
import itertools
import json
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.core.atomic import write_atomic, write_text
from draftsmith.hidden_state_capture.gather import Batch, SampleRows, store_rows
from draftsmith.hidden_state_capture.shard import OpenShard, Tail

# Why the writer failed, for whoever drives an engine that died of it.
FAILURE = "failure.json"
# What the connector was told and found, for a driver that did not start its engine.
CONNECTOR = "connector.json"
_MOST_FULL = 8  # shards of one thread that wait to be sealed
_TRIES, _WAIT = 20, 0.05  # of leaving the reason on a full disk; seconds


@dataclass(frozen=True)
class WriterConfig:
    """How a writer writes.

    Attributes:
        shard_bytes: shards are sealed when they reach this size.
        pending_bytes: bytes in flight before `put` waits.
        storage: `capture.storage`.
        threads: at most so many shards are filled at once.
        first, step: its shards are numbered first, first + step, ...: several writers fill one folder.
        max_rejected: more rejected samples than this stop the run.
        seal_after: seconds without a sample after which open shards are sealed; None: only `flush` does.
    """

    shard_bytes: int
    pending_bytes: int
    storage: str = "bf16"
    threads: int = 1
    first: int = 0
    step: int = 1
    max_rejected: int | None = None
    seal_after: float | None = None


@dataclass
class SampleStates:
    """One sample whose states are on the host already.

    Attributes:
        sample_id: whose states these are.
        input_ids: T token ids.
        loss_spans: [start, end) of every reply.
        states_TSH: [T, A + 1, H], the last column being the state before the final norm.
        ready: blocks until `states_TSH` has been filled.
        save_to: write this sample alone to a file instead of into a shard (the probe).
        slot: its place in a spool (see `SpoolWriter`).
    """

    sample_id: str
    input_ids: list[int]
    loss_spans: list[list[int]]
    states_TSH: Tensor
    ready: Callable[[], object]
    save_to: str | None = None
    slot: dict[str, Any] | None = None

    def batch(self, storage: str) -> Batch:
        """As a batch of one."""
        rows = SampleRows.of(self.sample_id, self.input_ids, self.loss_spans, self.save_to, self.slot)

        def collect() -> dict[str, Tensor]:
            self.ready()
            tokens = len(self.states_TSH)
            if tokens != len(self.input_ids):
                raise RuntimeError(f"sample {self.sample_id}: {tokens} state rows for {len(self.input_ids)} tokens")
            kind = "bf16" if self.save_to else storage
            return store_rows(self.states_TSH[None], torch.arange(tokens), torch.from_numpy(rows.last_rows_M), kind)

        return Batch([rows], self.states_TSH.nbytes, collect, bool)


@dataclass
class _Flush:
    """Met by every thread and by whoever waits for them."""

    barrier: threading.Barrier


@dataclass
class Lane:
    """What one thread is filling.

    Attributes:
        shard: takes the next sample.
        full: shards to be sealed, and how; not before the batch's memory is given back, for which the engine may wait.
    """

    shard: OpenShard | None = None
    full: deque[tuple[OpenShard, dict[str, Any]]] = field(default_factory=deque)


class ShardWriter:
    """One producer: `put` until done, then `flush`."""

    def __init__(self, folder: Path, config: WriterConfig) -> None:
        self.folder, self.config = folder, config
        folder.mkdir(parents=True, exist_ok=True)
        self.written = 0
        self.rejected: list[dict[str, str]] = []
        self._numbers = itertools.count(config.first, config.step)
        self._queue: queue.Queue[Batch | _Flush] = queue.Queue()
        self._threads: list[threading.Thread] = []
        self._tails: deque[Tail] = deque()  # host memory that no open shard uses, for any thread's next
        self._pending = self._at_work = 0
        self._change = threading.Condition()
        self._error: BaseException | None = None
        self._told = threading.Event()  # its reason is in FAILURE, or cannot be
        self._start_thread()

    def put(self, given: Batch | SampleStates) -> None:
        """Queue samples; waits while `pending_bytes` are in flight.

        Raises:
            RuntimeError: the writer has failed; the message is its reason.
        """
        batch = given if isinstance(given, Batch) else given.batch(self.config.storage)
        with self._change:
            self._change.wait_for(
                lambda: self._error or self._pending == 0 or self._pending + batch.nbytes <= self.config.pending_bytes
            )
            self._pending += batch.nbytes
        self.check()  # not in the block: it waits for the thread that has failed
        self._queue.put(batch)
        if self._queue.qsize() > len(self._threads) and len(self._threads) < self.config.threads:
            self._start_thread()

    def flush(self) -> None:
        """Wait until everything queued is on disk, the open shards included."""
        flush = _Flush(threading.Barrier(len(self._threads) + 1))
        for _ in self._threads:
            self._queue.put(flush)
        flush.barrier.wait()
        self.check()

    def check(self) -> None:
        """Raise the writer's error, if it has failed, once no thread is at work any more: another writer may follow."""
        if self._error is not None:
            with self._change:
                self._change.wait_for(lambda: self._at_work == 0)
            self._told.wait(2 * _TRIES * _WAIT)  # the engine may die of this, and its driver looks for the reason
            raise RuntimeError(f"hidden-state writer: {self._error}") from self._error

    def _start_thread(self) -> None:
        name = f"draftsmith-writer-{len(self._threads)}"
        self._threads.append(threading.Thread(target=self._run, name=name, daemon=True))
        self._threads[-1].start()

    def _run(self) -> None:
        lane = Lane()
        while True:
            try:
                item = self._queue.get(timeout=self.config.seal_after)
            except queue.Empty:
                self._guarded(lane, lambda: self._seal(lane))
                continue
            if isinstance(item, _Flush):
                self._guarded(lane, lambda: self._seal(lane))
                item.barrier.wait()
                continue
            self._guarded(lane, lambda item=item: self._add(lane, item))  # type: ignore[misc]
            item.release()
            nbytes = item.nbytes
            del item  # with memory that it has of its own
            with self._change:
                self._pending -= nbytes
                self._change.notify_all()
            self._guarded(lane, lambda: self._seal_full(lane))

    def _guarded(self, lane: Lane, work: Callable[[], None]) -> None:
        """Do it unless the writer has failed; an error here must stop the run, so it is kept for the producer."""
        with self._change:
            self._at_work += 1
        try:
            if self._error is None:
                self._attempt(lane, work)
            if self._error is not None:
                self._drop(lane)
        finally:
            with self._change:
                self._at_work -= 1
                self._change.notify_all()

    def _attempt(self, lane: Lane, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            with self._change:
                first, self._error = self._error is None, self._error or error
            self._drop(lane)
            if first:
                self._tell(error)
                self._told.set()

    def _tell(self, error: BaseException) -> None:
        """Leave the reason in a file, for those who only see the engine die; `check` raises it too."""
        with self._change:
            self._change.notify_all()
        disk_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        text = json.dumps({"reason": str(error), "disk_full": disk_full})
        for _ in range(_TRIES):  # threads that are still at work may fill what this one has freed, and then drop it too
            with suppress(OSError):
                write_text(self.folder / FAILURE, text)
                return
            time.sleep(_WAIT)

    def _drop(self, lane: Lane) -> None:
        for shard in [shard for shard, _ in lane.full] + ([lane.shard] if lane.shard else []):
            shard.discard()
        lane.full.clear()
        lane.shard = None

    def _add(self, lane: Lane, batch: Batch) -> None:
        tensors = batch.collect()
        start = last_start = 0
        for sample in batch.samples:
            if self._error is not None:
                return
            end, last_end = start + len(sample.input_ids_T), last_start + len(sample.last_rows_M)
            mine = {
                name: tensor[last_start:last_end] if name.startswith("last") else tensor[start:end]
                for name, tensor in tensors.items()
            }
            self._add_one(lane, sample, mine)
            start, last_start = end, last_end

    def _add_one(self, lane: Lane, sample: SampleRows, tensors: dict[str, Tensor]) -> None:
        reason = unusable(tensors.pop("aux_peaks"), tensors.pop("last_peaks"))
        if sample.save_to:
            alone = tensors | sample_tensors(sample)
            write_atomic(Path(sample.save_to), lambda tmp: save_file(alone, tmp))
        elif reason:
            self._reject(lane, sample, {"sample_id": sample.sample_id, "reason": reason})
        else:
            self._keep(lane, sample, tensors)
        with self._change:
            self.written += 1

    def _keep(self, lane: Lane, sample: SampleRows, tensors: dict[str, Tensor]) -> None:
        if lane.shard is None:
            lane.shard = self._open(next(self._numbers))
        lane.shard.add(sample, tensors)
        if lane.shard.nbytes >= self.config.shard_bytes:
            shard, lane.shard = lane.shard, None
            self._is_full(lane, shard, {})

    def _open(self, number: int) -> OpenShard:
        try:
            tail = self._tails.pop()
        except IndexError:
            tail = Tail()
        return OpenShard(self.folder, number, tail)

    def _is_full(self, lane: Lane, shard: OpenShard, more: dict[str, Any]) -> None:
        """Have it sealed after the batch; at once where a batch fills many, each of which keeps a file open."""
        lane.full.append((shard, more))
        if len(lane.full) >= _MOST_FULL:
            self._seal_full(lane)

    def _reject(self, lane: Lane, sample: SampleRows, entry: dict[str, str]) -> None:
        """Remember it on disk at once: a run that goes on after a kill must neither forget nor repeat it."""
        number = next(self._numbers)
        write_text(self.folder / f"rejected-{number:05d}.json", json.dumps([entry]))
        self.rejected.append(entry)
        limit = self.config.max_rejected
        if limit is not None and len(self.rejected) > limit:
            raise RuntimeError(
                f"{len(self.rejected)} samples have unusable states, e.g. {entry['sample_id']}: {entry['reason']}; "
                f"capture.max_rejected_share allows {limit}"
            )

    def _seal(self, lane: Lane) -> None:
        if lane.shard is not None:
            lane.full.append((lane.shard, {}))
            lane.shard = None
        self._seal_full(lane)

    def _seal_full(self, lane: Lane) -> None:
        while lane.full and self._error is None:  # what a failed writer has freed is not for the next shard to fill
            shard, more = lane.full[0]  # it stays there until it is done: an error drops it
            shard.seal(**more)
            lane.full.popleft()
            self._tails.append(shard.lasts)


def sample_tensors(sample: SampleRows) -> dict[str, Tensor]:
    """What the store holds of a sample beside its states; `last_rows` count from its own first row."""
    return {
        "input_ids": torch.from_numpy(sample.input_ids_T),
        "loss_mask": torch.from_numpy(sample.loss_mask_T),
        "last_rows": torch.from_numpy(sample.last_rows_M).to(torch.int32),
    }


def unusable(aux_peaks_TA: Tensor, last_peaks_M: Tensor) -> str | None:
    """Why the states cannot be used: non-finite, or a layer that is zero throughout."""
    if not (torch.isfinite(aux_peaks_TA).all() and torch.isfinite(last_peaks_M).all()):
        return "non-finite states"
    if bool((aux_peaks_TA == 0).all(dim=0).any()) or (last_peaks_M.numel() > 0 and not last_peaks_M.any()):
        return "a layer is all zero"
    return None
