"""How fast training goes and where its steps' time goes, between two log lines."""

import time

import torch
from accelerate import Accelerator

from draftsmith.core.config import Config
from draftsmith.core.draft_shape import DraftShape
from draftsmith.core.losses import LossOptions
from draftsmith.core.sizes import Workload, gpu_peak_flops, training_flops
from draftsmith.train.clock import PARTS, Clock
from draftsmith.train.feed import Feed
from draftsmith.train.step import Work


class Speed:
    """Counts what this rank works on; figures of all ranks take every rank for as busy as this one."""

    def __init__(self, config: Config, accelerator: Accelerator, shape: DraftShape, clock: Clock, feed: Feed) -> None:
        self._config, self._shape, self._clock, self._feed = config.train, shape, clock, feed
        self._device, self._processes = accelerator.device, accelerator.num_processes
        self._peak = self._peak_flops()
        self._since, self._waited = time.monotonic(), feed.waited
        self._steps = self._tokens = self._documents = self._supervised = 0

    def _peak_flops(self) -> float | None:
        if self._config.peak_tflops:
            return self._config.peak_tflops * 1e12
        return gpu_peak_flops(torch.cuda.get_device_name(self._device)) if self._device.type == "cuda" else None

    def count(self, works: list[Work]) -> None:
        """An optimizer step on these batches is done."""
        self._steps += 1
        for work in works:
            self._tokens += work.batch.num_tokens
            self._documents += len(work.batch.sample_ids)
            self._supervised += int(work.batch.loss_mask_T.sum())

    def take(self) -> dict[str, float]:
        """Figures since the last time.

        Returns:
            tokens_per_second: of all ranks, saving and evaluating included. Of this rank, means of a step: step_seconds
            (all of it), data_seconds (no batch was read, or the GPU had none to work on as it was still on its way:
            a copy that ends before it is needed costs nothing), forward_, backward_, communication_ and
            optimizer_seconds. On a GPU gpu_memory_bytes, the most that was allocated; with a known peak `mfu`.
        """
        now, waited = time.monotonic(), self._feed.waited
        seconds, steps = max(now - self._since, 1e-9), max(self._steps, 1)
        rate = self._tokens * self._processes / seconds
        figures = {"tokens_per_second": rate, "step_seconds": seconds / steps}
        figures |= {f"{part}_seconds": spent / steps for part, spent in self._clock.take().items()}
        figures["data_seconds"] += (waited - self._waited) / steps
        if self._device.type == "cuda":
            figures["gpu_memory_bytes"] = torch.cuda.max_memory_allocated(self._device)
        if self._peak and self._tokens:
            figures["mfu"] = training_flops(self._shape, self._workload()) * rate / self._processes / self._peak
        self._since, self._waited = now, waited
        self._steps = self._tokens = self._documents = self._supervised = 0
        return figures

    def _workload(self) -> Workload:
        share = self._supervised / self._tokens
        length = self._tokens / max(self._documents, 1)
        return Workload(
            self._tokens, share, length, self._config.ttt_steps, LossOptions.of(self._config).needs_full_vocabulary
        )


def speed_shown(figures: dict[str, float]) -> dict[str, str]:
    """The same for the live progress: shares of a step, memory, utilisation."""
    step = figures["step_seconds"]
    split = " ".join(f"{part[:4]} {100 * figures[f'{part}_seconds'] / step:.0f}%" for part in PARTS)
    shown = {"tok/s": f"{figures['tokens_per_second']:,.0f}", "step": f"{step:.3g} s ({split})"}
    if "gpu_memory_bytes" in figures:
        shown["GPU"] = f"{figures['gpu_memory_bytes'] / 2**30:.1f} GiB"
    if "mfu" in figures:
        shown["MFU"] = f"{100 * figures['mfu']:.0f}%"
    return shown
