"""Is every byte of a store what was captured? Shards, samples and index against their checksums and one another.

Works on a damaged store: every fault becomes a line that names the shard or the sample, never an exception.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.core.atomic import sha256_file
from draftsmith.core.damage import reading
from draftsmith.core.fp8_states import FP8, decode
from draftsmith.core.manifest import manifest_hash, read_manifest
from draftsmith.core.progress import meter
from draftsmith.core.samples import iter_samples
from draftsmith.core.store import INDEX, INDEX_SCHEMA, LAST_TENSORS, TOKEN_TENSORS
from draftsmith.hidden_state_capture.reader import REBUILD_INDEX, store_manifest
from draftsmith.hidden_state_capture.shard import has_sha256


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong.

    Attributes:
        what: in words.
        shard: file whose states cannot be trusted; None: of the store as a whole.
        sample_id: where it concerns one sample.
        missing: the sample is in no shard and can be captured.
    """

    what: str
    shard: str | None = None
    sample_id: str | None = None
    missing: bool = False


@dataclass(frozen=True)
class Verdict:
    """What `verify_store` found.

    Attributes:
        manifest: of the store.
        rows: rows of the index, by shard file.
        faults: empty where the store is whole.
        against_samples: it was compared with `samples/` too.
        kept: samples of damaged shards that a repair has put into shards of their own.
    """

    manifest: dict[str, Any]
    rows: dict[str, list[dict[str, Any]]]
    faults: list[Fault] = field(default_factory=list)
    against_samples: bool = False
    kept: int = 0

    @property
    def bad_shards(self) -> list[str]:
        """Files with a fault, in the manifest's order."""
        named = {f.shard for f in self.faults}
        return [s["file"] for s in self.manifest["shards"] if s["file"] in named]


def verify_store(folder: Path, samples: Path | None = None, jobs: int | None = None) -> Verdict:
    """Read all of a complete store and compare it with its manifest, its index and the samples.

    Args:
        folder: the store.
        samples: `samples/` of the run; None: the store alone.
        jobs: shards that are read side by side; None: one a core, 8 at most.

    Raises:
        UserError: there is no complete store, or its index cannot be read.
    """
    manifest = store_manifest(folder, "store verify")
    with reading(folder / INDEX, REBUILD_INDEX):
        index = pq.read_table(folder / INDEX, schema=INDEX_SCHEMA).to_pylist()
    shards = manifest["shards"]
    rows: dict[str, list[dict[str, Any]]] = {s["file"]: [] for s in shards}
    faults = []
    for row in index:
        if 0 <= row["shard"] < len(shards):
            rows[shards[row["shard"]]["file"]].append(row)
        else:
            faults.append(Fault(f"its shard {row['shard']} is not in the manifest", sample_id=row["sample_id"]))
    faults += _repeated(rows)
    with (
        meter("verify", len(shards), "shards") as shown,
        ThreadPoolExecutor(jobs or min(8, os.cpu_count() or 1)) as pool,
    ):
        wanted = _wanted(samples, manifest) if samples else None
        for found in pool.map(lambda shard: _check_shard(folder, manifest, shard, rows[shard["file"]], wanted), shards):
            faults += found
            shown.advance(faults=str(len(faults)))
    if samples and wanted is None:
        faults.append(Fault(f"made from other samples than {samples} holds"))
    faults += _missing(wanted, manifest, index)
    return Verdict(manifest, rows, faults, wanted is not None)


def _repeated(rows: dict[str, list[dict[str, Any]]]) -> Iterator[Fault]:
    owner: dict[str, str] = {}
    for file, mine in rows.items():
        for row in mine:
            if row["sample_id"] in owner:
                yield Fault(f"the sample is in {owner[row['sample_id']]} too", file, row["sample_id"])
            owner.setdefault(row["sample_id"], file)


@dataclass(frozen=True)
class _Wanted:
    """Of a sample in `samples/`: what the store has to agree with; tokens and mask as one hash, to save memory."""

    split: str
    source: str
    digest: int


def _wanted(samples: Path, manifest: dict[str, Any]) -> dict[str, _Wanted] | None:
    """Every sample of the run, or None where the store was made from other samples."""
    if not read_manifest(samples) or manifest_hash(samples) != manifest["inputs"]["samples_manifest_sha256"]:
        return None
    return {
        s.sample_id: _Wanted(s.split, s.source, hash((tuple(s.input_ids), s.loss_mask.tobytes())))
        for s in iter_samples(samples)
    }


def _missing(
    wanted: dict[str, _Wanted] | None, manifest: dict[str, Any], index: list[dict[str, Any]]
) -> Iterator[Fault]:
    left_out = {r["sample_id"] for key in ("rejected", "too_long") for r in manifest.get(key, [])}
    known = {row["sample_id"] for row in index} | left_out
    # A part of a capture has its share of the samples, and in spool mode a store has the held-out ones.
    if manifest.get("part") or manifest.get("mode") == "spool":
        return
    for sample_id in wanted or ():
        if sample_id not in known:
            yield Fault("not in the store", sample_id=sample_id, missing=True)


def _check_shard(
    folder: Path,
    manifest: dict[str, Any],
    shard: dict[str, Any],
    rows: list[dict[str, Any]],
    wanted: dict[str, _Wanted] | None,
) -> list[Fault]:
    """All faults of one shard."""
    file = folder / shard["file"]
    try:
        if not file.is_file():
            return [Fault("the file is missing", file.name)]
        if (size := file.stat().st_size) != shard["bytes"]:
            return [Fault(f"{size} bytes long, not {shard['bytes']}", file.name)]
        if sha256_file(file) != shard["sha256"]:
            return [Fault("its bytes are not those that were written (sha256)", file.name)]
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        return [Fault(f"cannot be read: {error}", file.name)]
    shapes = shape_faults(manifest, shard, rows, tensors), offset_faults(rows, tensors.get("sample_offsets"))
    found = [Fault(what, file.name) for faults in shapes for what in faults]
    if found:
        return found
    for row in rows:
        sample = slices_of(tensors, row)
        found += [Fault(what, file.name, row["sample_id"]) for what in sample_faults(row, sample)]
        if wanted is not None:
            found += [Fault(what, file.name, row["sample_id"]) for what in _disagreements(row, sample, wanted)]
    return found


def shape_faults(
    manifest: dict[str, Any], shard: dict[str, Any], rows: list[dict[str, Any]], tensors: dict[str, Tensor]
) -> Iterator[str]:
    """Tensors against the format (core/store.py) and the manifest."""
    n, m = shard["tokens"], sum(r["last_length"] for r in rows)
    layers, hidden = len(manifest["layer_ids"]), manifest["target"]["hidden_size"]
    fp8 = manifest["storage"] == "fp8"
    states = FP8 if fp8 else torch.bfloat16
    format_ = {
        "input_ids": (torch.int32, (n,)), "loss_mask": (torch.uint8, (n,)), "aux_states": (states, (n, layers, hidden)),
        "last_states": (states, (m, hidden)), "last_rows": (torch.int32, (m,)),
        "sample_offsets": (torch.int64, (shard["samples"] + 1,)),
    }  # fmt: skip
    if fp8:
        format_ |= {"aux_scales": (torch.float32, (n, layers)), "last_scales": (torch.float32, (m,))}
    for name, (dtype, shape) in format_.items():
        if name not in tensors:
            yield f"has no {name}"
        elif (tensors[name].dtype, tuple(tensors[name].shape)) != (dtype, shape):
            yield f"{name} is {tensors[name].dtype} {list(tensors[name].shape)}, not {dtype} {list(shape)}"


def offset_faults(rows: list[dict[str, Any]], written: Tensor | None = None) -> Iterator[str]:
    """Where the index has a shard's samples: one after another, as the shard's `sample_offsets` have them."""
    offsets = [0]
    lasts = 0
    for number, row in enumerate(sorted(rows, key=lambda r: r["row"])):
        if (row["row"], row["start"], row["last_start"]) != (number, offsets[-1], lasts):
            yield f"the index has sample {row['sample_id']} at another place"
            return
        offsets.append(offsets[-1] + row["length"])
        lasts += row["last_length"]
    if written is not None and written.tolist() != offsets:
        yield "sample_offsets are not the index's"


def slices_of(tensors: dict[str, Tensor], row: dict[str, Any]) -> dict[str, Tensor]:
    """A sample's part of a shard's tensors, its `last_rows` counted from its first."""
    tokens = slice(row["start"], row["start"] + row["length"])
    lasts = slice(row["last_start"], row["last_start"] + row["last_length"])
    parts = {name: tensors[name][tokens] for name in TOKEN_TENSORS if name in tensors}
    parts |= {name: tensors[name][lasts] for name in LAST_TENSORS if name in tensors}
    return {**parts, "last_rows": tensors["last_rows"][lasts] - row["start"]}


def sample_faults(row: dict[str, Any], sample: dict[str, Tensor]) -> Iterator[str]:
    """A sample against its row of the index, and itself."""
    if not has_sha256(sample, row["sha256"]):
        yield "its bytes are not the index's (sha256)"
    if int(sample["loss_mask"].sum()) != row["supervised_tokens"]:
        yield "the index has another number of supervised tokens"
    if not torch.equal(sample["loss_mask"][1:].nonzero().squeeze(1), sample["last_rows"].long()):
        yield "last_rows are not the rows before its reply tokens"
    for name in ("aux", "last"):
        states = sample[f"{name}_states"]
        if f"{name}_scales" in sample:
            states = decode(states, sample[f"{name}_scales"])
        if not torch.isfinite(states).all():
            yield f"{name}_states are not finite"


def _disagreements(row: dict[str, Any], sample: dict[str, Tensor], wanted: dict[str, _Wanted]) -> Iterator[str]:
    """The index and the tokens against samples/."""
    if (theirs := wanted.get(row["sample_id"])) is None:
        yield "not in samples/"
        return
    for key in ("split", "source"):
        if row[key] != getattr(theirs, key):
            yield f"its {key} is {row[key]} in the index and {getattr(theirs, key)} in samples/"
    if hash((tuple(sample["input_ids"].tolist()), sample["loss_mask"].numpy().tobytes())) != theirs.digest:
        yield "its tokens or its mask are not those in samples/"
