"""A lost index is made again from the shards; what is no store is named for what it is."""

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from draftsmith.core.cli import app
from draftsmith.core.errors import UserError
from draftsmith.core.run import RunFolder
from draftsmith.core.store import INDEX
from draftsmith.hidden_state_capture.reader import HiddenStateStore
from draftsmith.hidden_state_capture.repair import repair_store
from draftsmith.hidden_state_capture.verify import verify_store

pytestmark = pytest.mark.usefixtures("one_thread")


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


def run_cli(*args):
    return CliRunner().invoke(app, ["store", *map(str, args)])


@pytest.mark.parametrize("damage", [b"garbage", None])
def test_a_lost_index_is_made_again_as_it_was(synthetic_run, damage):
    run = RunFolder.of(synthetic_run)
    index = run.hidden_states / INDEX
    before = pq.read_table(index).to_pylist()
    index.unlink() if damage is None else index.write_bytes(damage)
    for refused in (lambda: HiddenStateStore(run.hidden_states), lambda: verify_store(run.hidden_states)):
        with pytest.raises(UserError, match=r"index\.parquet: missing or damaged.*store repair` makes it again"):
            refused()
    done = run_cli("repair", run.root)
    assert done.exit_code == 0 and "made again from the shards, 24 samples" in done.stdout
    assert pq.read_table(index).to_pylist() == before
    assert verify_store(run.hidden_states, run.samples).faults == []


def test_samples_of_a_shard_that_is_lost_too_are_captured_again(synthetic_run):
    run = RunFolder.of(synthetic_run)
    manifest = HiddenStateStore(run.hidden_states).manifest
    bad = manifest["shards"][1]
    flip(run.hidden_states / bad["file"], -1)
    (run.hidden_states / INDEX).write_bytes(b"garbage")
    verdict = repair_store(run.hidden_states, run.samples)
    assert verdict.bad_shards == [bad["file"]]
    assert sum(f.missing for f in verdict.faults) == bad["samples"]
    assert not (run.hidden_states / "manifest.json").exists()  # a capture to go on with


def test_without_its_samples_an_index_cannot_be_made_again(synthetic_run, tree_of):
    run = RunFolder.of(synthetic_run)
    (run.hidden_states / INDEX).write_bytes(b"garbage")
    before = tree_of(run.hidden_states)
    with pytest.raises(UserError, match="the shards alone do not say which sample is which"):
        repair_store(run.hidden_states, None)
    assert tree_of(run.hidden_states) == before


def test_a_repaired_store_is_a_capture_to_go_on_with_and_says_so(synthetic_run):
    run = RunFolder.of(synthetic_run)
    shards = HiddenStateStore(run.hidden_states).manifest["shards"]
    flip(run.hidden_states / shards[0]["file"], -1)
    assert run_cli("repair", run.root).exit_code == 0
    error = str(run_cli("repair", run.hidden_states).exception)
    assert "a capture that is not finished (it was repaired, and its damaged shards are set aside)" in error
    assert f"{len(shards)} shards are whole" in error and "Run `draftsmith capture`" in error


@pytest.mark.parametrize("command", ["verify", "stats", "repair"])
def test_what_is_no_store_is_named(synthetic_run, tmp_path, command):
    run = RunFolder.of(synthetic_run)
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").write_text("{}")
    said = {
        tmp_path / "nowhere": "nowhere: no such folder",
        run.samples: "samples holds the output of `prepare`, not hidden states",
        run.root / "config.yaml": "config.yaml: a file, not a folder",
        tmp_path / "draft": "draft holds an exported draft",
        tmp_path: "holds no hidden states (no manifest.json)",
    }
    for path, what in said.items():
        error = run_cli(command, path).exception
        assert isinstance(error, UserError) and what in str(error) and "Run `draftsmith capture`" not in str(error)


def test_a_merge_reads_every_byte_of_its_parts_unless_told_not_to(tmp_path, make_store):
    for name in ("x", "y"):
        make_store(tmp_path / name / "hidden_states", [name])
    flip(tmp_path / "y" / "hidden_states" / "shard-00000.safetensors", -1)
    merge = ("merge", tmp_path / "x", tmp_path / "y", "--into", tmp_path / "all" / "hidden_states")
    error = run_cli(*merge).exception
    assert isinstance(error, UserError) and "shard-00000.safetensors: its bytes are not those" in str(error)
    assert not (tmp_path / "all" / "hidden_states").exists()
    assert run_cli(*merge, "--no-verify").exit_code == 0
