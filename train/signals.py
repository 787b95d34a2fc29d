"""What a scheduler asks of a training: SIGTERM, save and end; SIGUSR1, save and go on."""

import ctypes
import os
import signal
import sys
import threading
from types import FrameType

_PR_SET_PDEATHSIG = 1


def end_with_launcher() -> None:
    """Have the kernel send SIGTERM when the launcher is gone: its processes would train on, and hold the run."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Signals:
    """Notes the signals that come in the block; nothing is done before the optimizer step has ended."""

    def __init__(self) -> None:
        self.end, self.save = False, False
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():  # Python lets no other set handlers
            for number in (signal.SIGTERM, signal.SIGUSR1):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            self.end = True
        else:
            self.save = True

    def take(self) -> tuple[bool, bool]:
        """(end, save) since the last time."""
        noted = (self.end, self.save)
        self.save = False
        return noted
