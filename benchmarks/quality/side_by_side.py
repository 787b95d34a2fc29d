"""Several `draftsmith` commands at once on one machine, until the time is up."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

_POLL_SECONDS, _SAVE_SECONDS = 0.2, 60.0


@dataclass(frozen=True)
class Job:
    """`draftsmith STAGE WORDS`, its output appended to `log`."""

    name: str
    stage: str
    words: tuple[str, ...]
    log: Path

    def start(self) -> subprocess.Popen[bytes]:
        """Start it, and do not wait."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "draftsmith", self.stage, *self.words], stdout=log, stderr=log
            )

    def run(self) -> None:
        """Wait for its end.

        Raises:
            SystemExit: it failed.
        """
        if self.start().wait():
            raise SystemExit(f"{self.stage} of {self.name} failed; see {self.log}")


def run_jobs(jobs: Sequence[Job], at_once: int, seconds: float, done: Callable[[Job, float], None]) -> list[str]:
    """Run all jobs; when the time is up, those that run are asked to save and end, and no other is started.

    Args:
        jobs: in the order in which they start.
        at_once: how many run side by side.
        seconds: of wall time for all.
        done: called with every job that ended well, and its seconds.

    Returns:
        What did not come to its end, one line each.
    """
    ends, waiting, left = time.monotonic() + seconds, list(jobs), []
    running: list[tuple[Job, subprocess.Popen[bytes], float]] = []
    asked_at: float | None = None
    try:
        while waiting or running:
            now = time.monotonic()
            if now > ends and asked_at is None:
                asked_at = now
                left += [f"{job.name}: not started" for job in waiting]
                waiting.clear()
                for _, process, _ in running:
                    process.send_signal(signal.SIGTERM)
            while waiting and len(running) < at_once:
                job = waiting.pop(0)
                running.append((job, job.start(), time.monotonic()))
            for job, process, began in list(running):
                if process.poll() is None:
                    if asked_at is not None and now > asked_at + _SAVE_SECONDS:
                        process.kill()
                    continue
                running.remove((job, process, began))
                early = asked_at is not None and process.returncode == -signal.SIGTERM  # it had not begun to listen
                if process.returncode and not early:
                    left.append(f"{job.name}: failed ({process.returncode}); see {job.log}")
                elif not early and (asked_at is None or finished(job)):
                    done(job, time.monotonic() - began)
                else:
                    left.append(f"{job.name}: stopped by the time, goes on with the same command")
            time.sleep(_POLL_SECONDS)
    finally:
        for _, process, _ in running:
            process.kill()
    return left


def finished(job: Job) -> bool:
    """Whether a training that was asked to end had come to its end: its manifest is written last."""
    return (job.log.parent / "checkpoints" / "manifest.json").is_file()
