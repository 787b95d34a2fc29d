"""Where training's figures go: `metrics.jsonl` always, Accelerate's trackers by config."""

from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from draftsmith.core.config import Config
from draftsmith.core.progress import say
from draftsmith.train.figures import Figures


class Metrics:
    """Appends one JSON object a line; only the main process writes."""

    def __init__(self, path: Path, accelerator: Accelerator, config: Config, resumed_step: int) -> None:
        self.path = path
        self._file = Figures(path, resumed_step) if accelerator.is_main_process else None
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
        if self._file:
            self._file.log(step, values)
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
