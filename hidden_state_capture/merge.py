"""Several stores become one: the parts of a capture that was spread over hosts, or the stores of other runs.

No state is copied where it need not be: shards are hard links into the new store, which appears whole (a temporary
folder, renamed) or not at all. The parts stay as they are; deleting them afterwards deletes no state.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from draftsmith.core.atomic import TMP_MARK, atomic_folder
from draftsmith.core.errors import UserError
from draftsmith.core.manifest import differences, manifest_hash, write_manifest
from draftsmith.core.replacing import is_aside
from draftsmith.core.store import INDEX, INDEX_SCHEMA, part_name, shard_name
from draftsmith.hidden_state_capture.reader import HiddenStateStore
from draftsmith.hidden_state_capture.verify import verify_store

_SAMPLES = "samples_manifest_sha256"
# What the first store says for all; `last_state` and the like are compared before.
_SHARED = ("target", "layer_ids", "layer_id_convention", "last_state", "storage", "probe")


def merge_stores(parts: list[Path], folder: Path, verify: bool = True) -> dict[str, Any]:
    """Make `folder` one store of `parts`; index and shards in their order.

    Args:
        parts: complete stores. Where one says `part: {index, of}` in its manifest, all `of` of them have to be there.
        folder: the new store; missing or empty.
        verify: read every byte of the parts first, and merge none that is damaged.

    Returns:
        Its manifest.

    Raises:
        UserError: a part is missing, incomplete or damaged, parts differ in what decides the states, a sample is in two
            of them, or `folder` holds something.
    """
    folder = folder.resolve()  # it may be a link to a larger disk
    if folder.exists() and (not folder.is_dir() or any(not is_aside(item) for item in folder.iterdir())):
        raise UserError(f"{folder} is there already and not empty.", "Merge into another folder, or delete it.")
    if not parts:
        raise UserError("there is nothing to merge.", "Name the stores.")
    real = [part.resolve() for part in parts]
    if twice := {str(part) for part in real if real.count(part) > 1}:
        raise UserError(f"given twice: {', '.join(sorted(twice))}.", "Name every store once.")
    if inside := [part for part in real if part in folder.parents]:
        raise UserError(f"{folder} would lie in {inside[0]}, which is one of the stores.", "Merge into another folder.")
    stores = [HiddenStateStore(part, "merge") for part in parts]
    _all_parts_there(stores)
    for store in stores[1:]:
        _alike(stores[0], store)
    rows = _rows(stores)
    if verify:
        _refuse_damaged(parts)
    for left in folder.parent.glob(f"{TMP_MARK}*-{folder.name}"):  # of a killed merge
        shutil.rmtree(left)
    with atomic_folder(folder) as new:
        shards = list(_linked(stores, new))
        pq.write_table(pa.Table.from_pylist(rows, schema=INDEX_SCHEMA), new / INDEX)
        write_manifest(new, "capture", _inputs(stores), _outputs(stores, shards))
    return HiddenStateStore(folder, "merge").manifest


def _refuse_damaged(parts: list[Path]) -> None:
    for part in parts:
        faults = verify_store(part).faults
        if not faults:
            continue
        first = faults[0]
        named = [first.shard, first.sample_id and f"sample {first.sample_id}"]
        more = f" (and {len(faults) - 1} faults more)" if len(faults) > 1 else ""
        raise UserError(
            f"{part} is damaged: {': '.join(filter(None, [*named, first.what]))}{more}.",
            f"`draftsmith store repair {part}` and `draftsmith capture` mend it; --no-verify merges it as it is.",
        )


def _all_parts_there(stores: list[HiddenStateStore]) -> None:
    """The parts of one capture are merged all together or not at all."""
    named = {s.folder: s.manifest["part"] for s in stores if s.manifest.get("part")}
    if not named:
        return
    sizes = sorted({part["of"] for part in named.values()})
    if len(named) < len(stores) or len(sizes) > 1:
        held = "; ".join(f"{s.folder}: {named.get(s.folder, 'no part')}" for s in stores)
        raise UserError(f"these are not the parts of one capture ({held}).", "Merge the parts of one --shard i/n.")
    have = [part["index"] for part in named.values()]
    if missing := sorted(set(range(sizes[0])) - set(have)):
        names = ", ".join(part_name(i, sizes[0]) for i in missing)
        flags = ", ".join(f"--shard {i}/{sizes[0]}" for i in missing)
        raise UserError(f"parts are missing: {names}.", f"Run `draftsmith capture` with {flags} to their end first.")


def _alike(first: HiddenStateStore, other: HiddenStateStore) -> None:
    """Refuse states that do not belong together, saying what differs."""
    one, two = (_identity(s.manifest) for s in (first, other))
    if found := differences(one, two, f"in {first.folder.name}", f"in {other.folder.name}"):
        raise UserError(
            f"{first.folder} and {other.folder} do not belong into one store: " + "; ".join(found) + ".",
            "Capture the one that is wrong again.",
        )


def _identity(manifest: dict[str, Any]) -> dict[str, Any]:
    """All that has to be equal: where hosts have the target may differ, and which samples, but for parts of one run."""
    target = {k: v for k, v in manifest["target"].items() if k not in ("path", "local_path")}
    inputs = {k: v for k, v in manifest["inputs"].items() if k != _SAMPLES or manifest.get("part")}
    kept = {k: manifest[k] for k in ("layer_ids", "last_state", "storage")}
    return {**kept, "target": target, "inputs": inputs}


def _rows(stores: list[HiddenStateStore]) -> list[dict[str, Any]]:
    """Index rows of all stores, their shards numbered on."""
    rows: list[dict[str, Any]] = []
    owner: dict[str, Path] = {}
    before = 0
    for store in stores:
        for row in store.index:
            if (there := owner.setdefault(row["sample_id"], store.folder)) != store.folder:
                raise UserError(
                    f"sample {row['sample_id']} is in {there} and in {store.folder}.",
                    "A sample can be in a store once; leave one of them out.",
                )
            rows.append({**row, "shard": row["shard"] + before})
        before += len(store.manifest["shards"])
    return rows


def _linked(stores: list[HiddenStateStore], folder: Path) -> Iterator[dict[str, Any]]:
    """Put every shard into `folder` under its new name; yields its entry for the manifest."""
    shards = ((store.folder, shard) for store in stores for shard in store.manifest["shards"])
    for number, (source, shard) in enumerate(shards):
        place(source / shard["file"], folder / shard_name(number))
        yield {**shard, "file": shard_name(number)}


def place(file: Path, to: Path) -> None:
    """The same bytes under another name, without a copy where the file system allows it."""
    try:
        os.link(file, to)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK):
            raise
        shutil.copyfile(file, to)


def _inputs(stores: list[HiddenStateStore]) -> dict[str, Any]:
    """As of one capture; of runs with other samples, the hashes of them all, so that no single run's samples fit."""
    samples = list(dict.fromkeys(s.manifest["inputs"][_SAMPLES] for s in stores))
    return {**stores[0].manifest["inputs"], _SAMPLES: samples[0] if len(samples) == 1 else samples}


def _outputs(stores: list[HiddenStateStore], shards: list[dict[str, Any]]) -> dict[str, Any]:
    merged = [
        {"folder": s.folder.name, "manifest_sha256": manifest_hash(s.folder), "samples": len(s.index)} for s in stores
    ]
    left_out = {key: [r for s in stores for r in s.manifest.get(key, [])] for key in ("rejected", "too_long")}
    shared = {k: stores[0].manifest[k] for k in _SHARED}
    return {**shared, "shards": shards, **left_out, "merged_from": merged}
