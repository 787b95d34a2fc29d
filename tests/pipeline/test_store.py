"""The store on real vLLM: states in fp8, a damaged shard, and a capture that makes only its samples again."""

import shutil

import pytest

from draftsmith.hidden_state_capture.reader import HiddenStateStore
from draftsmith.hidden_state_capture.verify import verify_store

pytestmark = [pytest.mark.vllm, pytest.mark.long]


def token_errors(ours_TH, theirs_TH):
    exact = theirs_TH.double()
    return (ours_TH.double() - exact).norm(dim=-1) / exact.norm(dim=-1)


def test_a_capture_in_fp8_is_repaired_by_capturing_only_what_was_damaged(smollm_run, tmp_path, cli):
    run = tmp_path / "fp8"
    run.mkdir()
    for name in ("samples", "vocab_mapping.safetensors"):
        source = smollm_run["root"] / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, run / name)
    settings = [f"run.dir={tmp_path}", "run.name=fp8", "capture.storage=fp8"]
    args = ["--config", smollm_run["config"], *settings]
    cli("capture", *args)
    exact = {s.sample_id: s for s in HiddenStateStore(smollm_run["root"] / "hidden_states")}
    store = HiddenStateStore(run / "hidden_states")
    shards = store.manifest["shards"]
    assert len(shards) > 1 and verify_store(run / "hidden_states", run / "samples").faults == []
    before = {}
    for sample in store:
        before[sample.sample_id] = sample
        for ours, theirs in (
            (sample.aux_states_TAH, exact[sample.sample_id].aux_states_TAH),
            (sample.last_states_MH, exact[sample.sample_id].last_states_MH),
        ):
            assert 0.01 < token_errors(ours, theirs).mean() < 0.03

    damaged = run / "hidden_states" / shards[0]["file"]
    data = bytearray(damaged.read_bytes())
    data[-100] ^= 1
    damaged.write_bytes(data)
    assert cli("store", "verify", run, check=False).returncode == 1
    lost = {row["sample_id"] for row in store.index if row["shard"] == 0}
    cli("store", "repair", run)
    kept = {s["sha256"] for s in shards[1:]}
    assert f"{len(before) - len(lost)} samples of an earlier run are on disk, {len(lost)} to go" in (
        cli("capture", *args).stdout
    )
    assert verify_store(run / "hidden_states", run / "samples").faults == []
    again = HiddenStateStore(run / "hidden_states")
    assert kept <= {s["sha256"] for s in again.manifest["shards"]}
    for sample in again:
        errors = token_errors(sample.aux_states_TAH, before.pop(sample.sample_id).aux_states_TAH)
        assert errors.max() < (0.05 if sample.sample_id in lost else 1e-9)
    assert not before
