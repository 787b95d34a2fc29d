"""One error for all processes of a training: each leaves what ended it with the launcher, which prints the first.

The others fail for want of the one that failed, a moment later and with nothing to say.
"""

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from draftsmith.core.atomic import write_json

FOLDER = "DRAFTSMITH_TOLD"  # in the environment of the launcher's processes


def tell(text: str, code: int, cause: bool = True) -> None:
    """Say on stderr why this process ends, or leave it with the launcher.

    Args:
        text: what to say.
        code: the exit code.
        cause: false: another process is the cause.
    """
    rank = os.environ.get("RANK", "0")
    told = {"rank": int(rank), "text": text, "code": code, "cause": cause, "time": time.time_ns()}
    if folder := os.environ.get(FOLDER):
        with suppress(OSError):  # a full disk may be what there is to say
            return write_json(Path(folder) / f"rank-{rank}.json", told)
    print(text, file=sys.stderr)


def first_told(folder: Path) -> dict[str, Any] | None:
    """What the process said that failed first: `rank`, `text`, `code` and `cause`; None: no process said anything."""
    told = [json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("rank-*.json")]
    return min(told, key=lambda one: (not one["cause"], one["time"]), default=None)
