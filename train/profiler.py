"""A window of PyTorch's profiler, by `train.profile_steps`."""

from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from draftsmith.core.progress import say


class Window:
    """Records the optimizer steps from the first to the last one asked for, and writes what every rank did."""

    def __init__(self, steps: list[int] | None, folder: Path, rank: int) -> None:
        self._first, self._last = steps or (0, 0)
        self._folder, self._rank = folder, rank
        self._running: Any = None

    def begins(self, step: int) -> None:
        """Optimizer step `step` (from 1) is about to begin; a resumed run may have passed the first one."""
        if self._running is None and self._first <= step <= self._last:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
            self._running = profile(activities=activities)
            self._running.start()

    def ended(self, step: int) -> None:
        """Optimizer step `step` has ended."""
        if self._running is not None and step >= self._last:
            self.close()

    def close(self) -> None:
        """Write a trace for chrome://tracing or perfetto.dev, and a table of the slowest operations."""
        if self._running is None:
            return
        self._running.stop()
        self._folder.mkdir(exist_ok=True)
        self._running.export_chrome_trace(str(self._folder / f"rank-{self._rank}.json.gz"))
        by = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = self._running.key_averages().table(sort_by=by, row_limit=40)
        (self._folder / f"rank-{self._rank}.txt").write_text(table, encoding="utf-8")
        say(f"profile: steps {self._first} to {self._last} -> {self._folder}")
        self._running, self._last = None, 0
