"""`python -m draftsmith.train.launch`: torchrun, but a scheduler's signals are the processes' own business.

torchrun answers SIGTERM by ending its processes and failing. Here they get the signal, save, end with code 0, and so
does this. SIGUSR1, which would kill torchrun, goes to them too. All arguments are torchrun's.
"""

import os
import signal
import sys
from types import FrameType

import psutil


def _pass_on(number: int, frame: FrameType | None) -> None:
    processes = psutil.Process().children()
    for process in processes:
        os.kill(process.pid, number)
    if not processes and number == signal.SIGTERM:
        sys.exit(128 + number)  # nothing has begun that could be saved


def main() -> None:
    """Start torchrun and let it watch its processes to their end."""
    from torch.distributed.launcher.api import LaunchConfig
    from torch.distributed.run import main as torchrun

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _pass_on)
    # A torch without the option takes SIGTERM back: its processes save all the same, and only the code is another.
    own = ["--signals-to-handle", "SIGINT,SIGHUP,SIGQUIT"] if hasattr(LaunchConfig, "signals_to_handle") else []
    torchrun([*own, *sys.argv[1:]])


if __name__ == "__main__":
    main()
