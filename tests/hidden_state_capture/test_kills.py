"""kill -9 at any moment of a capture, many times over: the same store, no sample twice, none missing."""

import os
import pickle
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.core.run import RunFolder
from draftsmith.core.samples import Sample
from draftsmith.core.target import resolve_target
from draftsmith.hidden_state_capture.finish import Captured
from draftsmith.hidden_state_capture.reader import HiddenStateStore
from draftsmith.hidden_state_capture.shard import sample_sha256
from draftsmith.hidden_state_capture.stage import capture_inputs
from draftsmith.hidden_state_capture.todo import Head

TOTAL, REJECTED, KILLS = 12, 7, 50
PROBE = '{"norm_form": "rms", "eps": 1e-6, "argmax_agreement": 1.0, "positions": 8, "state_errors": null}'
# One import of torch for all attempts: each is a fork that goes on from what is on disk, as the stage does, and is
# killed while its threads are wherever they are. Once a store is finished, the next kills go to a new one.
SCRIPT = """
import dataclasses, os, pickle, random, signal, sys, time
from pathlib import Path
import torch
from draftsmith.core.manifest import read_manifest
from draftsmith.hidden_state_capture.finish import clear_progress, finish
from draftsmith.hidden_state_capture.shard import next_number, remove_uncommitted
from draftsmith.hidden_state_capture.stage import _missing
from draftsmith.hidden_state_capture.writer import SampleStates, ShardWriter, WriterConfig

given, rejected, probe, draw = pickle.loads(Path(sys.argv[1]).read_bytes())
base, kills = Path(sys.argv[1]).parent, int(sys.argv[2])

def attempt(captured):
    torch.set_num_threads(1)
    captured.folder.mkdir(exist_ok=True)
    if read_manifest(captured.folder):
        return clear_progress(captured.folder)
    remove_uncommitted(captured.folder)
    (captured.folder / "probe.json").write_text(probe)
    writer = ShardWriter(captured.folder, WriterConfig(2500, 10_000, threads=2, first=next_number(captured.folder)))
    for head in _missing(captured):
        i = int(head.sample_id[1:])
        states = torch.full((8, 4, 16), 1.0 + i, dtype=torch.bfloat16)
        if i == rejected:
            states[3, 1, 2] = float("nan")
        writer.put(SampleStates(head.sample_id, [i] * 8, [[4, 8]], states, bool))
    writer.flush()
    finish(captured)

def run(name, seconds=None):
    begin, child = time.monotonic(), os.fork()
    if child == 0:
        attempt(dataclasses.replace(given, folder=base / name))
        os._exit(0)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL), status
    return status != 0, time.monotonic() - begin

whole = max(run(f"whole-{i}")[1] for i in range(2))
killed = store = 0
while killed < kills:
    was_killed, _ = run(f"killed-{store}", draw.uniform(0, whole))
    killed += was_killed
    store += (base / f"killed-{store}" / "manifest.json").exists() and draw.random() < 0.7
for number in range(store + 1):
    run(f"killed-{number}")
"""


def contents(folder):
    """sample_id -> hash of its bytes, which are also the ones that the index has; and what the manifest lists."""
    store = HiddenStateStore(folder)
    names = ("input_ids", "loss_mask", "aux_states", "last_states")
    found = {}
    for row, stored in zip(store.index, store, strict=True):
        parts = (stored.input_ids_T, stored.loss_mask_T, stored.aux_states_TAH, stored.last_states_MH)
        assert row["sha256"] == sample_sha256(dict(zip(names, parts, strict=True)))
        assert row["sample_id"] not in found
        found[row["sample_id"]] = row["sha256"]
    files = {"index.parquet", "manifest.json", *(s["file"] for s in store.manifest["shards"])}
    assert {p.name for p in folder.iterdir()} == files, "leftovers of a kill are still there"
    assert sum(s["samples"] for s in store.manifest["shards"]) == len(found)
    return found, store.manifest["rejected"]


@pytest.fixture
def memory_folder(tmp_path):
    """A folder where fsync costs nothing; a busy disk takes a second for each, and a run has a hundred."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.mark.slow
def test_fifty_kills_lose_nothing_and_repeat_nothing(memory_folder, synthetic_run):
    target, seed = resolve_target(synthetic_run.target), random.randrange(2**32)
    config = synthetic_run.model_copy(
        update={"capture": synthetic_run.capture.model_copy(update={"max_rejected_share": 0.1})}
    )
    samples = [Sample(f"s{i}", [i] * 8, [(4, 8)], "synthetic", "stop", "train") for i in range(TOTAL)]
    inputs = capture_inputs(config, target, [3, 4, 5], RunFolder.of(config))
    captured = Captured(config, target, [3, 4, 5], [Head.of(s) for s in samples], [], inputs, memory_folder)
    (memory_folder / "job.pkl").write_bytes(pickle.dumps((captured, REJECTED, PROBE, random.Random(seed))))
    command = [sys.executable, "-c", SCRIPT, str(memory_folder / "job.pkl"), str(KILLS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (seed, done.stderr[-3000:])
    whole = contents(memory_folder / "whole-0")
    assert sorted(whole[0]) == sorted(f"s{i}" for i in range(TOTAL) if i != REJECTED)
    assert [r["sample_id"] for r in whole[1]] == [f"s{REJECTED}"]
    stores = sorted(memory_folder.glob("killed-*"))
    for store in stores:
        assert contents(store) == whole, (seed, store)
    tensors = load_file(next((memory_folder / "killed-0").glob("shard-*.safetensors")))
    assert torch.equal(tensors["aux_states"][:, 0, 0].float(), 1.0 + tensors["input_ids"].float())
