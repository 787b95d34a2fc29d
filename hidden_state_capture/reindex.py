"""The index of a store, made again from its shards: what every sample is called, `samples/` tells by its tokens.

A shard holds the tokens, masks and states of its samples, and where each begins, but not their ids. Only shards whose
checksum is the manifest's are read, so that a damaged one is still found by `verify`, and its samples as missing.
"""

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.core.atomic import sha256_file, write_atomic
from draftsmith.core.errors import UserError
from draftsmith.core.manifest import manifest_hash
from draftsmith.core.progress import meter
from draftsmith.core.samples import iter_samples
from draftsmith.core.store import INDEX, INDEX_SCHEMA, LAST_TENSORS, TOKEN_TENSORS
from draftsmith.hidden_state_capture.shard import sample_sha256

# Of a sample: its id, split and source, by a hash of its tokens and mask.
_Named = dict[int, list[tuple[str, str, str]]]


def index_is_readable(folder: Path) -> bool:
    """Whether `index.parquet` is there and is one of a store."""
    try:
        pq.read_table(folder / INDEX, schema=INDEX_SCHEMA)
    except (OSError, pa.ArrowException):
        return False
    return True


def rebuild_index(folder: Path, manifest: dict[str, Any], samples: Path | None) -> int:
    """Write `index.parquet` anew from the whole shards of a store.

    Args:
        folder: the store.
        manifest: of the store.
        samples: `samples/` of the run that the store is of.

    Returns:
        Samples that it lists.

    Raises:
        UserError: the samples that the store was made from are not there.
    """
    if samples is None or manifest["inputs"]["samples_manifest_sha256"] != manifest_hash(samples):
        raise UserError(
            f"{folder / INDEX}: missing or damaged, and the samples that the store was made from are not beside it; "
            "the shards alone do not say which sample is which.",
            f"Put them back as {folder.parent / 'samples'} and run `draftsmith store repair` again; else capture "
            "anew (`draftsmith capture --fresh`).",
        )
    named, rows = _named(samples), []
    with meter("index", len(manifest["shards"]), "shards") as shown:
        for number, shard in enumerate(manifest["shards"]):
            file = folder / shard["file"]
            if file.is_file() and sha256_file(file) == shard["sha256"]:
                rows += [{**row, "shard": number} for row in _rows(load_file(file), named)]
            shown.advance()
    table = pa.Table.from_pylist(rows, schema=INDEX_SCHEMA)
    write_atomic(folder / INDEX, lambda tmp: pq.write_table(table, tmp))
    return len(rows)


def _named(samples: Path) -> _Named:
    named: _Named = defaultdict(list)
    for s in iter_samples(samples):
        named[_digest(s.input_ids, s.loss_mask.tobytes())].append((s.sample_id, s.split, s.source))
    return named


def _digest(ids: list[int], mask: bytes) -> int:
    return hash((tuple(ids), mask))


def _rows(tensors: dict[str, Tensor], named: _Named) -> Iterator[dict[str, Any]]:
    """Rows of one shard; a sample that nobody knows is left out."""
    offsets, last_rows = tensors["sample_offsets"].tolist(), tensors["last_rows"]
    last_start = 0
    for row, (start, end) in enumerate(pairwise(offsets)):
        last_end = int((last_rows < end).sum())
        parts = {name: tensors[name][start:end] for name in TOKEN_TENSORS if name in tensors}
        parts |= {name: tensors[name][last_start:last_end] for name in LAST_TENSORS if name in tensors}
        mask = parts["loss_mask"]
        if known := named.get(_digest(parts["input_ids"].tolist(), mask.numpy().tobytes())):
            # Of samples with the same tokens the states are the same too.
            sample_id, split, source = known.pop(0)
            yield {
                "sample_id": sample_id, "row": row, "start": start, "length": end - start, "last_start": last_start,
                "last_length": last_end - last_start, "supervised_tokens": int(mask.sum()), "split": split,
                "source": source, "sha256": sample_sha256(parts),
            }  # fmt: skip
        last_start = last_end
