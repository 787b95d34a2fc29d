"""The spool on real vLLM: `draftsmith train` captures and trains at once; ended by SIGTERM it goes on."""

import json
import shutil
import signal
import subprocess
import sys
import time

import pytest

from draftsmith.core.config_io import load_config
from draftsmith.core.run import RunFolder
from draftsmith.core.spool import folder_bytes
from draftsmith.hidden_state_capture.reader import HiddenStateStore

pytestmark = [pytest.mark.vllm, pytest.mark.long]
# Three shards of two optimizer steps each.
SPOOL = [
    "run.name=spooled",
    "capture.mode=spool",
    "capture.spool_bytes=14000000",
    "capture.shard_bytes=3000000",
    "capture.max_num_seqs=8",
]


def losses(root):
    rows = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    return [(r["step"], r["loss"]) for r in rows if "loss" in r]


def test_training_over_a_spool_is_the_training_from_the_store(smollm_run, cli, left_engines):
    config = load_config(smollm_run["config"], SPOOL)
    run = RunFolder.of(config)
    run.root.mkdir()
    shutil.copytree(smollm_run["root"] / "samples", run.samples)
    shutil.copy(smollm_run["root"] / "vocab_mapping.safetensors", run.root)
    command = [sys.executable, "-m", "draftsmith.core.cli", "train", "--config", str(smollm_run["config"]), *SPOOL]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    most = 0
    try:
        while not run.complete_checkpoints() and process.poll() is None:
            most = max(most, folder_bytes(run.spool) if run.spool.is_dir() else 0)
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=60)[0]
    finally:
        process.kill()
    assert process.returncode == 0 and "stopped by SIGTERM" in said, said[-3000:]
    assert not left_engines() and run.spool.is_dir()
    assert 0 < most <= config.capture.spool_bytes
    done = cli("train", "--config", smollm_run["config"], *SPOOL)
    assert "going on from step" in done.stdout and "spool: training waited" in done.stdout
    assert not left_engines() and not run.spool.exists()

    ours, theirs = losses(run.root), losses(smollm_run["root"])
    assert [step for step, _ in ours] == [step for step, _ in theirs]
    # Other samples share the engine's batches, so a state's last bit may differ.
    assert [loss for _, loss in ours] == pytest.approx([loss for _, loss in theirs], rel=0.01)
    store = HiddenStateStore(run.hidden_states)
    assert store.manifest["mode"] == "spool" and {row["split"] for row in store.index} == {"eval"}
    assert "proven" in cli("export", "--config", smollm_run["config"], *SPOOL, "export.verify=offline").stdout
