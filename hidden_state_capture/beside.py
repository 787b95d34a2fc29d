"""Who starts the capture of a spool, and on which GPUs: `draftsmith train`, or `draftsmith capture` of the user's."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from draftsmith.core.config import Config
from draftsmith.core.engine import EngineProcess, has_cuda, in_engine_process, outcome, require_vllm
from draftsmith.core.errors import UserError
from draftsmith.core.manifest import read_manifest
from draftsmith.core.run import RunFolder
from draftsmith.hidden_state_capture.spool import feed_training
from draftsmith.hidden_state_capture.stage import capture

_GPUS = "CUDA_VISIBLE_DEVICES"
# What torchrun tells a process about its like; an engine that sees it would join them.
_TORCHRUN = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_", "TORCHELASTIC_")


def capture_alone(config: Config) -> None:
    """The held-out samples; then, where `capture.spool_capture` is own, everything that a training asks for."""
    if config.capture.mode == "store":
        return capture(config)
    theirs, _ = split_gpus(config)
    with _environment(theirs), _sigterm_unwinds():
        capture(config)
        if config.capture.spool_capture == "own":
            in_engine_process(feed_training, config)


@contextmanager
def capturing(config: Config) -> Iterator[Callable[[], None]]:
    """Capture for a training beside the block, where it is the training's to start; to be entered by every rank.

    Yields:
        To be called while waiting: raises what ended the capture, if it failed.
    """
    theirs, ours = split_gpus(config)
    if ours is not None:
        os.environ[_GPUS] = ours
        has_cuda()  # CUDA reads the variable once; from here on it may change for processes that are started
    leads = os.environ.get("RANK", "0") == "0"
    if config.capture.spool_capture == "own" or not leads or read_manifest(RunFolder.of(config).checkpoints):
        yield lambda: None
        return
    with _sigterm_unwinds(), ExitStack() as stack:
        with _environment(theirs):
            capture(config)
            require_vllm("train")
            running = stack.enter_context(EngineProcess()).submit(feed_training, config)

        def check() -> None:
            if running.done():
                outcome(running, "capture")

        yield check


def split_gpus(config: Config) -> tuple[str | None, str | None]:
    """CUDA_VISIBLE_DEVICES of capture and of training; None: as they are.

    Raises:
        UserError: `capture.spool_gpus` names a GPU that is not there, or leaves none to training.
    """
    if config.capture.spool_gpus is None:
        return None, None
    import torch

    # The driver counts them: CUDA is not started in this process yet.
    count = torch.cuda.device_count()
    named = os.environ.get(_GPUS, "").split(",")[:count]
    return divide(config.capture.spool_gpus, named if any(named) else [str(i) for i in range(count)])


def divide(chosen: list[int], visible: list[str]) -> tuple[str, str]:
    """The chosen ones of the visible GPUs, by place, and the others; raises as `split_gpus`."""
    rest = [gpu for i, gpu in enumerate(visible) if i not in chosen]
    if max(chosen) >= len(visible) or not rest:
        raise UserError(
            f"capture.spool_gpus is {chosen}, and {len(visible)} GPUs are visible.",
            "Name some of them by their place, from 0, and leave at least one to training; or set it to null: both "
            "share all.",
        )
    return ",".join(visible[i] for i in chosen), ",".join(rest)


@contextmanager
def _environment(gpus: str | None) -> Iterator[None]:
    """What processes that are started in the block see: their GPUs, and nothing of torchrun."""
    before = dict(os.environ)
    for name in [n for n in os.environ if n.startswith(_TORCHRUN)]:
        del os.environ[name]
    if gpus is not None:
        os.environ[_GPUS] = gpus
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does, so that the engine is gone before we are."""

    def leave(*_: Any) -> None:
        sys.exit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
