"""The end of a capture: what was lost is judged, then the index is written and, last, the manifest."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from draftsmith.core.atomic import write_atomic
from draftsmith.core.config import Config
from draftsmith.core.engine import engine_dtype
from draftsmith.core.errors import StageFailed
from draftsmith.core.manifest import write_manifest
from draftsmith.core.progress import say
from draftsmith.core.store import INDEX, INDEX_SCHEMA, INPUTS, PROBE
from draftsmith.core.target import Target
from draftsmith.hidden_state_capture.shard import committed_shards, rejected_samples
from draftsmith.hidden_state_capture.todo import Head, longest_sample

# What a capture in progress leaves for its continuation; the manifest takes their place.
_PROGRESS = (INPUTS, PROBE, "connector.json", "failure.json", "shard-*.json", "rejected-*.json", ".tmp*")


@dataclass(frozen=True)
class Captured:
    """What a capture is of.

    Attributes:
        config, target, layer_ids: of the run; the ids ascending.
        heads: every sample that belongs into the store.
        long: those that the target's context does not hold.
        inputs: everything that decides the states.
        folder: where the shards lie.
        part: (index, of) where this is one of several stores of the run.
    """

    config: Config
    target: Target
    layer_ids: list[int]
    heads: Sequence[Head]
    long: Sequence[Head]
    inputs: dict[str, Any]
    folder: Path
    part: tuple[int, int] | None = None


def check_rejected(captured: Captured) -> list[dict[str, str]]:
    """The rejected samples so far.

    Raises:
        StageFailed: they are more than `capture.max_rejected_share`.
    """
    rejected, share = rejected_samples(captured.folder), captured.config.capture.max_rejected_share
    if len(rejected) > share * len(captured.heads):
        raise StageFailed(
            f"{len(rejected)} of {len(captured.heads)} samples have unusable states (capture.max_rejected_share is "
            f"{share:.1%}), e.g. {rejected[0]['sample_id']}: {rejected[0]['reason']}. Raise it and run "
            "`draftsmith capture` again to go on without them; `draftsmith capture --fresh` captures everything anew."
        )
    return rejected


def finish(captured: Captured) -> None:
    """Make a store of the shards in `captured.folder`; the sidecars have served.

    Raises:
        StageFailed: samples are missing, are there twice, or too many were rejected.
    """
    folder, sidecars = captured.folder, committed_shards(captured.folder)
    rejected = check_rejected(captured)
    rows = _index_rows(sidecars, captured.heads)
    _check_complete(captured, rows, rejected)
    table = pa.Table.from_pylist(rows, schema=INDEX_SCHEMA)
    write_atomic(folder / INDEX, lambda tmp: pq.write_table(table, tmp))
    probe = json.loads((folder / PROBE).read_text(encoding="utf-8"))
    outputs = {
        **_what(captured, probe),
        "shards": [s["shard"] for s in sidecars],
        "rejected": rejected,
        "too_long": [{"sample_id": h.sample_id, "tokens": h.tokens} for h in captured.long],
        "probe": probe,
    }
    if captured.part:
        outputs["part"] = dict(zip(("index", "of"), captured.part, strict=True))
    write_manifest(folder, "capture", captured.inputs, outputs)
    clear_progress(folder)
    size = sum(s["shard"]["bytes"] for s in sidecars)
    lost = f"{len(rejected)} rejected" + (f", {len(captured.long)} too long" if captured.long else "")
    say(f"hidden states: {len(rows)} samples, {size / 1e6:,.0f} MB, {lost} -> {folder}")


def clear_progress(folder: Path) -> None:
    """Remove what only a capture in progress needs; a kill may have come between the manifest and this."""
    for pattern in _PROGRESS:
        for leftover in folder.glob(pattern):
            leftover.unlink()


def _check_complete(captured: Captured, rows: list[dict[str, Any]], rejected: list[dict[str, str]]) -> None:
    ids = Counter(r["sample_id"] for r in rows)
    if twice := sorted(i for i, count in ids.items() if count > 1):
        raise StageFailed(
            f"{len(twice)} samples were captured twice, e.g. {twice[0]}: two captures wrote into {captured.folder}. "
            "Run `draftsmith capture --fresh`."
        )
    known = {*ids, *(r["sample_id"] for r in rejected), *(h.sample_id for h in captured.long)}
    if missing := {h.sample_id for h in captured.heads} - known:
        first = sorted(missing)[0]
        raise StageFailed(f"{len(missing)} samples were not captured, e.g. {first}. Run `draftsmith capture` again.")
    if not rows:
        raise StageFailed("no sample was captured: all were rejected or are longer than the target's context.")


def _what(captured: Captured, probe: dict[str, Any]) -> dict[str, Any]:
    """What the states are of, and how they are stored."""
    target, config = captured.target, captured.config
    quantization = getattr(target.hf_config, "quantization_config", None)
    return {
        "target": {
            "path": target.path,
            "local_path": str(target.local_path),
            "revision": target.revision,
            "num_layers": target.num_layers,
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
            "dtype": engine_dtype(config.target),
            "quantization": config.target.engine_args.get("quantization") or (quantization or {}).get("quant_method"),
        },
        "layer_ids": captured.layer_ids,
        "layer_id_convention": "vllm: id k is the residual stream after k layers",
        "last_state": {
            "layer_id": target.num_layers,
            "norm": "pre",
            "norm_form": probe["norm_form"],
            "eps": probe["eps"],
        },
        "storage": config.capture.storage,
        "mode": config.capture.mode,
        "longest": longest_sample(config, target),
    }


def _index_rows(sidecars: list[dict[str, Any]], heads: Sequence[Head]) -> list[dict[str, Any]]:
    by_id = {h.sample_id: h for h in heads}
    return [
        {**row, "shard": number, "split": by_id[row["sample_id"]].split, "source": by_id[row["sample_id"]].source}
        for number, sidecar in enumerate(sidecars)
        for row in sidecar["rows"]
    ]
