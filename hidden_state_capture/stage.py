"""`capture`: samples -> hidden states of the target, in `hidden_states/`."""

import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from draftsmith.core.atomic import write_json
from draftsmith.core.capturable import check_capturable
from draftsmith.core.config import Config
from draftsmith.core.damage import reading
from draftsmith.core.engine import engine_dtype, require_vllm
from draftsmith.core.errors import StageFailed, UserError
from draftsmith.core.manifest import check_inputs, manifest_hash, read_manifest, require_manifest
from draftsmith.core.progress import say
from draftsmith.core.run import RunFolder
from draftsmith.core.store import INPUTS, part_name
from draftsmith.core.target import Target, resolve_layer_ids, resolve_target
from draftsmith.hidden_state_capture.driver import Job
from draftsmith.hidden_state_capture.finish import Captured, check_rejected, clear_progress, finish
from draftsmith.hidden_state_capture.local import capture_locally
from draftsmith.hidden_state_capture.on_ray import capture_on_ray
from draftsmith.hidden_state_capture.served import capture_served, wait_quiet
from draftsmith.hidden_state_capture.shard import (
    committed_shards,
    next_number,
    rejected_samples,
    remove_uncommitted,
)
from draftsmith.hidden_state_capture.todo import Head, read_heads, shares, store_bytes, too_long
from draftsmith.hidden_state_capture.writer import FAILURE


def capture(config: Config, part: tuple[int, int] | None = None) -> None:
    """Capture the hidden states of every sample; continues where a killed run stopped.

    Args:
        config: of the run.
        part: (index, of): only this share of the samples, into a store of its own beside `hidden_states/`.

    Raises:
        UserError: there are no samples, layer ids are out of range, or the run has other states.
        StageFailed: the probe disagrees, the writer or the engine failed, or too many states are unusable.
    """
    run = RunFolder.of(config)
    target = resolve_target(config.target)
    layer_ids = resolve_layer_ids(config.capture, target.num_layers)
    check_capturable(config.capture, target)
    require_manifest(run.samples, "prepare", "capture")
    folder = run.root / part_name(*part) if part else run.hidden_states
    inputs = capture_inputs(config, target, layer_ids, run)
    if manifest := read_manifest(folder):
        check_inputs(folder, manifest, inputs)
        clear_progress(folder)
        say(f"hidden states: {sum(s['samples'] for s in manifest['shards'])} samples (already there)")
        return
    if not config.capture.server:
        require_vllm("capture")
    if not part:  # several hosts may be at work in the run's folder
        run.open(config)
    folder.mkdir(exist_ok=True)
    _continue_only_alike(folder, inputs)
    heads = heads_to_store(config)
    if part:
        heads = shares(heads, part[1])[part[0]]
    captured = Captured(config, target, layer_ids, heads, too_long(heads, config, target), inputs, folder, part)
    try:
        _capture_missing(captured, run.samples)
    except UserError:
        _leave_no_trace(folder)
        raise
    finish(captured)


def capture_inputs(config: Config, target: Target, layer_ids: list[int], run: RunFolder) -> dict[str, Any]:
    """Everything that decides the states."""
    return {
        "samples_manifest_sha256": manifest_hash(run.samples),
        "target": target.fingerprint(config.target),
        # `auto` is another dtype on another machine: states of both must not lie in one store.
        "engine_dtype": engine_dtype(config.target),
        "layer_ids": layer_ids,
        "storage": config.capture.storage,
        **({"mode": "spool"} if config.capture.mode == "spool" else {}),
    }


def heads_to_store(config: Config) -> list[Head]:
    """All samples; in spool mode those that are needed once training is done."""
    heads = read_heads(RunFolder.of(config).samples)
    if config.capture.mode == "store":
        return heads
    # Where none are held out, the export is proven on some of the others.
    return [h for h in heads if h.split == "eval"] or heads[: config.capture.probe.samples]


def _continue_only_alike(folder: Path, inputs: dict[str, Any]) -> None:
    """Shards that were begun with other inputs are refused, not mixed."""
    begun = folder / INPUTS
    if begun.is_file():
        with reading(begun, "Run `draftsmith capture --fresh`."):
            recorded = json.loads(begun.read_text(encoding="utf-8"))
        check_inputs(folder, {"stage": "capture", "inputs": recorded}, inputs)
    else:
        write_json(begun, inputs)


def _leave_no_trace(folder: Path) -> None:
    """Of a capture that was refused before it had any sample, so that `--fresh` gives the old states back."""
    if not committed_shards(folder) and not rejected_samples(folder):
        (folder / INPUTS).unlink(missing_ok=True)
        with suppress(OSError):  # it holds something by now, or is a link
            folder.rmdir()


def _capture_missing(captured: Captured, samples: Path) -> None:
    """Run the engines on what is not on disk yet."""
    folder, config = captured.folder, captured.config
    (folder / FAILURE).unlink(missing_ok=True)
    if config.capture.server:
        wait_quiet(folder, config.capture.seal_after)  # what is not whole yet may be the server's
    else:
        remove_uncommitted(folder)
    check_rejected(captured)
    missing = _missing(captured)
    if len(missing) + len(captured.long) < len(captured.heads):
        done = len(captured.heads) - len(captured.long) - len(missing)
        say(f"hidden states: {done} samples of an earlier run are on disk, {len(missing)} to go")
    if captured.long:
        longest = max(captured.long, key=lambda h: h.tokens)
        say(
            f"warning: {len(captured.long)} samples are longer than the target's context and are left out, e.g. "
            f"{longest.sample_id} with {longest.tokens} tokens"
        )
    if not missing:
        return
    job = Job(
        config,
        captured.target,
        captured.layer_ids,
        samples,
        folder,
        first=next_number(folder),
        engines=config.capture.data_parallel,
        max_rejected=int(config.capture.max_rejected_share * len(captured.heads)) - len(rejected_samples(folder)),
    )
    try:
        _engines(config)(job, missing)
    except StageFailed as error:
        raise _with_room(captured, error) from None


def _engines(config: Config) -> Callable[[Job, Sequence[Head]], None]:
    if config.capture.server:
        return capture_served
    return capture_on_ray if config.capture.launcher == "ray" else capture_locally


def _missing(captured: Captured) -> list[Head]:
    rows = (row["sample_id"] for shard in committed_shards(captured.folder) for row in shard["rows"])
    known = {*rows, *(r["sample_id"] for r in rejected_samples(captured.folder)), *(h.sample_id for h in captured.long)}
    return [h for h in captured.heads if h.sample_id not in known]


def _with_room(captured: Captured, error: StageFailed) -> StageFailed:
    """The error, or what a full disk lacks; whatever is not whole is removed and gives room."""
    folder = captured.folder
    failure = folder / FAILURE
    full = failure.is_file() and json.loads(failure.read_text(encoding="utf-8"))["disk_full"]
    failure.unlink(missing_ok=True)
    if not captured.config.capture.server:
        remove_uncommitted(folder)
    if not full:
        return error
    missing: Sequence[Head] = _missing(captured)
    layers, hidden = len(captured.layer_ids), captured.target.hidden_size
    needed = store_bytes(missing, layers, hidden, captured.config.capture.storage)
    free = shutil.disk_usage(folder).free
    return StageFailed(
        f"the disk of {folder} is full: the {len(missing)} samples to go need {needed:,} bytes and {free:,} are free. "
        "What is captured is kept: make space and run the same command."
    )
