"""`python -m draftsmith.train.launch`: torchrun, but a scheduler's signals are the processes' own business.

torchrun answers SIGTERM by ending its processes and failing. Here they get the signal, save, end with code 0, and so
does this. SIGUSR1, which would kill torchrun, goes to the first of them. Why one failed is printed once, whichever it
was. All arguments are torchrun's.
"""

import itertools
import os
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from draftsmith.core.told import FOLDER, first_told


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
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FOLDER] = folder
        try:
            torchrun([*own, *sys.argv[1:]])
        except ChildFailedError as error:
            sys.exit(_say_why(error, Path(folder)))
        except KeyboardInterrupt:
            sys.exit(130)


def _say_why(error: Any, folder: Path) -> int:
    """Print what ended the training, once, with its process; the exit code."""
    told = first_told(folder)
    killed = {rank: -failure.exitcode for rank, failure in error.failures.items() if failure.exitcode < 0}
    if killed and not (told and told["cause"]):
        rank, number = next(iter(killed.items()))
        name = signal.Signals(number).name
        said = f"failed: process {rank} was ended by {name}; the same command goes on from the last checkpoint."
        print(said, file=sys.stderr)
        return 1
    if told:
        print(f"process {told['rank']}: {told['text']}", file=sys.stderr)
        return int(told["code"])
    code = int(error.get_first_failure()[1].exitcode)
    return code if code > 0 else 1


def _check_number(arguments: list[str]) -> None:
    given = next((b for a, b in itertools.pairwise(arguments) if a == "--nproc-per-node"), "1")
    if given not in ("auto", "gpu", "cpu") and not (given.isdecimal() and int(given)):
        print(f"error: NPROC is {given}. Set it to the number of processes of this host, 1 or more.", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
