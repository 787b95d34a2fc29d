"""Reads the hidden-state store; the public door to it for training and evaluation.

Shards are memory-mapped: opening costs nothing, a sample's tensors are views, and its bytes are copied once, to where
they are put together into a batch (`data/batching.py`).
"""

import ctypes
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import pyarrow.parquet as pq
from pydantic import BaseModel, Field, NonNegativeInt, ValidationError
from safetensors import safe_open
from torch import Tensor

from draftsmith.core.damage import reading
from draftsmith.core.errors import UserError
from draftsmith.core.fp8_states import decode
from draftsmith.core.manifest import MANIFEST, require_manifest
from draftsmith.core.store import INDEX, INDEX_SCHEMA, LAST_TENSORS, TOKEN_TENSORS

REBUILD_INDEX = "`draftsmith store repair` makes it again from the shards."
_LIBC = ctypes.CDLL(None)  # Python's own madvise takes only maps that Python made
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@dataclass(frozen=True)
class StoredSample:
    """One captured sample of T tokens, M of them with a label.

    Attributes:
        sample_id: its id in `samples/`.
        input_ids_T: int32.
        loss_mask_T: uint8, 1 on reply tokens.
        aux_states_TAH: auxiliary states in bfloat16, columns in the order of the manifest's layer_ids.
        last_states_MH: states before the final norm in bfloat16, of the rows `last_rows_M`.
        last_rows_M: int32, rows of this sample whose next token is a reply token.
    """

    sample_id: str
    input_ids_T: Tensor
    loss_mask_T: Tensor
    aux_states_TAH: Tensor
    last_states_MH: Tensor
    last_rows_M: Tensor


class _Shard(BaseModel):
    file: str = Field(pattern=r"^shard-\d+\.safetensors$")
    bytes: NonNegativeInt
    samples: NonNegativeInt
    tokens: NonNegativeInt


class _Contents(BaseModel):
    """What every reader of a store's manifest relies on."""

    shards: list[_Shard]
    layer_ids: list[int]
    storage: Literal["bf16", "fp8"]


def store_manifest(folder: Path, needed_by: str) -> dict[str, Any]:
    """The manifest of a complete store.

    Raises:
        UserError: capture has not been run to its end, or the manifest is not one of a store.
    """
    manifest = require_manifest(folder, "capture", needed_by)
    try:
        files = [shard.file for shard in _Contents.model_validate(manifest).shards]
    except ValidationError as error:
        first = error.errors()[0]
        what = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    else:
        if len(set(files)) == len(files):
            return manifest
        what = "a shard is named twice"
    raise UserError(
        f"{folder / MANIFEST}: damaged, or not of a hidden-state store ({what}).",
        "Put the right one back; the shards themselves may be whole. Else run `draftsmith capture --fresh`.",
    )


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
        self.manifest = store_manifest(folder, needed_by)
        with reading(folder / INDEX, REBUILD_INDEX):
            self.index: list[dict[str, Any]] = pq.read_table(folder / INDEX, schema=INDEX_SCHEMA).to_pylist()
        for shard in self.manifest["shards"]:
            file = folder / shard["file"]
            if not file.is_file() or file.stat().st_size != shard["bytes"]:
                raise UserError(
                    f"{file}: missing or not {shard['bytes']} bytes long.",
                    "`draftsmith store repair` sets it aside, and `draftsmith capture` makes its samples again.",
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

    def stored(self, number: int) -> dict[str, Tensor]:
        """One sample's tensors as they lie on disk (core/store.py): views into the mapped shard.

        `last_rows` alone is a copy: it counts from the sample's own first row.
        """
        row = self.index[number]
        shard = self._shards[row["shard"]]
        tokens = slice(row["start"], row["start"] + row["length"])
        lasts = slice(row["last_start"], row["last_start"] + row["last_length"])
        fp8 = self.manifest["storage"] == "fp8"
        parts = {
            name: shard.get_slice(name)[rows]
            for names, rows in ((TOKEN_TENSORS, tokens), (LAST_TENSORS, lasts))
            for name in names
            if fp8 or not name.endswith("_scales")
        }
        return {**parts, "last_rows": shard.get_slice("last_rows")[lasts] - row["start"]}

    def __getitem__(self, number: int) -> StoredSample:
        """Read one sample; its states are decoded where they are stored in fp8."""
        parts = self.stored(number)
        aux, last = (
            decode(parts[f"{name}_states"], parts[f"{name}_scales"]) if f"{name}_scales" in parts
            else parts[f"{name}_states"]
            for name in ("aux", "last")
        )  # fmt: skip
        return StoredSample(
            sample_id=self.index[number]["sample_id"],
            input_ids_T=parts["input_ids"],
            loss_mask_T=parts["loss_mask"],
            aux_states_TAH=aux,
            last_states_MH=last,
            last_rows_M=parts["last_rows"],
        )

    def will_need(self, numbers: list[int]) -> None:
        """Let the system read these samples' states from the disk into its cache, without waiting for them."""
        for number in numbers:
            parts = self.stored(number)
            for states in (parts["aux_states"], parts["last_states"]):
                before = states.data_ptr() % mmap.PAGESIZE
                _LIBC.madvise(states.data_ptr() - before, states.nbytes + before, mmap.MADV_WILLNEED)

    def __iter__(self) -> Iterator[StoredSample]:
        """All samples, in index order."""
        return (self[i] for i in range(len(self.index)))

    @cached_property
    def _shards(self) -> list[Any]:
        shards = []
        for shard in self.manifest["shards"]:
            with reading(self.folder / shard["file"], "Run `draftsmith store repair`, then `draftsmith capture`."):
                shards.append(safe_open(self.folder / shard["file"], "pt"))
        return shards
