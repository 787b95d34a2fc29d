"""`capture`: samples -> hidden states of the target, in `hidden_states/`."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from draftsmith.core.atomic import write_atomic, write_json
from draftsmith.core.config import Config
from draftsmith.core.damage import reading
from draftsmith.core.engine import engine_dtype, in_engine_process, require_vllm
from draftsmith.core.errors import StageFailed
from draftsmith.core.manifest import (
    check_inputs,
    manifest_hash,
    read_manifest,
    require_manifest,
    write_manifest,
)
from draftsmith.core.progress import say
from draftsmith.core.run import RunFolder
from draftsmith.core.samples import Sample, iter_samples, read_samples
from draftsmith.core.store import INDEX, INDEX_SCHEMA, INPUTS, PROBE
from draftsmith.core.target import Target, resolve_layer_ids, resolve_target
from draftsmith.hidden_state_capture.driver import capture_samples
from draftsmith.hidden_state_capture.writer import committed_shards


def capture(config: Config) -> None:
    """Capture the hidden states of every sample; continues where a killed run stopped.

    Raises:
        UserError: there are no samples, layer ids are out of range, or the run has other states.
        StageFailed: the probe disagrees, the writer or the engine failed, or too many states are unusable.
    """
    run = RunFolder.of(config)
    target = resolve_target(config.target)
    layer_ids = resolve_layer_ids(config.capture, target.num_layers)
    require_manifest(run.samples, "prepare", "capture")
    folder = run.hidden_states
    inputs = capture_inputs(config, target, layer_ids, run)
    if manifest := read_manifest(folder):
        check_inputs(folder, manifest, inputs)
        say(f"hidden states: {sum(s['samples'] for s in manifest['shards'])} samples (already there)")
        return
    require_vllm("capture")
    run.open(config)
    folder.mkdir(exist_ok=True)
    _continue_only_alike(folder, inputs)
    samples = samples_to_store(config)
    done = {row["sample_id"] for shard in committed_shards(folder) for row in shard["rows"]}
    missing = [s for s in samples if s.sample_id not in done]
    if done:
        say(f"hidden states: {len(done)} samples of an earlier run are on disk, {len(missing)} to go")
    rejected: list[dict[str, str]] = []
    if missing:
        rejected = in_engine_process(capture_samples, config, target, layer_ids, samples, missing, folder)
    _finish(config, target, layer_ids, samples, rejected, inputs)


def capture_inputs(config: Config, target: Target, layer_ids: list[int], run: RunFolder) -> dict[str, Any]:
    """Everything that decides the states."""
    return {
        "samples_manifest_sha256": manifest_hash(run.samples),
        "target": target.fingerprint(config.target),
        "layer_ids": layer_ids,
        "storage": config.capture.storage,
        **({"mode": "spool"} if config.capture.mode == "spool" else {}),
    }


def samples_to_store(config: Config) -> list[Sample]:
    """All samples; in spool mode those that are needed once training is done."""
    folder = RunFolder.of(config).samples
    if config.capture.mode == "store":
        return read_samples(folder)
    # Where none are held out, the export is proven on some of the others.
    return read_samples(folder, "eval") or list(islice(iter_samples(folder), config.capture.probe.samples))


def _continue_only_alike(folder: Path, inputs: dict[str, Any]) -> None:
    """Shards that were begun with other inputs are refused, not mixed."""
    begun = folder / INPUTS
    if begun.is_file():
        with reading(begun, "Run `draftsmith capture --fresh`."):
            recorded = json.loads(begun.read_text(encoding="utf-8"))
        check_inputs(folder, {"stage": "capture", "inputs": recorded}, inputs)
    else:
        write_json(begun, inputs)


def _finish(
    config: Config,
    target: Target,
    layer_ids: list[int],
    samples: list[Sample],
    rejected: list[dict[str, str]],
    inputs: dict[str, Any],
) -> None:
    """Judge what was lost, then write the index and, last, the manifest; the sidecars have served."""
    folder = RunFolder.of(config).hidden_states
    sidecars = committed_shards(folder)
    rows = _index_rows(sidecars, samples)
    if missing := {s.sample_id for s in samples} - {r["sample_id"] for r in rows} - {r["sample_id"] for r in rejected}:
        raise StageFailed(f"{len(missing)} samples were not captured, e.g. {sorted(missing)[0]}. Run `capture` again.")
    if len(rejected) > config.capture.max_rejected_share * len(samples):
        raise StageFailed(
            f"{len(rejected)} of {len(samples)} samples have unusable states (capture.max_rejected_share is "
            f"{config.capture.max_rejected_share:.1%}), e.g. {rejected[0]['sample_id']}: {rejected[0]['reason']}."
        )
    table = pa.Table.from_pylist(rows, schema=INDEX_SCHEMA)
    write_atomic(folder / INDEX, lambda tmp: pq.write_table(table, tmp))
    probe = json.loads((folder / PROBE).read_text(encoding="utf-8"))
    outputs = {
        "target": {
            "path": target.path,
            "local_path": str(target.local_path),
            "revision": target.revision,
            "num_layers": target.num_layers,
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
            "dtype": engine_dtype(config.target),
        },
        "layer_ids": layer_ids,
        "layer_id_convention": "vllm: id k is the residual stream after k layers",
        "last_state": {
            "layer_id": target.num_layers,
            "norm": "pre",
            "norm_form": probe["norm_form"],
            "eps": probe["eps"],
        },
        "storage": config.capture.storage,
        "mode": config.capture.mode,
        "shards": [s["shard"] for s in sidecars],
        "rejected": rejected,
        "probe": probe,
    }
    write_manifest(folder, "capture", inputs, outputs)
    for leftover in (INPUTS, PROBE, *(Path(s["shard"]["file"]).with_suffix(".json").name for s in sidecars)):
        (folder / leftover).unlink(missing_ok=True)
    size = sum(s["shard"]["bytes"] for s in sidecars)
    say(f"hidden states: {len(rows)} samples, {size / 1e6:,.0f} MB, {len(rejected)} rejected -> {folder}")


def _index_rows(sidecars: list[dict[str, Any]], samples: list[Sample]) -> list[dict[str, Any]]:
    by_id = {s.sample_id: s for s in samples}
    return [
        {
            **row,
            "shard": number,
            "split": by_id[row["sample_id"]].split,
            "source": by_id[row["sample_id"]].source,
        }
        for number, sidecar in enumerate(sidecars)
        for row in sidecar["rows"]
    ]
