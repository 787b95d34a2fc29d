"""TorchSpec's process and everything that it starts: started, followed by its log, and ended, whatever ends us.

Ray's and vLLM's processes leave the group that they are started in, so every descendant is known by a variable of its
environment. A shell outside of the group looks at us once a second; when we are gone, by `kill -9` too, it kills them
all. Actors on other hosts end with the Ray job, which ends with its driver.
"""

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Self

import psutil

from draftsmith.core.errors import UserError

_MARK = "DRAFTSMITH_TORCHSPEC"
_POLL_SECONDS = 0.2
_READ_BYTES = 1 << 16


class Job:
    """A command that runs for the length of the block, with all that it starts; its output goes to a file."""

    def __init__(self, command: list[str], log: Path, environment: dict[str, str], stop_seconds: float) -> None:
        """Remember; the block starts it.

        Args:
            command: program and arguments.
            log: gets stdout and stderr; appended to.
            environment: over ours.
            stop_seconds: that it has to end itself when it is asked to.
        """
        self.command, self.log, self.stop_seconds = command, log, stop_seconds
        self._mark = f"{_MARK}={uuid.uuid4().hex}"
        name, value = self._mark.split("=")
        self._environment = {**os.environ, **environment, name: value, "PYTHONUNBUFFERED": "1"}

    def __enter__(self) -> Self:
        """Start it, and what watches over us."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._from = self.log.stat().st_size if self.log.is_file() else 0
        self._watch = subprocess.Popen(
            ["/bin/sh", "-c", _watching(os.getpid(), self._mark)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            with self.log.open("ab") as out:
                self.process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=self._environment,
                    start_new_session=True,
                )
        except OSError as error:
            self._watch.kill()
            raise UserError(f"{self.command[0]} cannot be run ({error}).", "Check train.torchspec.python.") from None
        return self

    def lines(self) -> Iterator[str | None]:
        """Every line as it comes, and None now and then while none does; ends with the process."""
        held = b""
        with self.log.open("rb") as file:
            file.seek(self._from)
            while True:
                ended = self.process.poll() is not None  # asked before reading: what it wrote last is read
                if data := file.read(_READ_BYTES):
                    *whole, held = (held + data).replace(b"\r", b"\n").split(b"\n")
                    yield from (line.decode("utf-8", "replace") for line in whole if line)
                    continue
                if ended:
                    if held:
                        yield held.decode("utf-8", "replace")
                    return
                yield None
                time.sleep(_POLL_SECONDS)

    def stop(self) -> None:
        """Ask the driver to end as Ctrl-C does, which shuts engines and Ray down; nothing is waited for."""
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGINT)

    def wait(self) -> bool:
        """Whether it ended by itself within the seconds that it has."""
        try:
            self.process.wait(self.stop_seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def __exit__(self, *error: object) -> None:
        """End what is left of it; nothing that it started on this host stays."""
        try:
            if self.process.poll() is None:
                self.stop()
                self.wait()
        finally:
            self._kill()
            self.process.wait()
            # Last: were we killed in between, it would still do its work.
            self._watch.kill()
            self._watch.wait()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        while found := self.descendants():  # what is killed may just have started another
            for process in found:
                with suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(found, timeout=_POLL_SECONDS)

    def descendants(self) -> list[psutil.Process]:
        """Its live processes on this host, by the mark in their environment."""
        name, value = self._mark.split("=")
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):  # others' processes, and those that end meanwhile
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(name) == value:
                    found.append(process)
        return found


def _watching(parent: int, mark: str) -> str:
    """A shell script that outlives nobody but `parent`, and then takes all marked processes along."""
    marked = f"grep -lszF '{mark}' /proc/[0-9]*/environ"
    return (
        f"while kill -0 {parent} 2>/dev/null; do sleep 1; done; "
        f"for again in 1 2 3 4 5; do for file in $({marked}); do "
        "pid=${file#/proc/}; kill -9 ${pid%/environ} 2>/dev/null; done; sleep 1; done"
    )
