"""Where a step's time goes: data, forward, backward, optimizer, and what of them was spent waiting for other ranks.

On a GPU the parts are measured on its own stream, by events that nobody waits for before the figures are asked for.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

PARTS = ("data", "forward", "backward", "communication", "optimizer")


class Clock:
    """Seconds by part; data is what training waits for a batch to be on the device, and the noise that is put on it.

    A batch travels while the one before is worked on (ahead.py). On a GPU the part is from the moment when its stream
    has nothing left to do to the moment when the copy is there: waits of the host while the GPU works do not count.

    Communication is exposed communication: a part is split where its own work has ended or not yet begun, and the
    optimizer's part holds the gathering of weights that ZeRO does in it.
    """

    def __init__(self, device: torch.device) -> None:
        self._events = device.type == "cuda"
        self._open: tuple[str, Any] | None = None
        self._spans: list[tuple[str, Any, Any]] = []
        self._hooks: Any = None

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """The block is this part."""
        self._open = (name, self._now())
        yield
        self._close()

    def so_far(self, name: str) -> None:
        """What has passed of the open part belongs to another one."""
        self._cut(name, None)

    def from_now(self, name: str) -> None:
        """What is to come of the open part belongs to another one."""
        self._cut(None, name)

    def split(self, parameters: list[nn.Parameter]) -> None:
        """Forward proper begins, with these parameters; once all their gradients are there, backward proper ends."""
        self.so_far("communication")
        if self._hooks:
            self._hooks.remove()
        self._hooks = torch.autograd.graph.register_multi_grad_hook(
            parameters, lambda _: self.from_now("communication"), mode="all"
        )

    def take(self) -> dict[str, float]:
        """Seconds of every part since the last time."""
        seconds = dict.fromkeys(PARTS, 0.0)
        if self._events and self._spans:
            self._spans[-1][2].synchronize()
        for name, begin, end in self._spans:
            seconds[name] += begin.elapsed_time(end) / 1000 if self._events else end - begin
        self._spans.clear()
        return seconds

    def _cut(self, before: str | None, after: str | None) -> None:
        if self._open:
            (name, begin), now = self._open, self._now()
            self._spans.append((before or name, begin, now))
            self._open = (after or name, now)

    def _close(self) -> None:
        assert self._open
        self._spans.append((*self._open, self._now()))
        self._open = None

    def _now(self) -> Any:
        if not self._events:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
