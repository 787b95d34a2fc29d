"""Batches on their way to the device, one ahead of the batch that is worked on.

    host thread   take(k), then forward and backward of k are enqueued          take(k+1) ...
    training's    ... k-1 | waits for copy k | (e) forward, backward k        | waits for copy k+1 | ...
    copies'                                    copy k+1 (waits for e)

Copying has a thread and a stream of its own: the thread waits until the batch is read, and until there is room.

Why no batch is written over while a kernel reads it: its memory belongs to the copies' stream, whose allocator would
hand it out again as soon as nothing refers to it. `take` records training's stream on every tensor, so the allocator
keeps it until that stream is past the point where the last reference went: where reading takes long, copy k+1 begins
when the work on batch k is enqueued, batch k is let go, and nothing of it is computed yet. That alone would let
batches pile up where the host enqueues far ahead of the GPU (gradient accumulation): the allocator does not wait for
memory that is not free yet, it takes new memory. So the thread waits for the event e before it asks for any: e comes
after all work on batch k-1, to which nothing refers any more, so its memory is free and is what copy k+1 gets. Two
batches are on the device at most. Training's thread waits until a copy is enqueued, never until it is done: that its
stream does.

Pinned host memory: torch's allocator notes the stream of every copy out of it, and gives it out again once the copy is
done, however early the batch on the host is let go.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from draftsmith.train.step import Work


class Ahead:
    """Moves batches to the device, in order; a context that ends its thread.

    On a CPU there is no stream and nothing to copy; the thread decodes states in float8 all the same.
    """

    def __init__(self, device: torch.device) -> None:
        """No batch is moved yet."""
        self._device = device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._pool = ThreadPoolExecutor(1, "to-device")
        self._coming: Future[tuple[Work, Any]] | None = None

    def __enter__(self) -> "Ahead":
        return self

    def __exit__(self, *error: object) -> None:
        """End the thread: a copy that was begun is finished, and dropped."""
        self._pool.shutdown(cancel_futures=True)
        self._coming = None

    def begin(self, find: Callable[[], Work]) -> None:
        """Let a batch come.

        Args:
            find: gives it in host memory; called by the thread, may wait. What it raises is raised by `take`.
        """
        assert self._coming is None, "one batch ahead"
        so_far: Any = None
        if self._stream is not None:
            so_far = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            so_far.record(torch.cuda.current_stream(self._device))
        self._coming = self._pool.submit(self._move, find, so_far)

    def take(self, following: Callable[[], Work] | None) -> Work:
        """The batch that was begun, for what the current stream does from now on; let `following` come next.

        Whoever takes it keeps no reference to the batch taken before: there is room for two.
        """
        assert self._coming is not None
        coming, self._coming = self._coming, None  # a future holds on to its result
        work, copied = coming.result()
        if copied is not None:
            training = torch.cuda.current_stream(self._device)
            training.wait_event(copied)
            for tensor in _tensors(work):
                tensor.record_stream(training)
        if following is not None:
            self.begin(following)
        return work

    def _move(self, find: Callable[[], Work], so_far: Any) -> tuple[Work, Any]:
        """On the thread: the batch on the device, and the event of its being there."""
        work = find()
        if self._stream is None:
            return work.to(self._device), None
        torch.cuda.set_device(self._stream.device)  # a thread begins with the first GPU, whichever this process has
        so_far.synchronize()  # there is room now
        with torch.cuda.stream(self._stream):
            there = work.to(self._device)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(self._stream)
        return there, copied


class Step:
    """The batches of one optimizer step.

    Attributes:
        works: in host memory.
    """

    def __init__(self, works: list[Work], ahead: Ahead, following: Future[list[Work]] | None) -> None:
        """The first one has been begun already.

        Args:
            works: in host memory.
            ahead: moves them.
            following: those of the next step; None: this is the last one.
        """
        self.works, self._ahead, self._following, self._taken = works, ahead, following, 0

    def take(self) -> Work:
        """The next batch on the device, while the one after it, be it of the next step, begins to come."""
        self._taken += 1
        if self._taken < len(self.works):
            return self._ahead.take(partial(self.works.__getitem__, self._taken))
        return self._ahead.take(None if self._following is None else partial(first_of, self._following))


def first_of(step: Future[list[Work]]) -> Work:
    """The first batch of a step that is being read."""
    return step.result()[0]


def _tensors(work: Work) -> list[Tensor]:
    parts = [vars(part) for part in (work.batch, work.layout) if part is not None]
    return [value for part in parts for value in part.values() if isinstance(value, Tensor)]
