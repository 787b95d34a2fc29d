"""The spool: a bounded folder through which capture feeds training while both run (`capture.mode: spool`).

    shard-NNNNN.safetensors      samples of consecutive optimizer steps, of all ranks (format: core/store.py)
    shard-NNNNN.json             commits it: steps, index rows, rejected samples, what it was made from
    trainer.json, capture.json   what each side works from, and where it is
    trainer.lock, capture.lock   held by a living process of each side: a death is seen whatever its cause

Samples and config alone decide what a shard holds, and in which order (`SpoolPlan`). Capture begins shard w when
training is done with every shard that would not fit beside it, and deletes those then, not before. So the folder never
holds more than `spool_bytes`, and what a killed training needs again is still there, or is captured again.
"""

import fcntl
import json
import os
import time
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from draftsmith.core.atomic import sha256_json
from draftsmith.core.config import CaptureConfig, Config
from draftsmith.core.errors import UserError
from draftsmith.core.store import HEADER_BYTES

TRAINER, CAPTURE = "trainer", "capture"
POLL_SECONDS = 0.05
# A reader of a lock holds it for an instant; who takes it tries again for this long.
_TAKE_SECONDS = 2.0
# Upper bounds of what surrounds the states: header and the sidecar's own, and a sample's row in the sidecar.
_HEADER_BYTES, _ROW_BYTES = HEADER_BYTES + 512, 512


@dataclass(frozen=True)
class SpoolShard:
    """Shard `number` holds the samples of steps first .. end - 1, in at most `nbytes` with its sidecar."""

    number: int
    first: int
    end: int
    nbytes: int


class SpoolPlan:
    """Which samples each shard holds, and what has to go before it is begun.

    Attributes:
        steps: steps[s][rank]: sample numbers, as in `plan_steps`; a step is one batch of every rank.
        num_samples: of one epoch.
        shards: in the order they are made and used.
        beside: beside[w]: the first shard that may still be there when shard w is begun.
    """

    def __init__(self, steps: list[list[list[int]]], nbytes: list[int], capture: CaptureConfig, each: int = 1) -> None:
        """Lay the plan out.

        Args:
            steps: of the whole training.
            nbytes: of every sample, on disk.
            capture: shard and spool sizes.
            each: steps that make an optimizer step; a shard holds whole ones.

        Raises:
            UserError: the spool could not hold two shards.
        """
        assert capture.spool_bytes is not None
        self.steps, self.num_samples, self.shards = steps, len(nbytes), _cut(steps, nbytes, capture.shard_bytes, each)
        self._ends = [shard.end for shard in self.shards]
        _refuse_too_small(self.shards, capture)
        self.beside: list[int] = []
        oldest, held = 0, 0
        for shard in self.shards:
            held += shard.nbytes
            while held > capture.spool_bytes:
                held -= self.shards[oldest].nbytes
                oldest += 1
            self.beside.append(oldest)

    def shard_of(self, step: int) -> SpoolShard:
        """The shard with the samples of an optimizer step."""
        return self.shards[bisect_right(self._ends, step)]

    def samples(self, shard: SpoolShard) -> list[int]:
        """Numbers of a shard's samples, in the order they are used."""
        return [n for step in self.steps[shard.first : shard.end] for share in step for n in share]


def _cut(steps: list[list[list[int]]], nbytes: list[int], shard_bytes: int, each: int) -> list[SpoolShard]:
    """Whole optimizer steps, until a shard has reached its size."""
    shards: list[SpoolShard] = []
    first, size = 0, _HEADER_BYTES
    for step, shares in enumerate(steps):
        size += sum(nbytes[n] for share in shares for n in share)
        if (size >= shard_bytes and (step + 1) % each == 0) or step + 1 == len(steps):
            shards.append(SpoolShard(len(shards), first, step + 1, size))
            first, size = step + 1, _HEADER_BYTES
    return shards


def _refuse_too_small(shards: list[SpoolShard], capture: CaptureConfig) -> None:
    """Two shards must fit: the one that is trained on, and the one that is made meanwhile."""
    assert capture.spool_bytes is not None
    pairs = [a.nbytes + b.nbytes for a, b in pairwise(shards)] or [s.nbytes for s in shards]
    if max(pairs, default=0) <= capture.spool_bytes:
        return
    largest = max(shards, key=lambda s: s.nbytes)
    raise UserError(
        f"capture.spool_bytes is {capture.spool_bytes:,}, and two shards of this run take up to {max(pairs):,} bytes "
        f"(the largest: {largest.nbytes:,} bytes; a shard holds whole optimizer steps).",
        f"Set capture.spool_bytes to {max(pairs)} or more, or lower capture.shard_bytes or train.tokens_per_batch.",
    )


def sample_nbytes(sample_id: str, tokens: int, labels: int, per_token: int, per_label: int) -> int:
    """At most the bytes that a sample takes in a shard and its sidecar.

    Args:
        sample_id: its id.
        tokens: its length.
        labels: of its rows, those that keep their last state.
        per_token: bytes of a token, from `bytes_per_row`.
        per_label: bytes of a label's row, from there too.
    """
    return tokens * per_token + labels * per_label + _ROW_BYTES + len(sample_id.encode())


def spool_inputs(config: Config, states: dict[str, Any]) -> dict[str, Any]:
    """What both sides must agree on.

    Args:
        config: of one side.
        states: manifest of `hidden_states/`, checked against it.
    """
    return {
        "states": states["inputs"],
        "shard_bytes": config.capture.shard_bytes,
        "tokens_per_batch": config.train.tokens_per_batch,
        "grad_accum_steps": config.train.grad_accum_steps,
        "epochs": config.train.epochs,
        "seed": config.run.seed,
    }


def made_from(inputs: dict[str, Any], world_size: int) -> str:
    """Fingerprint of a shard: one made from anything else is never used."""
    return sha256_json({**inputs, "world_size": world_size})


# ---- the two sides' files --------------------------------------------------------------------------------------------


@contextmanager
def held(folder: Path, side: str) -> Iterator[None]:
    """Hold a side's lock for the length of the block, or until this process dies.

    Raises:
        UserError: another process holds it.
    """
    file = os.open(folder / f"{side}.lock", os.O_RDWR | os.O_CREAT, 0o644)
    give_up = time.monotonic() + _TAKE_SECONDS
    try:
        while not _try_lock(file, fcntl.LOCK_EX):
            if time.monotonic() > give_up:
                raise UserError(f"another {side} works on {folder}.", "Wait for it to end, or end it.")
            time.sleep(POLL_SECONDS)
        yield
    finally:
        os.close(file)


def is_alive(folder: Path, side: str) -> bool:
    """Whether a living process holds a side's lock."""
    try:
        file = os.open(folder / f"{side}.lock", os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return not _try_lock(file, fcntl.LOCK_SH)
    finally:
        os.close(file)


def _try_lock(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def read_json(path: Path) -> dict[str, Any] | None:
    """A file of the other side's, which writes it whole; None: not there (any more)."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return found


def folder_bytes(folder: Path) -> int:
    """Bytes of all files in the spool as it is now; files come and go meanwhile."""
    total = 0
    for entry in os.scandir(folder):
        try:
            total += entry.stat().st_size
        except FileNotFoundError:
            continue
    return total
