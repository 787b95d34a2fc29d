"""One shard on its way to the disk: rows go straight into the file; it is in the store whole, or not at all.

The auxiliary states are the first tensor of the file, so they are written where they stay, as they come; everything
else is small and follows when the shard is sealed. A shard is committed by its sidecar `shard-NNNNN.json` (index rows
and checksum), written after the shard itself. After a kill, shards with a sidecar are kept and their samples are not
captured again; anything else is removed.
"""

import ctypes
import hashlib
import itertools
import json
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from draftsmith.core.atomic import TMP_MARK, fsync_path, remove_leftovers, write_text
from draftsmith.core.damage import reading
from draftsmith.core.manifest import MANIFEST
from draftsmith.core.store import HEADER_BYTES, LAST_TENSORS, TOKEN_TENSORS, shard_name
from draftsmith.hidden_state_capture.gather import SampleRows

_DTYPES = {
    torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3", torch.float32: "F32",
    torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8",
}  # fmt: skip
# Whatever follows the states, by falling alignment; a hidden size is a multiple of 8.
_AFTER = ("last_states", "sample_offsets", "aux_scales", "last_scales", "last_rows", "input_ids", "loss_mask")
_HASHED = (*TOKEN_TENSORS, *LAST_TENSORS)


class Tail:
    """Host memory that grows to what the states' companions of one shard take, and is used again for the next."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, dtype=np.uint8)
        self.size = 0

    def append(self, data: np.ndarray) -> None:
        """Copy bytes in."""
        if self.size + len(data) > len(self._bytes):
            grown = np.empty(max(2 * len(self._bytes), self.size + len(data)), dtype=np.uint8)
            grown[: self.size] = self._bytes[: self.size]
            self._bytes = grown
        self._bytes[self.size : self.size + len(data)] = data
        self.size += len(data)

    def view(self) -> np.ndarray:
        """What was copied in."""
        return self._bytes[: self.size]


_opened = itertools.count()


class OpenShard:
    """A shard that samples are added to; `seal` commits it, `discard` leaves nothing.

    Several threads may add samples at once: only the places in the file are given out one after another.
    """

    def __init__(self, folder: Path, number: int, lasts: Tail) -> None:
        self.path = folder / shard_name(number)
        # A name of its own: a failed writer's thread may still be removing what it had under this number.
        self._tmp = folder / f"{TMP_MARK}{os.getpid()}-{next(_opened)}-{self.path.name}"
        self._fd = os.open(self._tmp, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        self.lasts = lasts
        self.lasts.size = 0
        self._parts: dict[str, list[np.ndarray]] = {name: [] for name in _AFTER if name != "last_states"}
        self._like: dict[str, tuple[torch.dtype, list[int]]] = {}  # dtype, and shape after rows
        self._aux_bytes = 0
        self._lock = threading.Lock()
        self.rows: list[dict[str, Any]] = []
        self.tokens = self.last_tokens = self.nbytes = 0

    def add(self, sample: SampleRows, states: dict[str, Tensor]) -> None:
        """Write one sample's states and scales: auxiliary ones of all rows, last ones of those with a label.

        Several threads may add.
        """
        data = {name: _bytes(tensor) for name, tensor in states.items()}
        ids, mask = sample.input_ids_T.view(np.uint8), sample.loss_mask_T
        sha256 = _digest(data | {"input_ids": ids, "loss_mask": mask})
        with self._lock:
            self.rows.append(
                {
                    "sample_id": sample.sample_id, "row": len(self.rows), "start": self.tokens, "length": len(mask),
                    "last_start": self.last_tokens, "last_length": len(sample.last_rows_M),
                    "supervised_tokens": int(mask.sum()), "sha256": sha256,
                }
            )  # fmt: skip
            at = HEADER_BYTES + self._aux_bytes
            self._aux_bytes += len(data["aux_states"])
            self.lasts.append(data["last_states"])
            for name in data.keys() & {"aux_scales", "last_scales"}:
                self._parts[name].append(data[name].copy())
            self._parts["input_ids"].append(ids)
            self._parts["loss_mask"].append(mask)
            self._parts["last_rows"].append((sample.last_rows_M + self.tokens).astype(np.int32).view(np.uint8))
            self._like = {name: (t.dtype, list(t.shape[1:])) for name, t in states.items()}  # no view: it holds a batch
            self.tokens += len(mask)
            self.last_tokens += len(sample.last_rows_M)
            self.nbytes += sum(map(len, data.values())) + ids.nbytes + mask.nbytes + 4 * len(sample.last_rows_M)
        _write(self._fd, data["aux_states"], at)
        _start_writeback(self._fd, at, len(data["aux_states"]))

    def seal(self, **more: Any) -> None:
        """Finish the file, put it in its place and commit it; `more` is said in its sidecar."""
        starts = [row["start"] for row in self.rows] + [self.tokens]
        self._parts["sample_offsets"] = [np.array(starts, dtype=np.int64).view(np.uint8)]
        at, ends = HEADER_BYTES + self._aux_bytes, {"aux_states": self._aux_bytes}
        for name in _AFTER:
            for part in [self.lasts.view()] if name == "last_states" else self._parts[name]:
                _write(self._fd, part, at)
                at += len(part)
            ends[name] = at - HEADER_BYTES
        _write(self._fd, np.frombuffer(self._header(ends), dtype=np.uint8), 0)
        _start_writeback(self._fd, 0, at)
        with mmap.mmap(self._fd, 0, prot=mmap.PROT_READ) as whole:
            sha256 = hashlib.sha256(whole).hexdigest()
        os.fsync(self._fd)
        self._close()
        os.replace(self._tmp, self.path)
        fsync_path(self.path.parent)
        entry = {
            "file": self.path.name,
            "sha256": sha256,
            "bytes": at,
            "samples": len(self.rows),
            "tokens": self.tokens,
        }
        sidecar = self.path.with_suffix(".json")
        try:
            write_text(sidecar, json.dumps({"shard": entry, "rows": self.rows, **more}))
        except BaseException:  # on a disk that is full, the reason needs the room of what is not committed
            sidecar.unlink(missing_ok=True)
            self.path.unlink()
            raise

    def give_room(self) -> None:
        """Free what has been written, from any thread; the shard is lost and has to be discarded by its own."""
        self._tmp.unlink(missing_ok=True)
        with suppress(OSError):  # it was closed this moment
            os.ftruncate(self._fd, 0)

    def discard(self) -> None:
        """Remove what has been written."""
        self._close()
        self._tmp.unlink(missing_ok=True)

    def _close(self) -> None:
        if self._fd >= 0:  # once: another thread may have been given the number since
            os.close(self._fd)
            self._fd = -1

    def _header(self, ends: dict[str, int]) -> bytes:
        """Of safetensors: JSON, padded with spaces to where the data begin."""
        like = self._like
        leading = {name: self.last_tokens if name.startswith("last") else self.tokens for name in like}
        tensors = {name: (dtype, [leading[name], *rest]) for name, (dtype, rest) in like.items()} | {
            "sample_offsets": (torch.int64, [len(self.rows) + 1]),
            "last_rows": (torch.int32, [self.last_tokens]),
            "input_ids": (torch.int32, [self.tokens]),
            "loss_mask": (torch.uint8, [self.tokens]),
        }
        header, begin = {}, 0
        for name, end in ends.items():
            if name in tensors:
                dtype, shape = tensors[name]
                header[name] = {"dtype": _DTYPES[dtype], "shape": shape, "data_offsets": [begin, end]}
            begin = end
        text = json.dumps(header).encode().ljust(HEADER_BYTES - 8)
        assert len(text) == HEADER_BYTES - 8
        return len(text).to_bytes(8, "little") + text


def sample_sha256(tensors: dict[str, Tensor]) -> str:
    """What the index calls the sha256 of a sample's tensors as they lie on disk; `last_rows` follow from its loss_mask.

    It is the SHA-256, in hex, of the XXH3-128 digests of the tensors: SHA-256 itself is taken of whole shards, and a
    second pass of it over all bytes would cost as much as all the rest of the writing.
    """
    return _digest({name: _bytes(tensors[name]) for name in _HASHED if name in tensors})


def has_sha256(tensors: dict[str, Tensor], sha256: str) -> bool:
    """Whether `sha256`, from an index, is that of a sample's tensors, by `sample_sha256` or as stores once had it.

    Earlier versions wrote the SHA-256 of the bytes themselves. A store may have both: of a capture that was begun then
    and ended now, of a merge, of a repair.
    """
    if sample_sha256(tensors) == sha256:
        return True
    whole = hashlib.sha256()
    for name in _HASHED:
        if name in tensors:
            whole.update(_bytes(tensors[name]).data)
    return whole.hexdigest() == sha256


def committed_shards(folder: Path) -> list[dict[str, Any]]:
    """Sidecars of the shards that are whole, in order."""
    return list(_sidecars(folder, "shard-*.json"))


def rejected_samples(folder: Path) -> list[dict[str, str]]:
    """Samples whose states could not be used, with reasons, of every run so far."""
    return [entry for sidecar in _sidecars(folder, "rejected-*.json") for entry in sidecar]


def remove_uncommitted(folder: Path) -> None:
    """Delete what a kill left beside the whole shards; only before a writer starts, and never in a finished store."""
    assert not (folder / MANIFEST).exists()
    remove_leftovers(folder)
    kept = {s["shard"]["file"] for s in committed_shards(folder)}
    for orphan in (p for p in folder.glob("shard-*.safetensors") if p.name not in kept):
        orphan.unlink()


def next_number(folder: Path) -> int:
    """The first number that no shard of the folder has."""
    numbers = [int(p.stem.split("-")[1]) for p in folder.glob("*-*.json") if p.stem.split("-")[1].isdigit()]
    return max(numbers, default=-1) + 1


def _sidecars(folder: Path, pattern: str) -> Iterator[Any]:
    for path in sorted(folder.glob(pattern)):
        with reading(path, "Run `draftsmith capture --fresh`."):
            yield json.loads(path.read_text(encoding="utf-8"))


def _bytes(tensor: Tensor) -> np.ndarray:
    array: np.ndarray = tensor.contiguous().view(torch.uint8).reshape(-1).numpy()
    return array


def _digest(data: dict[str, np.ndarray]) -> str:
    digests = [xxhash.xxh3_128_digest(data[name].data) for name in _HASHED if name in data]
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _write(fd: int, data: np.ndarray, at: int) -> None:
    """`pwrite` all of it: one call may write less."""
    view = data.data
    while view.nbytes:
        written = os.pwrite(fd, view, at)
        view, at = view[written:], at + written


def _start_writeback(fd: int, at: int, nbytes: int) -> None:
    """Let the disk begin with what was written: else it waits for `fsync`, and then everybody waits for it."""
    if _sync_file_range is not None:  # a hint: what it cannot do, `fsync` does
        _sync_file_range(fd, ctypes.c_int64(at), ctypes.c_int64(nbytes), ctypes.c_uint(_SYNC_FILE_RANGE_WRITE))


_SYNC_FILE_RANGE_WRITE = 2
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Linux alone has it
