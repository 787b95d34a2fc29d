r"""What TorchSpec's log says: its lines, at the pinned commit, as events.

controller/loop.py   `Training:  12%|#2        | 12/100 [00:31<03:48,  2.60s/step, loss=4.103, acc=0.212, ...]`
                     (tqdm: it begins with \r and has no end, so a log line may stand behind it)
                     `Training completed: 100 steps in 260.1s | ...`
controller/eval.py   `Step 50 eval: loss=3.9012, acc=0.2500, sim_acc_len=0.31`
data/dataset.py      `Loading dataset from cache: PATH`, or `Tokenizing dataset (cache will be saved to PATH)`
training/checkpoint  `Saved checkpoint to PATH`, `Loaded model from PATH`, `Failed to load model from PATH: ...`
entry.py             `DRAFTSMITH {"step": 12, "train/avg_loss": 4.1, ...}`
"""

import json
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from draftsmith.train.torchspec.entry import PREFIX

Kind = Literal[
    "progress", "scalars", "eval", "saved", "cached", "not_cached", "started_from", "not_loaded", "completed"
]
_NUMBER = r"(-?[\d.]+(?:e-?\d+)?|nan|inf)"
_BAR = r"Training:\s+\d+%\|[^|]*\| (?P<step>\d+)/(?P<total>\d+) \[[^\]]*?(?:s/step|step/s), (?P<rest>[^\]]*)\]"
_PARTS = "model|optimizer|LR scheduler|verifier norm|fp32 params"
_NOT_LOADED = (
    rf"Failed to load (?:{_PARTS}).*|(?:Model|Optimizer) checkpoint \S* ?not found.*"
    r"|No final norm found.*|Corrupt eval cache.*"
)
_PATTERNS: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    ("progress", re.compile(_BAR)),
    ("eval", re.compile(rf"Step (?P<step>\d+) eval: loss={_NUMBER}, acc={_NUMBER}, sim_acc_len={_NUMBER}")),
    ("completed", re.compile(r"Training completed: (?P<step>\d+) steps in")),
    ("saved", re.compile(r"Saved checkpoint to (?P<text>\S+)")),
    ("cached", re.compile(r"Loading dataset from cache: (?P<text>\S+)")),
    ("not_cached", re.compile(r"(?:Tokenizing|Formatting) dataset \(cache will be saved to (?P<text>\S+)\)")),
    ("started_from", re.compile(r"Loaded model from (?P<text>\S+)")),
    ("not_loaded", re.compile(rf"(?P<text>{_NOT_LOADED})")),
)
STEP_DECAY = 0.8  # written into its trainer
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Event:
    """Something that the log says.

    Attributes:
        kind: what.
        step: optimizer steps done, where it says so.
        total: of how many.
        text: a path, or a message.
        values: figures by the names of our metrics.
    """

    kind: Kind
    step: int = -1
    total: int = -1
    text: str = ""
    values: dict[str, Any] = field(default_factory=dict)


def events(line: str) -> list[Event]:
    """What one line says; nothing, mostly."""
    line = _COLOURS.sub("", line)
    if line.startswith(PREFIX):
        return _scalars(line)
    found: list[Event] = []
    for kind, pattern in _PATTERNS:
        for match in pattern.finditer(line):
            group = match.groupdict()
            values: dict[str, Any] = _shown(group["rest"]) if kind == "progress" else {}
            if kind == "eval":
                loss, accuracy, length = (float(x) for x in match.groups()[1:])
                values = {"eval_loss": loss, "eval_accuracy": accuracy, "eval_simulated_accepted": length}
            step, total = int(group.get("step") or -1), int(group.get("total") or -1)
            found.append(Event(kind, step, total, group.get("text") or "", values))
    return found


def _shown(rest: str) -> dict[str, str]:
    """The figures beside a bar, as they stand there."""
    pairs = (part.split("=", 1) for part in rest.split(", ") if "=" in part)
    return {key.strip(): value.strip() for key, value in pairs}


def _scalars(line: str) -> list[Event]:
    try:
        said = json.loads(line.removeprefix(PREFIX))
        step = int(said.pop("step"))
    except (ValueError, KeyError, TypeError, AttributeError):  # a line cut by a kill
        return []
    steps = sorted(int(k.rsplit("_", 1)[1]) for k in said if k.startswith("train/ploss_"))
    losses = [said.pop(f"train/ploss_{i}") for i in steps]
    values = {
        # Ours is the sum, theirs divided by the sum of the weights.
        "loss": sum(STEP_DECAY**i * x for i, x in enumerate(losses)),
        "loss_per_step": losses,
        "accuracy_per_step": [said.pop(f"train/acc_{i}") for i in steps if f"train/acc_{i}" in said],
        "learning_rate": said.pop("train/lr", None),
        "grad_norm": said.pop("train/grad_norm", None),
        "samples_per_second": said.pop("perf/train_capacity", None),
        "data_wait_seconds": said.pop("perf/data_time", None),
        "torchspec": {k: v for k, v in said.items() if not k.endswith("/step")},
    }
    return [Event("scalars", step, values={k: v for k, v in values.items() if v is not None})]
