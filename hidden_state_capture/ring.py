"""Pinned host memory that is allocated once and lent out in order: where copies from the device land.

A region is contiguous. Regions may come back in any order; memory is lent again once all older ones are back, which
costs nothing here, since the writer takes them in the order in which they were lent.
"""

import threading
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

_ALIGN = 64


@dataclass(eq=False)
class Region:
    """Lent memory: `bytes_B` (uint8), from `start` to `end` of the ring; start is -1 where it has memory of its own."""

    bytes_B: Tensor
    start: int
    end: int
    back: bool = False


class HostRing:
    """Thread-safe; `take` waits until there is room, so the ring's size bounds what waits for the disk."""

    def __init__(self, nbytes: int, pinned: bool) -> None:
        self.nbytes, self._pinned = nbytes, pinned
        self._memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        self._lent: deque[Region] = deque()
        self._change = threading.Condition()

    def take(self, nbytes: int) -> Region:
        """Lend `nbytes`; what is larger than the whole ring waits until it is empty and gets memory of its own."""
        nbytes = max(_ALIGN, -(-nbytes // _ALIGN) * _ALIGN)
        with self._change:
            self._change.wait_for(lambda: self._place(nbytes) is not None)
            start = self._place(nbytes)
            assert start is not None
            if start < 0:
                region = Region(torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned), -1, 0)
            else:
                region = Region(self._memory[start : start + nbytes], start, start + nbytes)
            self._lent.append(region)
            return region

    def trim(self, region: Region, nbytes: int) -> None:
        """Give back the end of the region that was lent last."""
        with self._change:
            if region.start >= 0 and region is self._lent[-1]:
                region.end = region.start + max(_ALIGN, -(-nbytes // _ALIGN) * _ALIGN)
                region.bytes_B = self._memory[region.start : region.end]
                self._change.notify_all()

    def give(self, region: Region) -> None:
        """Take a region back."""
        with self._change:
            region.back = True
            while self._lent and self._lent[0].back:
                self._lent.popleft()
            self._change.notify_all()

    def _place(self, nbytes: int) -> int | None:
        """Where a region of this size may start now; -1: outside the ring; None: nowhere yet."""
        if not self._lent:
            return 0 if nbytes <= self.nbytes else -1
        oldest, end = self._lent[0].start, self._lent[-1].end
        if nbytes > self.nbytes or oldest < 0:
            return None
        if end > oldest:
            if self.nbytes - end >= nbytes:
                return end
            end = 0
        return end if oldest - end >= nbytes else None
