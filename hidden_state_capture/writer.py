"""Packs samples into shards on a thread of its own; a shard is on disk whole, with its index rows, or not at all.

A shard is committed by its sidecar `shard-NNNNN.json` (index rows and checksum), written after the shard itself.
After a kill, shards with a sidecar are kept and their samples are not captured again; anything else is removed.
"""

import hashlib
import json
import queue
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.core.atomic import remove_leftovers, sha256_file, write_atomic, write_json
from draftsmith.core.damage import reading
from draftsmith.core.fp8_states import encode
from draftsmith.core.manifest import MANIFEST
from draftsmith.core.store import LAST_TENSORS, TOKEN_TENSORS, shard_name


@dataclass
class SampleStates:
    """One captured sample, on its way to the disk.

    Attributes:
        sample_id: whose states these are.
        input_ids: T token ids.
        loss_spans: [start, end) of every reply.
        states_TLH: [T, A + 1, H] on the host, the last column being the state before the final norm.
        ready: blocks until `states_TLH` has been filled (a device copy may still be running).
        save_to: write this sample alone to a file instead of into a shard (the probe).
        slot: its place in a spool (see `SpoolWriter`).
    """

    sample_id: str
    input_ids: list[int]
    loss_spans: list[list[int]]
    states_TLH: Tensor
    ready: Callable[[], object]
    save_to: str | None = None
    slot: dict[str, Any] | None = None

    @property
    def nbytes(self) -> int:
        """Host memory it holds."""
        return self.states_TLH.nbytes


class ShardWriter:
    """Thread-safe for one producer: `put` until done, then `flush`."""

    def __init__(self, folder: Path, shard_bytes: int, pending_bytes: int, storage: str = "bf16") -> None:
        self.folder, self.shard_bytes, self.pending_bytes, self.storage = folder, shard_bytes, pending_bytes, storage
        folder.mkdir(parents=True, exist_ok=True)
        remove_uncommitted(folder)
        self.written = 0
        self.rejected: list[dict[str, str]] = []
        self._next_shard = next_shard(folder)
        self._open: list[dict[str, Any]] = []
        self._open_bytes = 0
        self._queue: queue.Queue[SampleStates | threading.Event] = queue.Queue()
        self._pending = 0
        self._room = threading.Condition()
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="draftsmith-shard-writer", daemon=True).start()

    def put(self, sample: SampleStates) -> None:
        """Queue a sample; waits while `pending_bytes` are in flight.

        Raises:
            RuntimeError: the writer has failed; the message is its reason.
        """
        with self._room:
            self._room.wait_for(
                lambda: self._error or self._pending == 0 or self._pending + sample.nbytes <= self.pending_bytes
            )
            self.check()
            self._pending += sample.nbytes
        self._queue.put(sample)

    def flush(self) -> None:
        """Wait until everything queued is on disk, the open shard included."""
        done = threading.Event()
        self._queue.put(done)
        done.wait()
        self.check()

    def check(self) -> None:
        """Raise the writer's error, if it has failed."""
        if self._error is not None:
            raise RuntimeError(f"hidden-state writer: {self._error}") from self._error

    def _run(self) -> None:
        while True:
            item = self._queue.get()
            try:
                if self._error is None:
                    self._seal() if isinstance(item, threading.Event) else self._add(item)
            except BaseException as error:  # kept for the producer: an error in this thread must stop the run
                self._fail(error)
            if isinstance(item, threading.Event):
                item.set()
                continue
            with self._room:
                self._pending -= item.nbytes
                self._room.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._room:
            self._error = error
            self._room.notify_all()

    def _add(self, sample: SampleStates) -> None:
        sample.ready()
        tensors = split_states(sample)
        if sample.save_to:
            write_atomic(Path(sample.save_to), lambda tmp: save_file(tensors, tmp))
        elif reason := unusable(tensors):
            self.rejected.append({"sample_id": sample.sample_id, "reason": reason})
        else:
            tensors = stored(tensors, self.storage)
            self._open.append({"sample_id": sample.sample_id, **tensors})
            self._open_bytes += sum(t.nbytes for t in tensors.values())
            if self._open_bytes >= self.shard_bytes:
                self._seal()
        self.written += 1

    def _seal(self) -> None:
        if not self._open:
            return
        write_shard(self.folder / shard_name(self._next_shard), self._open)
        self._open, self._open_bytes = [], 0
        self._next_shard += 1


def write_shard(path: Path, samples: list[dict[str, Any]], **more: Any) -> None:
    """Write samples into one shard and then, as its sidecar, the index rows and `more`."""
    rows, tensors = pack(samples)
    write_atomic(path, lambda tmp: save_file(tensors, tmp))
    shard = {"file": path.name, "sha256": sha256_file(path), "bytes": path.stat().st_size}
    shard |= {"samples": len(rows), "tokens": int(tensors["input_ids"].numel())}
    write_json(path.with_suffix(".json"), {"shard": shard, "rows": rows, **more})


def split_states(sample: SampleStates) -> dict[str, Tensor]:
    """One sample in the store's tensors; `last_rows` count from its own first row."""
    ids = torch.tensor(sample.input_ids, dtype=torch.int32)
    states = sample.states_TLH.to(torch.bfloat16)
    if states.shape[0] != len(ids):
        raise RuntimeError(f"sample {sample.sample_id}: {states.shape[0]} state rows for {len(ids)} tokens")
    mask = torch.zeros(len(ids), dtype=torch.uint8)
    for start, end in sample.loss_spans:
        mask[start:end] = 1
    rows = mask[1:].nonzero().squeeze(1)
    return {
        "input_ids": ids,
        "loss_mask": mask,
        "aux_states": states[:, :-1].contiguous(),
        "last_states": states[rows, -1].contiguous(),
        "last_rows": rows.to(torch.int32),
    }


def unusable(tensors: dict[str, Tensor]) -> str | None:
    """Why the states cannot be used: non-finite, or a layer that is zero throughout."""
    aux, last = tensors["aux_states"], tensors["last_states"]
    if not (torch.isfinite(aux).all() and torch.isfinite(last).all()):
        return "non-finite states"
    if bool((aux == 0).all(dim=(0, 2)).any()) or (last.numel() > 0 and not last.any()):
        return "a layer is all zero"
    return None


def stored(tensors: dict[str, Tensor], storage: str) -> dict[str, Tensor]:
    """A sample's tensors as they lie on disk."""
    if storage == "bf16":
        return tensors
    aux, aux_scales = encode(tensors["aux_states"])
    last, last_scales = encode(tensors["last_states"])
    coded = {"aux_states": aux, "aux_scales": aux_scales, "last_states": last, "last_scales": last_scales}
    return {**tensors, **coded}


def pack(samples: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Concatenate samples into one shard's tensors, with an index row each."""
    rows, start, last_start, last_rows = [], 0, 0, []
    for number, s in enumerate(samples):
        length, last_length = len(s["input_ids"]), len(s["last_rows"])
        rows.append(
            {
                "sample_id": s["sample_id"], "row": number, "start": start, "length": length,
                "last_start": last_start, "last_length": last_length,
                "supervised_tokens": int(s["loss_mask"].sum()), "sha256": sample_sha256(s),
            }
        )  # fmt: skip
        last_rows.append(s["last_rows"] + start)
        start, last_start = start + length, last_start + last_length
    names = [name for name in (*TOKEN_TENSORS, *LAST_TENSORS) if name in samples[0]]
    tensors = {name: torch.cat([s[name] for s in samples]) for name in names}
    tensors["last_rows"] = torch.cat(last_rows)
    tensors["sample_offsets"] = torch.tensor([r["start"] for r in rows] + [start], dtype=torch.int64)
    return rows, tensors


def sample_sha256(tensors: dict[str, Any]) -> str:
    """Hex SHA-256 of a sample's tensors as they lie on disk; `last_rows` follow from its loss_mask."""
    digest = hashlib.sha256()
    for name in (*TOKEN_TENSORS, *LAST_TENSORS):
        if name in tensors:
            digest.update(tensors[name].contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def committed_shards(folder: Path) -> list[dict[str, Any]]:
    """Sidecars of the shards that are whole, in order."""
    sidecars = []
    for path in sorted(folder.glob("shard-*.json")):
        with reading(path, "Run `draftsmith capture --fresh`."):
            sidecars.append(json.loads(path.read_text(encoding="utf-8")))
    return sidecars


def next_shard(folder: Path) -> int:
    """Number of the next shard: past the highest there is, since `store repair` leaves gaps."""
    taken = [int(m[1]) for s in committed_shards(folder) if (m := re.match(r"shard-(\d+)", s["shard"]["file"]))]
    return max(taken, default=-1) + 1


def remove_uncommitted(folder: Path) -> None:
    """Delete what a kill left beside the whole shards; only before a writer starts, and never in a finished store."""
    assert not (folder / MANIFEST).exists()
    remove_leftovers(folder)
    kept = {s["shard"]["file"] for s in committed_shards(folder)}
    for orphan in (p for p in folder.glob("shard-*.safetensors") if p.name not in kept):
        orphan.unlink()
