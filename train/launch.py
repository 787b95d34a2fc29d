"""`python -m draftsmith.train.launch`: torchrun, but a scheduler's signals are the processes' own business.

torchrun answers SIGTERM by ending its processes and failing. Here they get the signal, save, end with code 0, and so
does this. SIGUSR1, which would kill torchrun, goes to the first of them. All arguments are torchrun's.
"""

import itertools
import os
import signal
import sys
from types import FrameType

import psutil


def _pass_on(number: int, frame: FrameType | None) -> None:
    processes = psutil.Process().children()
    for process in processes:
        # To save, one is enough, for it tells the others; two that are told at different steps would save twice.
        if number == signal.SIGTERM or process.environ().get("LOCAL_RANK") == "0":
            os.kill(process.pid, number)
    if not processes and number == signal.SIGTERM:
        sys.exit(128 + number)  # nothing has begun that could be saved


def main() -> None:
    """Start torchrun and let it watch its processes to their end; exits as the first of them that failed."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig
    from torch.distributed.run import main as torchrun

    _check_number(sys.argv)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _pass_on)
    # A torch without the option takes SIGTERM back: its processes save all the same, and only the code is another.
    own = ["--signals-to-handle", "SIGINT,SIGHUP,SIGQUIT"] if hasattr(LaunchConfig, "signals_to_handle") else []
    try:
        torchrun([*own, *sys.argv[1:]])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            name = signal.Signals(-failure.exitcode).name
            print(f"failed: process {rank} was ended by {name}; the same command goes on from the last checkpoint.")
        sys.exit(failure.exitcode if failure.exitcode > 0 else 1)
    except KeyboardInterrupt:
        sys.exit(130)


def _check_number(arguments: list[str]) -> None:
    given = next((b for a, b in itertools.pairwise(arguments) if a == "--nproc-per-node"), "1")
    if given not in ("auto", "gpu", "cpu") and not (given.isdecimal() and int(given)):
        print(f"error: NPROC is {given}. Set it to the number of processes of this host, 1 or more.", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
