"""Passes as they are measured, a cell of the sweep a line, so that an eval whose engine died goes on with what it has.

The file is named after everything that decides the report, and after the machine: times of two machines do not mix.
What a kill cut off at the end, or damaged, is measured again.
"""

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftsmith.core.atomic import remove, sha256_json
from draftsmith.core.engine import has_cuda
from draftsmith.core.manifest import package_versions
from draftsmith.core.progress import say
from draftsmith.eval.passes import Counters, Job, Pass


class PassJournal:
    """Passes by what was asked of whom."""

    def __init__(self, folder: Path, inputs: Any) -> None:
        """Read what an earlier start left for these inputs.

        Args:
            folder: of the journals; made with the first pass.
            inputs: whatever decides the report.
        """
        self._file = folder / f"{sha256_json([inputs, package_versions(), _machine()])[:32]}.jsonl"
        self._passes: dict[str, list[Pass]] = {}
        self.used = 0  # cells of the report that were measured before
        for line in self._file.read_bytes().splitlines() if self._file.is_file() else []:
            try:
                entry = json.loads(line)
                self._passes[entry["key"]] = [_as_pass(fields) for fields in entry["passes"]]
            except (ValueError, KeyError, TypeError):
                say(f"warning: {self._file}: a damaged line; what stood there is measured again")
        if self._passes:
            say(f"eval: going on, {len(self._passes)} cells of the sweep were measured before")

    def get(self, sides: Sequence[str], job: Job) -> list[Pass] | None:
        """A cell's passes, one for every side, if the same was asked of the same."""
        return self._passes.get(_key(sides, job))

    def add(self, sides: Sequence[str], job: Job, passes: Sequence[Pass]) -> None:
        """Write a cell through to the operating system: a killed process loses none."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"key": _key(sides, job), "passes": [asdict(p) for p in passes]}, separators=(",", ":"))
        with self._file.open("ab+") as file:
            if file.tell() and not _ends_a_line(self._file):
                file.write(b"\n")
            file.write(line.encode() + b"\n")

    def clear(self) -> None:
        """Remove all journals of the folder: the report is written."""
        remove(self._file.parent)


def _key(sides: Sequence[str], job: Job) -> str:
    asked = [(p.id, p.ids, p.max_tokens) for p in job.prompts]
    return sha256_json([list(sides), job.set, job.temperature, job.concurrency, job.seed, asked])


def _as_pass(fields: dict[str, Any]) -> Pass:
    counted = fields.pop("counters")
    counters = Counters(counted["drafts"], counted["accepted"], tuple(counted["per_position"]))
    return Pass(**fields, counters=counters)


def _ends_a_line(file: Path) -> bool:
    with file.open("rb") as opened:
        opened.seek(-1, 2)
        return opened.read() == b"\n"


def _machine() -> list[str]:
    if not has_cuda():
        return [platform.node()]
    import torch

    return [platform.node(), *(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))]
