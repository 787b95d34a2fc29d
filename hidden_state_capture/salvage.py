"""Samples of a damaged shard that are whole, by their own checksums: they go into a shard of their own.

The checksum in the index covers a sample's tokens, mask and states; where in the shard its last states belong follows
from its mask. A file that cannot be read, or whose length is another, gives nothing: its samples are captured again.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.core.atomic import remove_leftovers
from draftsmith.hidden_state_capture.gather import SampleRows
from draftsmith.hidden_state_capture.shard import OpenShard, Tail
from draftsmith.hidden_state_capture.verify import Verdict, offset_faults, sample_faults, shape_faults, slices_of


def salvage(folder: Path, verdict: Verdict) -> int:
    """Write a shard, with its sidecar, of what is whole in every damaged one; the samples kept.

    The store's manifest stays, and knows none of them. What an earlier call left, which was killed, is removed.
    """
    remove_leftovers(folder)
    listed = {s["file"] for s in verdict.manifest["shards"]}
    for left in [*folder.glob("shard-*.json"), *folder.glob("shard-*.safetensors")]:
        if left.with_suffix(".safetensors").name not in listed:
            left.unlink()
    number = 1 + max(int(Path(name).stem.split("-")[1]) for name in listed)
    kept = 0
    for shard in verdict.manifest["shards"]:
        if shard["file"] not in verdict.bad_shards or not (whole := _whole(folder, verdict, shard)):
            continue
        made = OpenShard(folder, number, Tail())
        try:
            for name, sample in whole:
                ids, mask = (sample[key].numpy() for key in ("input_ids", "loss_mask"))
                rows = SampleRows(name, ids, mask, sample["last_rows"].numpy())
                made.add(
                    rows, {key: t.contiguous() for key, t in sample.items() if key.endswith(("_states", "_scales"))}
                )
            made.seal()
        except BaseException:
            made.discard()
            raise
        number, kept = number + 1, kept + len(whole)
    return kept


def _whole(folder: Path, verdict: Verdict, shard: dict[str, Any]) -> list[tuple[str, dict[str, Tensor]]]:
    """Samples of a damaged shard that nothing is wrong with, by id, in their order."""
    file, rows = folder / shard["file"], verdict.rows[shard["file"]]
    try:
        if file.stat().st_size != shard["bytes"]:
            return []
        tensors = load_file(file)
    except (OSError, SafetensorError):
        return []
    if any(shape_faults(verdict.manifest, shard, rows, tensors)) or any(offset_faults(rows)):
        return []
    named = {fault.sample_id for fault in verdict.faults if fault.shard == file.name}
    found = []
    for row in sorted(rows, key=lambda r: r["row"]):
        sample = slices_of(tensors, row)
        sample["last_rows"] = torch.nonzero(sample["loss_mask"][1:]).squeeze(1)  # the next token is a reply token
        fits = row["sample_id"] not in named and len(sample["last_rows"]) == row["last_length"]
        if fits and not any(sample_faults(row, sample)):
            found.append((row["sample_id"], sample))
    return found
