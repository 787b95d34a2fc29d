"""`metrics.jsonl`: one JSON object a line, of every engine."""

import json
import math
import time
from pathlib import Path
from typing import Any

from draftsmith.core.atomic import write_text


class Figures:
    """Appends one JSON object a line."""

    def __init__(self, path: Path, resumed_step: int) -> None:
        """Open the file.

        Args:
            path: `metrics.jsonl`.
            resumed_step: later lines are dropped, for they will be logged again.
        """
        self.path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        # A line cut off by a kill has no end; json would not read it.
        kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= resumed_step]
        write_text(path, "".join(line + "\n" for line in kept))

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Record the figures of an optimizer step; what is not finite becomes null."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_finite({"step": step, "time": round(time.time(), 3), **values})) + "\n")


def _finite(value: Any) -> Any:
    """The same with null for what JSON has no number for: nan and infinities."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
