"""Where training's figures go: `metrics.jsonl` always, Accelerate's trackers by config."""

import json
import math
import time
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from draftsmith.core.atomic import write_text
from draftsmith.core.config import Config
from draftsmith.core.progress import say


class Metrics:
    """Appends one JSON object a line; only the main process writes."""

    def __init__(self, path: Path, accelerator: Accelerator, config: Config, resumed_step: int) -> None:
        self.path, self.accelerator = path, accelerator
        if accelerator.is_main_process:
            # What a killed run logged after its last checkpoint will be logged again.
            kept = [line for line in _lines(path) if json.loads(line)["step"] <= resumed_step]
            write_text(path, "".join(line + "\n" for line in kept))
        self._trackers = [t for name in config.train.trackers if (t := self._start(name, config))]

    def _start(self, name: str, config: Config) -> GeneralTracker | None:
        """Start one of Accelerate's trackers; one that does not start leaves the others alone."""
        flat, root = _flat(config.model_dump(mode="json")), str(self.path.parent)
        try:
            kind: Any = LOGGER_TYPE_TO_CLASS[name]
            place = [root] if kind.requires_logging_directory else []
            tracker: GeneralTracker = kind(
                f"draftsmith-{config.run.name}", *place, **({"dir": root} if name == "wandb" else {})
            )
            tracker.start()
            tracker.store_init_configuration(flat)
        except Exception as error:  # a tracker's outage must not cost a training run
            say(f"warning: tracker {name} did not start ({error}); metrics.jsonl is still written")
            return None
        return tracker

    def log(self, step: int, **values: Any) -> None:
        """Record figures of an optimizer step; lists get one scalar per entry in the trackers."""
        if self.accelerator.is_main_process:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(_finite({"step": step, "time": round(time.time(), 3), **values})) + "\n")
        for tracker in list(self._trackers):
            try:
                tracker.log(_flat(values), step=step)
            except Exception as error:  # as at the start: training goes on
                say(f"warning: tracker {tracker.name} failed ({error}); metrics.jsonl is still written")
                self._trackers.remove(tracker)

    def close(self) -> None:
        """Let the trackers finish."""
        for tracker in self._trackers:
            try:
                tracker.finish()
            except Exception as error:
                say(f"warning: tracker {tracker.name} did not finish ({error}); metrics.jsonl has every figure")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        return []
    # A line cut off by a kill has no end; json would not read it.
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]


def _flat(value: dict[str, Any], at: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, item in value.items():
        name = f"{at}{key}"
        if isinstance(item, dict):
            flat |= _flat(item, f"{name}.")
        elif isinstance(item, list):
            flat |= _flat({str(i + 1): part for i, part in enumerate(item)}, f"{name}/")
        elif item is not None:
            flat[name] = item
    return flat
