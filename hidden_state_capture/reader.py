"""Reads the hidden-state store; the public door to it for training and evaluation.

Shards are memory-mapped: opening costs nothing, and a sample's rows are read when they are asked for.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from safetensors import safe_open
from torch import Tensor

from draftsmith.core.damage import reading
from draftsmith.core.errors import UserError
from draftsmith.core.manifest import require_manifest
from draftsmith.core.store import INDEX, INDEX_SCHEMA


@dataclass(frozen=True)
class StoredSample:
    """One captured sample of T tokens, M of them with a label.

    Attributes:
        sample_id: its id in `samples/`.
        input_ids_T: int32.
        loss_mask_T: uint8, 1 on reply tokens.
        aux_states_TAH: auxiliary states, columns in the order of the manifest's layer_ids.
        last_states_MH: states before the final norm, of the rows `last_rows_M`.
        last_rows_M: int32, rows of this sample whose next token is a reply token.
    """

    sample_id: str
    input_ids_T: Tensor
    loss_mask_T: Tensor
    aux_states_TAH: Tensor
    last_states_MH: Tensor
    last_rows_M: Tensor


class HiddenStateStore:
    """A complete store, by sample number (the row of index.parquet)."""

    def __init__(self, folder: Path, needed_by: str = "train") -> None:
        """Open a store.

        Args:
            folder: `hidden_states/` of a run.
            needed_by: stage that asks, for the error.

        Raises:
            UserError: capture has not been run to its end, or a shard is missing or cut short.
        """
        self.folder = folder
        self.manifest = require_manifest(folder, "capture", needed_by)
        with reading(folder / INDEX, "Run `draftsmith capture --fresh`."):
            self.index: list[dict[str, Any]] = pq.read_table(folder / INDEX, schema=INDEX_SCHEMA).to_pylist()
        for shard in self.manifest["shards"]:
            file = folder / shard["file"]
            if not file.is_file() or file.stat().st_size != shard["bytes"]:
                raise UserError(
                    f"{file}: missing or not {shard['bytes']} bytes long.",
                    "Run `draftsmith capture --fresh`.",
                )

    @classmethod
    def of_shard(
        cls, folder: Path, manifest: dict[str, Any], shard: dict[str, Any], index: list[dict[str, Any]]
    ) -> "HiddenStateStore":
        """One shard as a store of its own.

        Args:
            folder: that the shard lies in.
            manifest: of a store whose states are of the same kind.
            shard: its entry of `manifest.shards`.
            index: its samples' rows of the index.
        """
        store = cls.__new__(cls)
        store.folder, store.manifest, store.index = folder, {**manifest, "shards": [shard]}, index
        return store

    def numbers(self, split: str) -> list[int]:
        """Sample numbers of one split, in order of sample_id, so that shards' order does not matter."""
        chosen = [i for i, row in enumerate(self.index) if row["split"] == split]
        return sorted(chosen, key=lambda i: self.index[i]["sample_id"])

    def lengths(self, numbers: list[int]) -> list[int]:
        """Tokens of each sample."""
        return [self.index[i]["length"] for i in numbers]

    def __getitem__(self, number: int) -> StoredSample:
        """Read one sample."""
        row = self.index[number]
        shard = self._shards[row["shard"]]
        tokens = slice(row["start"], row["start"] + row["length"])
        lasts = slice(row["last_start"], row["last_start"] + row["last_length"])
        part = {name: shard.get_slice(name)[tokens] for name in ("input_ids", "loss_mask", "aux_states")}
        last_rows = shard.get_slice("last_rows")[lasts] - row["start"]
        return StoredSample(
            sample_id=row["sample_id"],
            input_ids_T=part["input_ids"],
            loss_mask_T=part["loss_mask"],
            aux_states_TAH=part["aux_states"],
            last_states_MH=shard.get_slice("last_states")[lasts],
            last_rows_M=last_rows,
        )

    def __iter__(self) -> Iterator[StoredSample]:
        """All samples, in index order."""
        return (self[i] for i in range(len(self.index)))

    @cached_property
    def _shards(self) -> list[Any]:
        shards = []
        for shard in self.manifest["shards"]:
            with reading(self.folder / shard["file"], "Run `draftsmith capture --fresh`."):
                shards.append(safe_open(self.folder / shard["file"], "pt"))
        return shards
