"""The whole of `prepare` on rows that have their replies (data.replies=keep): python stage.py FILE RUNS.

Prints seconds and the peak resident size of the process.
"""

import resource
import sys
import time
from pathlib import Path

from draftsmith.core.config import Config
from draftsmith.data.stage import prepare


def main() -> None:
    file, runs = sys.argv[1:]
    data = {"sources": [{"path": file}], "replies": "keep"}
    begin = time.monotonic()
    prepare(Config.model_validate({"run": {"name": Path(file).stem, "dir": runs}, "data": data}))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{time.monotonic() - begin:.0f} s, peak {peak:.0f} MiB")


if __name__ == "__main__":
    main()
