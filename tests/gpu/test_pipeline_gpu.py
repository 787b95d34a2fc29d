"""The whole pipeline on a CUDA GPU: the connector's side-stream copies, bfloat16 training, serving."""

import json
import subprocess
import sys

import pytest
import torch

from draftsmith.hidden_state_capture.reader import HiddenStateStore

pytestmark = [pytest.mark.gpu, pytest.mark.vllm]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    folder = tmp_path_factory.mktemp("gpu")
    config = folder / "config.yaml"
    config.write_text(
        f"""
run: {{name: small, dir: {folder}}}
target: {{engine_args: {{enforce_eager: true, gpu_memory_utilization: 0.3}}}}
data:
  sources: [{{path: demo-prompts, limit: 300}}]
  sampling: {{max_tokens: 128}}
  max_length: 512
  draft_vocab_size: 4096
capture: {{shard_bytes: 30000000}}
draft: {{fc_norm: true, norm_output: true}}
train: {{ttt_steps: 3, tokens_per_batch: 1024, epochs: 6, learning_rate: 1.0e-3}}
eval: {{concurrency: [8]}}
"""
    )
    for stage in ("capture", "train", "eval"):
        command = [sys.executable, "-m", "draftsmith.core.cli", stage, "--config", str(config)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=400)
        print(done.stdout[-1500:])
        assert done.returncode == 0, done.stderr[-3000:]
    return folder / "small"


def test_states_are_the_targets(run):
    store = HiddenStateStore(run / "hidden_states")
    probe = store.manifest["probe"]
    assert probe["argmax_agreement"] >= 0.98
    assert all(error < 0.03 for error in probe["state_errors"].values())
    assert not store.manifest["rejected"]
    assert len(store.manifest["shards"]) > 1


def test_served_acceptance_is_what_replay_predicted(run):
    report = json.loads((run / "eval" / "report.json").read_text())
    [replayed], [served] = report["replay"], report["served"]
    assert served["acceptance_length"] > 1.2
    assert served["acceptance_length"] == pytest.approx(replayed["acceptance_length"], rel=0.02)


def test_the_export_was_proven_on_this_gpu(run):
    proof = json.loads((run / "export" / "verification.json").read_text())
    assert (proof["passed"], proof["served"]) == (True, "checked"), proof["problems"]
    checks = {c["name"]: c for c in proof["checks"]}
    assert checks["served logits"]["measured"]["relative_error"] < 0.05  # None would say that no hook saw them
    assert checks["served drafts"]["measured"]["equal"][0] >= 14  # of 16
