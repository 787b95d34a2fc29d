"""Stores become one: nothing copied, nothing twice, what does not belong together refused, whole at any moment."""

import os
import random
import signal
import subprocess
import sys

import pytest
import torch

from draftsmith.core.errors import UserError
from draftsmith.core.store import part_name
from draftsmith.hidden_state_capture import merge
from draftsmith.hidden_state_capture.merge import merge_stores
from draftsmith.hidden_state_capture.reader import HiddenStateStore

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def parts(tmp_path, make_store):
    """Three parts of one capture."""
    names = [["a", "b"], ["c"], ["d", "e"]]
    return [
        make_store(
            tmp_path / part_name(i, 3),
            mine,
            part={"index": i, "of": 3},
            rejected=[{"sample_id": f"r{i}"}],
            too_long=[{"sample_id": f"l{i}"}],
        )
        for i, mine in enumerate(names)
    ]


def read(folder):
    return {s.sample_id: s for s in HiddenStateStore(folder)}


def test_a_merged_store_has_every_sample_of_its_parts_bit_for_bit(parts, tmp_path):
    manifest = merge_stores(parts, tmp_path / "hidden_states")
    merged = read(tmp_path / "hidden_states")
    given = {k: s for part in parts for k, s in read(part).items()}
    assert list(merged) == ["a", "b", "c", "d", "e"] and set(given) == set(merged)
    for name, theirs in given.items():
        assert torch.equal(merged[name].aux_states_TAH, theirs.aux_states_TAH)
        assert torch.equal(merged[name].last_states_MH, theirs.last_states_MH)
        assert merged[name].last_rows_M.tolist() == theirs.last_rows_M.tolist()
    assert [s["file"] for s in manifest["shards"]] == [f"shard-0000{i}.safetensors" for i in range(5)]
    assert [r["sample_id"] for r in manifest["rejected"]] == ["r0", "r1", "r2"]
    assert [r["sample_id"] for r in manifest["too_long"]] == ["l0", "l1", "l2"]
    assert "part" not in manifest and [m["samples"] for m in manifest["merged_from"]] == [2, 1, 2]
    # So that `capture` and `train` take it for the whole capture that it is.
    assert manifest["inputs"] == HiddenStateStore(parts[0]).manifest["inputs"]


def test_shards_are_links_and_outlive_their_parts(parts, tmp_path):
    merge_stores(parts, tmp_path / "hidden_states")
    shard = tmp_path / "hidden_states" / "shard-00002.safetensors"
    assert shard.stat().st_ino == (parts[1] / "shard-00000.safetensors").stat().st_ino


@pytest.mark.parametrize("code", ["EXDEV", "EPERM"])
def test_where_the_file_system_has_no_links_shards_are_copied(parts, tmp_path, monkeypatch, code):
    def refuse(*_):
        raise OSError(getattr(merge.errno, code), "no links here")

    monkeypatch.setattr(merge.os, "link", refuse)
    merge_stores(parts, tmp_path / "hidden_states")
    assert list(read(tmp_path / "hidden_states")) == ["a", "b", "c", "d", "e"]


def test_missing_parts_are_named(parts, tmp_path):
    with pytest.raises(UserError, match=r"parts are missing: hidden_states.part-1-of-3\..*--shard 1/3"):
        merge_stores([parts[0], parts[2]], tmp_path / "hidden_states")
    assert not (tmp_path / "hidden_states").exists()


def test_parts_of_different_captures_are_refused(parts, tmp_path, make_store):
    other = make_store(tmp_path / "other", ["x"], part={"index": 1, "of": 2})
    with pytest.raises(UserError, match="not the parts of one capture"):
        merge_stores([*parts, other], tmp_path / "hidden_states")
    with pytest.raises(UserError, match="not the parts of one capture"):
        merge_stores([*parts, make_store(tmp_path / "whole", ["x"])], tmp_path / "hidden_states")


def test_an_unfinished_part_is_refused_by_name(parts, tmp_path):
    (parts[1] / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"needs the output of `capture`.*part-1-of-3"):
        merge_stores(parts, tmp_path / "hidden_states")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layer_ids": [1, 2, 4]}, r"layer_ids is \[1, 2, 3\] in one and \[1, 2, 4\] in two"),
        ({"storage": "fp8"}, 'storage is "bf16" in one and "fp8" in two'),
        ({"inputs": {"target": {"revision": "abc"}}}, 'target.revision is not set in one and "abc" in two'),
        ({"last_state": {"layer_id": 6, "norm": "pre", "norm_form": "rms_plus_one", "eps": 1e-6}}, "norm_form"),
    ],
)
def test_states_that_do_not_belong_together_are_refused_with_what_differs(tmp_path, make_store, changes, said):
    one, two = make_store(tmp_path / "one", ["a"]), make_store(tmp_path / "two", ["b"], **changes)
    with pytest.raises(UserError, match=said):
        merge_stores([one, two], tmp_path / "all")
    assert not (tmp_path / "all").exists()


def test_the_dtype_has_to_be_the_same_and_the_place_of_the_target_not(tmp_path, make_store):
    one = make_store(tmp_path / "one", ["a"])
    target = HiddenStateStore(one).manifest["target"]
    two = make_store(tmp_path / "two", ["b"], target={**target, "local_path": "/elsewhere"})
    merge_stores([one, two], tmp_path / "all")
    three = make_store(tmp_path / "three", ["c"], target={**target, "dtype": "float32"})
    with pytest.raises(UserError, match=r"target\.dtype"):
        merge_stores([one, three], tmp_path / "more")


def test_stores_of_runs_with_other_samples_merge_and_say_so(tmp_path, make_store):
    stores = [make_store(tmp_path / n, [n], inputs={"samples_manifest_sha256": n}) for n in ("x", "y")]
    assert merge_stores(stores, tmp_path / "all")["inputs"]["samples_manifest_sha256"] == ["x", "y"]


def test_a_sample_in_two_stores_is_refused_by_id(tmp_path, make_store):
    one, two = make_store(tmp_path / "one", ["a", "b"]), make_store(tmp_path / "two", ["b"])
    with pytest.raises(UserError, match=r"sample b is in .*one and in .*two"):
        merge_stores([one, two], tmp_path / "all")


def test_a_store_given_twice_and_a_merge_into_a_part_are_refused(tmp_path, make_store):
    store = make_store(tmp_path / "store", ["a", "b"])
    (tmp_path / "link").symlink_to(store)
    with pytest.raises(UserError, match="given twice"):
        merge_stores([store, tmp_path / "link"], tmp_path / "merged")
    with pytest.raises(UserError, match="one of the stores"):
        merge_stores([store], store / "merged")
    assert not (tmp_path / "merged").exists() and not (store / "merged").exists()


def test_what_is_there_is_not_overwritten(parts, tmp_path):
    (tmp_path / "hidden_states").mkdir()
    merge_stores(parts, tmp_path / "hidden_states")
    with pytest.raises(UserError, match="there already and not empty"):
        merge_stores(parts, tmp_path / "hidden_states")


# Kills the merge at a random one of the calls that change the disk.
SCRIPT = """
import os, signal, sys
from pathlib import Path
from draftsmith.core import atomic
from draftsmith.hidden_state_capture import merge

folder, count = Path(sys.argv[1]), int(sys.argv[2])
for module, name in ((os, "link"), (os, "replace"), (atomic, "fsync_path"), (merge.pq, "write_table")):
    def dying(*args, call=getattr(module, name), **kwargs):
        global count
        count -= 1
        if count == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)
    setattr(module, name, dying)
merge.merge_stores([Path(p) for p in sys.argv[3:]], folder)
"""


def test_a_killed_merge_leaves_no_store_and_can_be_run_again(parts, tmp_path):
    folder = tmp_path / "hidden_states"
    before = {p: sorted(f.name for f in p.iterdir()) for p in parts}
    for moment in sorted(random.sample(range(1, 12), 3)):
        command = [sys.executable, "-c", SCRIPT, str(folder), str(moment), *map(str, parts)]
        killed = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        assert killed.returncode == -signal.SIGKILL, (moment, killed.stderr)
        assert not folder.exists() or list(read(folder)) == ["a", "b", "c", "d", "e"], moment
        assert {p: sorted(f.name for f in p.iterdir()) for p in parts} == before
    if not folder.exists():
        merge_stores(parts, folder)
    assert list(read(folder)) == ["a", "b", "c", "d", "e"]
    assert not list(tmp_path.glob(".tmp-*"))
