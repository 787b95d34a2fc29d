"""Writes the spool's shards: each whole, whatever the order in which the engine finishes its samples."""

from pathlib import Path
from typing import Any

from draftsmith.core.atomic import write_json
from draftsmith.core.store import shard_name
from draftsmith.hidden_state_capture.writer import (
    SampleStates,
    ShardWriter,
    split_states,
    stored,
    unusable,
    write_shard,
)


class SpoolWriter(ShardWriter):
    """Puts every sample into the shard that its slot names, and writes that when its last sample has come.

    A slot is {shard, samples, steps, made_from}: the shard's number, how many samples it has, and what its sidecar says
    besides.
    """

    def __init__(self, folder: Path, shard_bytes: int, pending_bytes: int, storage: str = "bf16") -> None:
        self._coming: dict[int, list[dict[str, Any]]] = {}
        super().__init__(folder, shard_bytes, pending_bytes, storage)

    def _add(self, sample: SampleStates) -> None:
        slot = sample.slot
        if slot is None:  # the probe
            super()._add(sample)
            return
        sample.ready()
        tensors = split_states(sample)
        reason = unusable(tensors)
        coming = self._coming.setdefault(slot["shard"], [])
        found = {"reason": reason} if reason else stored(tensors, self.storage)
        coming.append({"sample_id": sample.sample_id, **found})
        if len(coming) == slot["samples"]:
            self._write(slot, self._coming.pop(slot["shard"]))
        self.written += 1

    def _write(self, slot: dict[str, Any], samples: list[dict[str, Any]]) -> None:
        usable = [sample for sample in samples if "reason" not in sample]
        rejected = [sample for sample in samples if "reason" in sample]
        self.rejected += rejected
        more = {"steps": slot["steps"], "made_from": slot["made_from"], "rejected": rejected}
        path = self.folder / shard_name(slot["shard"])
        if usable:
            write_shard(path, usable, **more)
        else:
            write_json(path.with_suffix(".json"), {"shard": {"file": path.name, "bytes": 0}, "rows": [], **more})

    def _seal(self) -> None:
        """A shard is written when it is whole, and at the end all must be."""
        if self._coming:
            missing = {number: len(samples) for number, samples in self._coming.items()}
            raise RuntimeError(f"of these shards, only so many samples have come from the engine: {missing}")
