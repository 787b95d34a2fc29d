"""`store verify`, `repair` and `stats`: every kind of damage is named, and mended by capturing what is lost again."""

import json
import os
import random
import signal
import subprocess
import sys

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from draftsmith.core.atomic import sha256_file
from draftsmith.core.cli import app
from draftsmith.core.errors import UserError
from draftsmith.core.run import RunFolder
from draftsmith.core.store import INDEX
from draftsmith.core.target import resolve_target
from draftsmith.hidden_state_capture.finish import Captured, finish
from draftsmith.hidden_state_capture.reader import HiddenStateStore
from draftsmith.hidden_state_capture.repair import repair_store
from draftsmith.hidden_state_capture.shard import committed_shards, next_number, remove_uncommitted
from draftsmith.hidden_state_capture.stage import capture, capture_inputs
from draftsmith.hidden_state_capture.stats import store_stats
from draftsmith.hidden_state_capture.todo import Head
from draftsmith.hidden_state_capture.verify import verify_store
from draftsmith.hidden_state_capture.writer import SampleStates, ShardWriter, WriterConfig

pytestmark = pytest.mark.usefixtures("one_thread")


BOTH = pytest.mark.parametrize("store", ["bf16", "fp8"], indirect=True)


@pytest.fixture
def store(tmp_path, make_store, request):
    """Five samples in three shards."""
    storage = getattr(request, "param", "bf16")
    folder = make_store(
        tmp_path / "hidden_states", ["a", "b", "c", "d", "e"], 1000 if storage == "bf16" else 700, storage
    )
    assert len(HiddenStateStore(folder).manifest["shards"]) == 3
    return folder


def edit(path, change):
    tree = json.loads(path.read_text())
    change(tree)
    path.write_text(json.dumps(tree))


def rewrite(folder, change, file="shard-00001.safetensors"):
    """Change a shard's tensors with its checksum in the manifest, as a faulty writer would have."""
    tensors = load_file(folder / file)
    change(tensors)
    save_file({k: v.clone() for k, v in tensors.items()}, folder / file)

    def sums(manifest):
        entry = next(s for s in manifest["shards"] if s["file"] == file)
        entry |= {"sha256": sha256_file(folder / file), "bytes": (folder / file).stat().st_size}

    edit(folder / "manifest.json", sums)


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def faults(folder, samples=None):
    return [(f.shard, f.sample_id, f.what) for f in verify_store(folder, samples).faults]


# ---- verify ----------------------------------------------------------------------------------------------------------


@BOTH
def test_a_whole_store_has_no_fault(store):
    verdict = verify_store(store)
    assert verdict.faults == [] and not verdict.against_samples
    assert [len(rows) for rows in verdict.rows.values()] == [2, 2, 1]


@pytest.mark.parametrize("at", [0, 300, -1])
def test_a_flipped_bit_anywhere_is_found(store, at):
    flip(store / "shard-00001.safetensors", at)
    assert faults(store) == [("shard-00001.safetensors", None, "its bytes are not those that were written (sha256)")]


def test_a_missing_and_a_cut_shard_are_named(store):
    (store / "shard-00000.safetensors").unlink()
    cut = store / "shard-00002.safetensors"
    cut.write_bytes(cut.read_bytes()[:-10])
    assert [(shard, what.split(",")[0]) for shard, _, what in faults(store)] == [
        ("shard-00000.safetensors", "the file is missing"),
        ("shard-00002.safetensors", f"{cut.stat().st_size} bytes long"),
    ]


@BOTH
def test_wrong_states_of_one_sample_are_named_by_it(store):
    def spoil(tensors):
        tensors["aux_states"].view(torch.uint8)[-1, 0, 3] ^= 1

    rewrite(store, spoil)
    assert faults(store) == [("shard-00001.safetensors", "d", "its bytes are not the index's (sha256)")]


@BOTH
def test_states_that_are_not_finite_are_found_even_where_the_checksums_fit(store, monkeypatch):
    def spoil(tensors):
        states = tensors["last_states"]
        states[0, 0] = float("nan")

    rewrite(store, spoil)
    found = faults(store)
    assert ("shard-00001.safetensors", "c", "last_states are not finite") in found


def test_tensors_that_are_not_the_formats_are_named(store):
    rewrite(store, lambda t: t.update(loss_mask=t["loss_mask"].to(torch.int32)))
    rewrite(store, lambda t: t.pop("last_rows"), "shard-00002.safetensors")
    said = [what for _, _, what in faults(store)]
    assert said[0].startswith("loss_mask is torch.int32") and said[1] == "has no last_rows"


def test_rows_that_are_not_before_reply_tokens_are_named(store):
    rewrite(store, lambda t: t["last_rows"][0].add_(1))
    assert ("shard-00001.safetensors", "c", "last_rows are not the rows before its reply tokens") in faults(store)


def test_an_index_that_disagrees_is_found(store):
    table = pq.read_table(store / INDEX)
    rows = table.to_pylist()
    rows[3]["start"] += 1
    rows[1]["supervised_tokens"] += 1
    rows.append({**rows[0], "shard": 9})
    pq.write_table(table.from_pylist(rows, schema=table.schema), store / INDEX)
    found = faults(store)
    assert (None, "a", "its shard 9 is not in the manifest") in found
    assert ("shard-00001.safetensors", None, "the index has sample d at another place") in found
    assert ("shard-00000.safetensors", "b", "the index has another number of supervised tokens") in found


def test_a_sample_that_is_there_twice_is_named(tmp_path, make_store):
    folder = make_store(tmp_path / "hidden_states", ["a", "b", "a"])
    said = "the sample is in shard-00000.safetensors too"
    assert ("shard-00002.safetensors", "a", said) in faults(folder)


def test_the_samples_are_compared_too(synthetic_run, changed):
    run = RunFolder.of(synthetic_run)
    assert verify_store(run.hidden_states, run.samples).against_samples
    table = pq.read_table(run.hidden_states / INDEX)
    rows = [{**r, "split": "eval"} if r["sample_id"] == "c-001/0" else r for r in table.to_pylist()]
    rows = [r for r in rows if r["sample_id"] != "c-023/0"]
    pq.write_table(table.from_pylist(rows, schema=table.schema), run.hidden_states / INDEX)
    found = faults(run.hidden_states, run.samples)
    assert any(f[1:] == ("c-001/0", "its split is eval in the index and train in samples/") for f in found)
    assert (None, "c-023/0", "not in the store") in found
    edit(run.hidden_states / "manifest.json", lambda m: m.update(part={"index": 0, "of": 2}))
    assert "not in the store" not in [what for _, _, what in faults(run.hidden_states, run.samples)]
    edit(run.samples / "manifest.json", lambda m: m.update(created="later"))
    assert (None, None, f"made from other samples than {run.samples} holds") in faults(run.hidden_states, run.samples)


# ---- repair ----------------------------------------------------------------------------------------------------------


def go_on(config, samples, random_states):
    """What `capture` does after a repair, the engine apart: the missing samples, then the end of the stage."""
    run, target = RunFolder.of(config), resolve_target(config.target)
    done = {row["sample_id"] for s in committed_shards(run.hidden_states) for row in s["rows"]}
    remove_uncommitted(run.hidden_states)
    first = next_number(run.hidden_states)
    writer = ShardWriter(run.hidden_states, WriterConfig(config.capture.shard_bytes, 2**30, first=first))
    captured = []
    for i, s in enumerate(samples):
        if s.sample_id not in done:
            captured.append(s.sample_id)
            spans = [list(span) for span in s.loss_spans]
            writer.put(SampleStates(s.sample_id, s.input_ids, spans, random_states(len(s.input_ids), i), ready=bool))
    writer.flush()
    heads, inputs = [Head.of(s) for s in samples], capture_inputs(config, target, [3, 4, 5], run)
    finish(Captured(config, target, [3, 4, 5], heads, [], inputs, run.hidden_states))
    return captured


def test_a_repaired_store_captures_only_what_was_lost_and_is_whole_again(
    synthetic_run, synthetic_samples, random_states, capsys
):
    run = RunFolder.of(synthetic_run)
    before = {s.sample_id: s for s in HiddenStateStore(run.hidden_states)}
    shards = [s["file"] for s in HiddenStateStore(run.hidden_states).manifest["shards"]]
    flip(run.hidden_states / shards[1], -1)
    verdict = repair_store(run.hidden_states, run.samples)
    *kept, lost = [r["sample_id"] for r in verdict.rows[shards[1]]]  # the last byte is of the last sample
    assert verdict.bad_shards == [shards[1]] and verdict.kept == len(kept) > 0
    assert [p.name for p in (run.hidden_states / "damaged").iterdir()] == [shards[1]]
    with pytest.raises(UserError, match="needs the output of `capture`"):
        HiddenStateStore(run.hidden_states)
    assert go_on(synthetic_run, synthetic_samples, random_states) == [lost]
    assert verify_store(run.hidden_states, run.samples).faults == []
    for sample in HiddenStateStore(run.hidden_states):
        assert torch.equal(sample.aux_states_TAH, before[sample.sample_id].aux_states_TAH)
        assert torch.equal(sample.last_states_MH, before.pop(sample.sample_id).last_states_MH)
    assert not before
    capture(synthetic_run)
    assert "(already there)" in capsys.readouterr().out


@BOTH
@pytest.mark.parametrize(
    "tensor", ["input_ids", "loss_mask", "aux_states", "last_states", "last_rows", "sample_offsets"]
)
def test_one_damaged_sample_costs_no_other_of_its_shard(store, tensor):
    """Where the damage is in what follows from the samples (the last two), it costs none."""
    before = {s.sample_id: s for s in HiddenStateStore(store)}
    raw = (store / "shard-00001.safetensors").read_bytes()
    head = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    flip(store / "shard-00001.safetensors", 8 + int.from_bytes(raw[:8], "little") + head[tensor]["data_offsets"][0])
    verdict = repair_store(store)
    first, *others = [r["sample_id"] for r in verdict.rows["shard-00001.safetensors"]]
    kept = [first, *others] if tensor in ("last_rows", "sample_offsets") else others
    assert verdict.kept == len(kept) and others
    (sidecar,) = [s for s in committed_shards(store) if s["shard"]["file"] == "shard-00003.safetensors"]
    assert [row["sample_id"] for row in sidecar["rows"]] == kept
    assert sha256_file(store / "shard-00003.safetensors") == sidecar["shard"]["sha256"]
    tensors = load_file(store / "shard-00003.safetensors")
    same = next(r for r in sidecar["rows"] if r["sample_id"] == others[0])
    rows = slice(same["start"], same["start"] + same["length"])
    lasts = slice(same["last_start"], same["last_start"] + same["last_length"])
    assert torch.equal(tensors["input_ids"][rows], torch.as_tensor(before[others[0]].input_ids_T).int())
    assert torch.equal(
        tensors["last_rows"][lasts] - same["start"], torch.as_tensor(before[others[0]].last_rows_M).int()
    )
    original = next(r for r in verdict.rows["shard-00001.safetensors"] if r["sample_id"] == others[0])
    assert same["sha256"] == original["sha256"]


def test_a_shard_that_is_cut_or_not_there_keeps_nothing(store):
    file = store / "shard-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert repair_store(store).kept == 0
    assert not (store / "shard-00003.safetensors").exists()


def test_a_repair_of_a_whole_store_changes_nothing(store, tree_of):
    before = tree_of(store)
    assert repair_store(store).faults == []
    assert tree_of(store) == before


def test_a_shard_damaged_twice_is_kept_twice(store):
    for at in (-1, -2):
        flip(store / "shard-00001.safetensors", at)
        manifest, index = (store / "manifest.json").read_bytes(), (store / INDEX).read_bytes()
        repair_store(store)
        (store / "shard-00001.safetensors").write_bytes(b"captured again, and damaged again")
        (store / "manifest.json").write_bytes(manifest)
        (store / INDEX).write_bytes(index)
    names = sorted(p.name for p in (store / "damaged").iterdir())
    assert names == ["shard-00001.safetensors", "shard-00001.safetensors.1"]


def test_rejected_samples_stay_known(store):
    edit(store / "manifest.json", lambda m: m.update(rejected=[{"sample_id": "n", "reason": "non-finite states"}]))
    (store / "shard-00000.safetensors").unlink()
    repair_store(store)
    (file,) = store.glob("rejected-*.json")
    assert json.loads(file.read_text()) == [{"sample_id": "n", "reason": "non-finite states"}]
    assert not (store / "damaged").exists()


def test_what_no_capture_can_mend_is_refused_and_left_alone(store, tree_of):
    flip(store / "shard-00001.safetensors", -1)
    edit(store / "manifest.json", lambda m: m["inputs"].update(samples_manifest_sha256=["x", "y"]))
    before = tree_of(store)
    with pytest.raises(UserError, match="merged from stores of several runs"):
        repair_store(store)
    assert tree_of(store) == before


SCRIPT = """
import os, signal, sys
from pathlib import Path
from draftsmith.core import atomic
from draftsmith.hidden_state_capture import repair

folder, count = Path(sys.argv[1]), int(sys.argv[2])
for owner, name in ((os, "link"), (os, "replace"), (os, "unlink"), (Path, "unlink"), (repair, "fsync_path")):
    def dying(*args, call=getattr(owner, name), **kwargs):
        global count
        count -= 1
        if count == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)
    setattr(owner, name, dying)
repair.repair_store(folder)
"""


def test_a_killed_repair_leaves_the_store_or_a_capture_to_go_on_with(store):
    flip(store / "shard-00001.safetensors", -1)
    good = {n: (store / n).read_bytes() for n in ("shard-00000.safetensors", "shard-00002.safetensors")}
    for moment in sorted(random.sample(range(1, 14), 2)):
        command = [sys.executable, "-c", SCRIPT, str(store), str(moment)]
        ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        assert ended.returncode in (0, -signal.SIGKILL), (moment, ended.stderr)
        assert {n: (store / n).read_bytes() for n in good} == good
        if (store / "manifest.json").exists():
            assert verify_store(store).bad_shards == ["shard-00001.safetensors"], moment
        else:
            break
    else:
        repair_store(store)
    assert (store / "damaged" / "shard-00001.safetensors").is_file()
    remove_uncommitted(store)
    writer = ShardWriter(store, WriterConfig(1, 2**30, first=next_number(store)))
    assert {s["shard"]["file"] for s in committed_shards(store)} == {*good, "shard-00003.safetensors"}
    names = [row["sample_id"] for s in committed_shards(store) for row in s["rows"]]
    assert sorted(names) == sorted(set(names)) and len(names) == 4  # none twice, and the damaged one gone
    assert not (store / "shard-00001.safetensors").exists() and writer.rejected == []


# ---- stats -----------------------------------------------------------------------------------------------------------


@BOTH
def test_stats_are_the_stores(store):
    found, samples = store_stats(store, probed=100), list(HiddenStateStore(store))
    assert (found["samples"], found["shards"], found["rejected"]) == (5, 3, 0)
    assert found["tokens"] == sum(len(s.input_ids_T) for s in samples)
    assert found["supervised_tokens"] == sum(int(s.loss_mask_T.sum()) for s in samples)
    assert found["lengths"] == {"min": 6, "median": 7, "max": 8}
    assert found["groups"] == [
        {"source": "s", "split": "train", **{k: found[k] for k in ("samples", "tokens", "supervised_tokens")}}
    ]
    assert [layer["layer_id"] for layer in found["layers"]] == [1, 2, 3, 6]
    second = torch.cat([s.aux_states_TAH[:, 1] for s in samples]).double()
    assert found["layers"][1]["rms"] == pytest.approx(second.pow(2).mean().sqrt().item(), rel=1e-5)
    assert found["layers"][1]["largest"] == second.abs().max()
    rest = torch.cat([s.aux_states_TAH[1:, 0] for s in samples]).double()
    assert found["layers"][0]["rms_other_tokens"] == pytest.approx(rest.pow(2).mean().sqrt().item(), rel=1e-5)


def test_an_empty_probe_reads_no_states(store):
    for shard in store.glob("*.safetensors"):
        shard.write_bytes(b"x" * shard.stat().st_size)
    assert store_stats(store, probed=0)["layers"] == []


# ---- the commands ----------------------------------------------------------------------------------------------------


def run_cli(*args):
    return CliRunner().invoke(app, ["store", *map(str, args)])


def test_the_commands_say_what_they_found(store, tmp_path):
    assert json.loads(run_cli("stats", store, "--json").stdout)["samples"] == 5
    assert "of first tokens" in run_cli("stats", tmp_path).stdout  # the run's folder will do
    whole = run_cli("verify", store)
    assert whole.exit_code == 0 and "5 samples in 3 shards" in whole.stdout
    flip(store / "shard-00001.safetensors", -1)
    damaged = run_cli("verify", store)
    assert damaged.exit_code == 1 and "shard-00001.safetensors" in damaged.stdout
    (fault,) = json.loads(run_cli("verify", store, "--json").stdout)
    assert fault["shard"] == "shard-00001.safetensors"
    said = run_cli("repair", store).stdout.replace("\n", " ")
    assert "shard-00001.safetensors set aside" in said and "1 samples to go" in said
    assert "what is whole of them kept (1 samples)" in said


def test_merge_by_command(tmp_path, make_store):
    for name in ("x", "y"):
        make_store(tmp_path / name / "hidden_states", [name])
    done = run_cli("merge", tmp_path / "x", tmp_path / "y", "--into", tmp_path / "all" / "hidden_states")
    assert done.exit_code == 0, done.output
    assert [r["sample_id"] for r in HiddenStateStore(tmp_path / "all" / "hidden_states").index] == ["x", "y"]


def test_a_command_wants_a_folder_or_a_config(store):
    error = run_cli("verify").exception
    assert isinstance(error, UserError) and "a folder nor --config is given" in str(error)
