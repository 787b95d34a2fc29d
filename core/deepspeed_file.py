"""DeepSpeed's JSON file as it stands, without DeepSpeed: a plan reads it too. `train/zero_config.py` checks it."""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from draftsmith.core.damage import reading
from draftsmith.core.errors import UserError

START = "Take the file as a start that configs/deepspeed has for the stage, e.g. zero2.json."


def read_deepspeed_file(path: str) -> tuple[Path, dict[str, Any]]:
    """A file of the user's, or one of configs/deepspeed: where it lies, and what is in it.

    Raises:
        UserError: there is none, it is no JSON, or has no stage of ZeRO.
    """
    shipped = Path(str(files("draftsmith.configs").joinpath("deepspeed", f"{Path(path).stem}.json")))
    file = next((p for p in (Path(path).expanduser(), shipped) if p.is_file()), None)
    if file is None:
        raise UserError(f"train.deepspeed_config: there is no {path}.", START)
    with reading(file, START):
        config: Any = json.loads(file.read_text(encoding="utf-8"))
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    stage = zero.get("stage") if isinstance(zero, dict) else None
    if stage not in (1, 2, 3):
        raise UserError(f"{file}: zero_optimization.stage is {stage!r}, not 1, 2 or 3.", START)
    whole: dict[str, Any] = config
    return file, whole
