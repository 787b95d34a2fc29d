"""Capture on several engines and hosts, the engines apart: shares and their merge, GPUs, a server's flags."""

import json
import shlex

import pytest

from draftsmith.core.cli_capture import capture_share, merge, serve_args
from draftsmith.core.errors import StageFailed, UserError
from draftsmith.core.manifest import read_manifest
from draftsmith.core.run import RunFolder
from draftsmith.core.samples import read_samples
from draftsmith.core.store import part_name
from draftsmith.core.target import resolve_target
from draftsmith.hidden_state_capture import local
from draftsmith.hidden_state_capture.driver import Job
from draftsmith.hidden_state_capture.finish import Captured, finish
from draftsmith.hidden_state_capture.reader import HiddenStateStore
from draftsmith.hidden_state_capture.served import capture_served, wait_quiet
from draftsmith.hidden_state_capture.stage import _missing, capture, capture_inputs
from draftsmith.hidden_state_capture.todo import read_heads, shares
from draftsmith.hidden_state_capture.writer import CONNECTOR, SampleStates, ShardWriter, WriterConfig

PROBE = '{"norm_form": "rms", "eps": 1e-6, "argmax_agreement": 1.0, "positions": 8, "state_errors": null}'


def write_part(config, index, of, states):
    """What `capture --shard index/of` leaves, the engine apart."""
    run, target = RunFolder.of(config), resolve_target(config.target)
    folder = run.root / part_name(index, of)
    heads = shares(read_heads(run.samples), of)[index]
    inputs = capture_inputs(config, target, [3, 4, 5], run)
    captured = Captured(config, target, [3, 4, 5], heads, [], inputs, folder, (index, of))
    writer = ShardWriter(folder, WriterConfig(config.capture.shard_bytes, 1 << 20))
    missing = {h.sample_id for h in _missing(captured)}
    for i, s in enumerate(read_samples(run.samples)):
        if s.sample_id in missing:
            writer.put(SampleStates(s.sample_id, s.input_ids, s.loss_spans, states(len(s.input_ids), i), bool))
    writer.flush()
    (folder / "probe.json").write_text(PROBE)
    finish(captured)


def test_shares_merge_into_the_store_of_a_single_capture(synthetic_run, random_states, capsys):
    run = RunFolder.of(synthetic_run)
    whole = {s.sample_id: s.aux_states_TAH.clone() for s in HiddenStateStore(run.hidden_states)}
    for i in range(3):
        write_part(synthetic_run, i, 3, random_states)
    assert [read_manifest(run.root / part_name(i, 3))["part"] for i in range(3)] == [
        {"index": i, "of": 3} for i in range(3)
    ]
    merge(synthetic_run, fresh=True)
    merged = {s.sample_id: s.aux_states_TAH for s in HiddenStateStore(run.hidden_states)}
    assert merged.keys() == whole.keys() and all(merged[i].equal(whole[i]) for i in whole)
    assert "24 samples of 3 parts" in capsys.readouterr().out
    capture(synthetic_run)  # it is this run's store
    assert "already there" in capsys.readouterr().out


def test_a_share_that_is_not_done_is_asked_for_by_its_number(synthetic_run, random_states):
    write_part(synthetic_run, 0, 2, random_states)
    with pytest.raises(UserError, match=r"parts are missing: hidden_states\.part-1-of-2.*--shard 1/2"):
        merge(synthetic_run, fresh=True)


def test_merging_without_shares_says_how_to_make_them(synthetic_run):
    with pytest.raises(UserError, match=r"no parts of a capture.*capture --shard i/n"):
        merge(synthetic_run, fresh=False)


@pytest.mark.parametrize("shard", ["4/4", "1", "a/b", "-1/2", "1/0", ""])
def test_a_share_that_does_not_exist_is_refused(synthetic_run, shard):
    with pytest.raises(UserError, match="not i/n with i from 0 to n - 1"):
        capture_share(synthetic_run, shard, fresh=False)


# ---- engines of one host ---------------------------------------------------------------------------------------------


def test_every_engine_has_gpus_of_its_own(monkeypatch):
    monkeypatch.setattr(local, "has_cuda", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7,8")
    assert local.visible_devices(2, 2) == ["4,5", "6,7"]
    assert local.visible_devices(1, 2) == [None]  # one engine sees all, as without data_parallel
    with pytest.raises(UserError, match=r"there are 5 GPUs\. Set capture\.data_parallel to 2"):
        local.visible_devices(3, 2)


# ---- a server --------------------------------------------------------------------------------------------------------


@pytest.fixture
def job(synthetic_run):
    run, target = RunFolder.of(synthetic_run), resolve_target(synthetic_run.target)
    return Job(synthetic_run, target, [3, 4, 5], run.samples, run.hidden_states, first=0, engines=1, max_rejected=0)


def test_the_servers_flags_are_the_stages_own(synthetic_run, capsys):
    serve_args(synthetic_run)
    words = shlex.split(capsys.readouterr().out)
    assert words[:3] == ["vllm", "serve", str(resolve_target(synthetic_run.target).local_path)]
    assert "--no-enable-prefix-caching" in words
    flags = dict(zip(words[4::2], words[5::2], strict=True))
    connector = json.loads(flags["--kv-transfer-config"])
    extra = connector["kv_connector_extra_config"]
    assert extra["folder"] == str(RunFolder.of(synthetic_run).hidden_states.absolute())
    assert extra["layer_ids"] == [3, 4, 5, 6] and extra["served"] and extra["writer"]["seal_after"] == 5.0
    assert WriterConfig(**extra["writer"], first=0)  # what the connector makes of it
    ids = json.loads(flags["--speculative-config"])["draft_model_config"]["hf_config"]
    assert ids == {"eagle_aux_hidden_state_layer_ids": [3, 4, 5, 6]}
    assert flags["--max-model-len"] == "66"


def test_a_folder_that_no_server_writes_into_is_said(job):
    with pytest.raises(UserError, match=r"no server captures into .*capture serve-args"):
        capture_served(job, [])


def test_a_server_that_was_started_for_other_states_is_refused(job):
    (job.folder / CONNECTOR).write_text(
        json.dumps({"layer_ids": [2, 3, 4, 6], "storage": "bf16", "dtype": "torch.bfloat16"})
    )
    with pytest.raises(UserError, match=r"layer_ids is \[2, 3, 4, 6\] there and \[3, 4, 5, 6\] here"):
        capture_served(job, [])


def test_a_server_that_is_not_there_is_said(job, changed):
    told = {"layer_ids": [3, 4, 5, 6], "storage": "bf16", "dtype": "torch.bfloat16"}
    (job.folder / CONNECTOR).write_text(json.dumps(told))
    config = changed(job.config, capture={"server": "http://127.0.0.1:9"})
    here = Job(config, job.target, job.layer_ids, job.samples, job.folder, 0, 1, 0)
    with pytest.raises(UserError, match=r"capture\.server http://127\.0\.0\.1:9: no vLLM server answers"):
        capture_served(here, [])


def test_a_folder_without_a_server_needs_no_waiting(tmp_path):
    wait_quiet(tmp_path, 1000.0)


def test_more_rejected_samples_than_allowed_stop_the_next_run_at_once(synthetic_run):
    run = RunFolder.of(synthetic_run)
    manifest = json.loads((run.hidden_states / "manifest.json").read_text())
    (run.hidden_states / "manifest.json").unlink()
    (run.hidden_states / "inputs.json").write_text(json.dumps(manifest["inputs"]))
    (run.hidden_states / "rejected-00009.json").write_text('[{"sample_id": "c-000/0", "reason": "non-finite states"}]')
    with pytest.raises(StageFailed, match=r"1 of 24 samples have unusable states .*c-000/0.*--fresh"):
        capture(synthetic_run)
