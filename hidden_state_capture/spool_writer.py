"""Writes the spool's shards: each whole, whatever the order in which the engine finishes its samples."""

import json
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from draftsmith.core.atomic import remove_leftovers, write_text
from draftsmith.core.store import shard_name
from draftsmith.hidden_state_capture.gather import SampleRows
from draftsmith.hidden_state_capture.shard import OpenShard, Tail
from draftsmith.hidden_state_capture.writer import ShardWriter, WriterConfig, _Lane, unusable


@dataclass
class _Coming:
    """A shard of which `left` samples are still to come."""

    left: int
    shard: OpenShard | None = None
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

    def _add_one(self, lane: _Lane, sample: SampleRows, tensors: dict[str, Tensor]) -> None:
        slot = sample.slot
        if slot is None:  # the probe
            super()._add_one(lane, sample, tensors)
            return
        reason = unusable(tensors.pop("aux_peaks"), tensors.pop("last_peaks"))
        with self._lock:
            coming = self._coming.setdefault(slot["shard"], _Coming(slot["samples"]))
            if reason:
                coming.rejected.append({"sample_id": sample.sample_id, "reason": reason})
            elif coming.shard is None:
                coming.shard = OpenShard(self.folder, slot["shard"], Tail())
        if not reason and coming.shard:
            coming.shard.add(sample, tensors)
        with self._lock:
            coming.left -= 1
            whole = coming.left == 0
        if whole:
            self._commit(slot, coming)
            with self._lock:
                del self._coming[slot["shard"]]
        with self._change:
            self.written += 1

    def _commit(self, slot: dict[str, Any], coming: _Coming) -> None:
        self.rejected += coming.rejected
        more = {"steps": slot["steps"], "made_from": slot["made_from"], "rejected": coming.rejected}
        if coming.shard:
            coming.shard.seal(**more)
            return
        path = self.folder / shard_name(slot["shard"])
        sidecar = {"shard": {"file": path.name, "bytes": 0}, "rows": [], **more}
        write_text(path.with_suffix(".json"), json.dumps(sidecar))

    def _drop(self, lane: _Lane) -> None:
        """What is not whole goes, so that a full disk has room; its files stay open until the process ends."""
        super()._drop(lane)
        remove_leftovers(self.folder)

    def flush(self) -> None:
        """Wait until everything queued is on disk; by then every shard must be whole."""
        super().flush()
        if self._coming:
            left = {number: coming.left for number, coming in self._coming.items()}
            raise RuntimeError(f"of these shards, so many samples have not come from the engine: {left}")
