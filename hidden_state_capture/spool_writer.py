"""Writes the spool's shards: each whole, whatever the order in which the engine finishes its samples."""

import json
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from draftsmith.core.atomic import write_text
from draftsmith.core.store import shard_name
from draftsmith.hidden_state_capture.gather import SampleRows
from draftsmith.hidden_state_capture.shard import OpenShard
from draftsmith.hidden_state_capture.writer import Lane, ShardWriter, WriterConfig


@dataclass
class _Coming:
    """A shard whose samples are coming."""

    shard: OpenShard | None = None
    there: int = 0
    rejected: list[dict[str, str]] = field(default_factory=list)


class SpoolWriter(ShardWriter):
    """Puts every sample into the shard that its slot names, and commits that when its last sample has come.

    A slot is {shard, samples, steps, made_from}: the shard's number, how many samples it has, and what its sidecar says
    besides. Every thread adds to any shard.
    """

    def __init__(self, folder: Path, config: WriterConfig) -> None:
        self._coming: dict[int, _Coming] = {}
        self._lock = threading.Lock()
        super().__init__(folder, config)

    def _keep(self, lane: Lane, sample: SampleRows, tensors: dict[str, Tensor]) -> None:
        coming = self._of(sample)
        with self._lock:
            if coming.shard is None:
                coming.shard = self._open(self._slot(sample)["shard"])
        coming.shard.add(sample, tensors)
        self._count(lane, sample, coming)

    def _reject(self, lane: Lane, sample: SampleRows, entry: dict[str, str]) -> None:
        coming = self._of(sample)
        with self._lock:
            coming.rejected.append(entry)
            self.rejected.append(entry)
        self._count(lane, sample, coming)

    def _of(self, sample: SampleRows) -> _Coming:
        with self._lock:
            return self._coming.setdefault(self._slot(sample)["shard"], _Coming())

    def _count(self, lane: Lane, sample: SampleRows, coming: _Coming) -> None:
        """Commit the shard if this was its last sample."""
        slot = self._slot(sample)
        with self._lock:
            coming.there += 1
            if coming.there < slot["samples"]:
                return
            del self._coming[slot["shard"]]
        more = {"steps": slot["steps"], "made_from": slot["made_from"], "rejected": coming.rejected}
        if coming.shard:
            self._is_full(lane, coming.shard, more)
        else:
            path = self.folder / shard_name(slot["shard"])
            nothing = {"shard": {"file": path.name, "bytes": 0}, "rows": [], **more}
            write_text(path.with_suffix(".json"), json.dumps(nothing))

    def _slot(self, sample: SampleRows) -> dict[str, Any]:
        assert sample.slot is not None
        return sample.slot

    def flush(self) -> None:
        """Wait until everything queued is on disk.

        Raises:
            RuntimeError: the writer failed, or some shards lack samples.
        """
        super().flush()
        if self._coming:
            missing = {number: coming.there for number, coming in self._coming.items()}
            raise RuntimeError(f"of these shards, only so many samples have come from the engine: {missing}")

    def _drop(self, lane: Lane) -> None:
        super()._drop(lane)
        with self._lock:
            for coming in self._coming.values():
                if coming.shard:
                    coming.shard.give_room()
            self._coming.clear()
