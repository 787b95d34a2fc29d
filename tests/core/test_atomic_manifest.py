"""Files and folders appear whole or not at all, and a manifest refuses what does not fit it."""

import os
import signal
import subprocess
import sys

import pytest

from draftsmith.core.atomic import atomic_folder, remove_leftovers, write_atomic, write_json, write_text
from draftsmith.core.config import DataConfig
from draftsmith.core.errors import UserError
from draftsmith.core.manifest import (
    MANIFEST,
    check_inputs,
    manifest_hash,
    read_manifest,
    require_manifest,
    write_manifest,
)
from draftsmith.core.run import COMPLETE, RunFolder


class Boom(Exception):
    pass


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_a_failed_write_leaves_the_old_content_and_nothing_else(tmp_path):
    write_text(tmp_path / "a.txt", "old")

    def half(tmp):
        tmp.write_text("ne")
        raise Boom

    with pytest.raises(Boom):
        write_atomic(tmp_path / "a.txt", half)
    assert (tmp_path / "a.txt").read_text() == "old" and names(tmp_path) == ["a.txt"]


def test_text_and_json_are_utf8(tmp_path):
    write_json(tmp_path / "deep" / "a.json", {"a": "ü"})
    assert "ü" in (tmp_path / "deep" / "a.json").read_text(encoding="utf-8")


def test_a_failed_folder_leaves_nothing(tmp_path):
    with pytest.raises(Boom), atomic_folder(tmp_path / "out") as folder:
        (folder / "file").write_text("half")
        raise Boom
    assert names(tmp_path) == []


def test_a_failed_folder_leaves_the_old_one(tmp_path):
    with atomic_folder(tmp_path / "out") as folder:
        (folder / "file").write_text("old")
    with pytest.raises(Boom), atomic_folder(tmp_path / "out") as folder:
        (folder / "file").write_text("half")
        raise Boom
    assert names(tmp_path) == ["out"] and (tmp_path / "out" / "file").read_text() == "old"


def test_a_folder_replaces_the_old_one_whole(tmp_path):
    for content in ("old", "new"):
        with atomic_folder(tmp_path / "out", marker=COMPLETE) as folder:
            (folder / content).write_text(content)
    assert names(tmp_path) == ["out"] and names(tmp_path / "out") == [COMPLETE, "new"]


def test_the_marker_is_not_there_before_the_block_ends(tmp_path):
    with atomic_folder(tmp_path / "out", marker=COMPLETE) as folder:
        assert not (folder / COMPLETE).exists() and not (tmp_path / "out").exists()


def killed_inside_atomic_folder(path):
    script = """
import os, signal, sys
from pathlib import Path
from draftsmith.core.atomic import atomic_folder
with atomic_folder(Path(sys.argv[1]), marker="COMPLETE") as folder:
    (folder / "big").write_bytes(bytes(1000))
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize("place", ["export", "checkpoints/step-0000007"])
def test_a_kill_leaves_no_folder_and_the_next_run_clears_up(make_config, place):
    config = make_config()
    run = RunFolder.of(config)
    path = run.root / place
    killed_inside_atomic_folder(path)
    assert not path.exists() and run.complete_checkpoints() == []
    assert [p for p in run.root.rglob("big")], "the kill came before anything was written"
    run.open(config)
    assert not [p for p in run.root.rglob("big")], "what the killed process wrote is still there"


WRITE_WITH_A_SIZE_LIMIT = """
import resource, signal, sys
from pathlib import Path
from draftsmith.core.vocab import build_mapping, count_tokens, save_mapping
if sys.argv[2] == "killed":
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # the write that goes beyond the limit ends the process
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
save_mapping(Path(sys.argv[1]), build_mapping(count_tokens([], 512), [], 512), {})
"""


def stopped_while_writing(path, how):
    command = [sys.executable, "-c", WRITE_WITH_A_SIZE_LIMIT, str(path), how]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_file_whose_writing_was_killed_half_way_is_cleared_by_the_next_run(make_config):
    config = make_config()
    run = RunFolder.of(config)
    done = stopped_while_writing(run.vocab_mapping, "killed")
    assert done.returncode == -signal.SIGXFSZ, done.stderr
    assert not run.vocab_mapping.exists() and names(run.root)
    run.open(config)
    assert names(run.root) == ["config.yaml"]


def test_a_file_that_the_disk_has_no_room_for_leaves_nothing(tmp_path):
    done = stopped_while_writing(tmp_path / "mapping.safetensors", "refused")
    assert done.returncode == 1 and "File too large" in done.stderr
    assert names(tmp_path) == []


def test_opening_a_run_keeps_what_is_there_and_writes_the_config(make_config):
    config = make_config()
    run = RunFolder.of(config)
    write_text(run.samples / "kept", "x")
    run.open(config)
    assert (run.samples / "kept").read_text() == "x"
    assert "max_length: 64" in (run.root / "config.yaml").read_text()


def test_asking_for_paths_creates_nothing(make_config, tmp_path):
    run = RunFolder.of(make_config())
    assert run.complete_checkpoints() == [] and not run.root.exists()


@pytest.fixture
def made(tmp_path):
    inputs = {"data": {"max_length": 512, "sources": [{"path": "a"}]}, "seed": 0}
    write_manifest(tmp_path, "prepare", inputs, {"counts": {"train": 3}})
    return tmp_path


def test_a_manifest_holds_inputs_outputs_and_versions(made):
    manifest = read_manifest(made)
    assert manifest["stage"] == "prepare" and manifest["counts"] == {"train": 3}
    assert manifest["inputs"]["seed"] == 0 and {"python", "torch", "draftsmith"} <= manifest["versions"].keys()


def test_equal_inputs_pass(made):
    check_inputs(made, read_manifest(made), {"data": {"max_length": 512, "sources": [{"path": "a"}]}, "seed": 0})


def test_tuples_and_lists_are_the_same_input(made):
    check_inputs(made, read_manifest(made), {"data": {"max_length": 512, "sources": ({"path": "a"},)}, "seed": 0})


def test_differing_inputs_are_named_with_both_values(made):
    inputs = {"data": {"max_length": 1024, "sources": [{"path": "b"}]}, "seed": 0, "new": 7}
    with pytest.raises(UserError) as error:
        check_inputs(made, read_manifest(made), inputs)
    message = str(error.value)
    assert "data.max_length is 512 there and 1024 in the config" in message
    assert 'data.sources[0].path is "a" there and "b" in the config' in message
    assert "new is not set there and 7 in the config" in message
    assert "seed" not in message
    assert "draftsmith prepare --fresh" in message and str(made) in message


def test_a_setting_that_came_later_had_its_default_before(made):
    inputs = {"data": {"max_length": 512, "sources": [{"path": "a"}], "too_long": "reject"}, "seed": 0}
    check_inputs(made, read_manifest(made), inputs)
    inputs["data"]["too_long"] = "cut"
    with pytest.raises(UserError, match=r'data\.too_long is "reject" there and "cut" in the config'):
        check_inputs(made, read_manifest(made), inputs)


def test_so_had_one_within_a_section_and_one_of_a_reports(tmp_path):
    sampling = DataConfig().sampling.model_dump()
    before = {k: v for k, v in sampling.items() if k not in ("min_p", "replies")}
    write_manifest(tmp_path, "eval", {"data": {"sampling": before, "roles": {"user": "user"}}, "sampling": before}, {})
    now = {"data": {"sampling": sampling, "roles": {"user": "user"}}, "sampling": sampling}
    check_inputs(tmp_path, read_manifest(tmp_path), now)
    other = {**now, "sampling": {**sampling, "min_p": 0.5}}
    with pytest.raises(UserError, match=r"sampling\.min_p is 0\.0 there and 0\.5 in the config"):
        check_inputs(tmp_path, read_manifest(tmp_path), other)
    roles = {**now, "data": {**now["data"], "roles": {"user": "user", "human": "user"}}}
    with pytest.raises(UserError, match=r"data\.roles\.human"):
        check_inputs(tmp_path, read_manifest(tmp_path), roles)


@pytest.mark.parametrize("content", [b"", b'{"stage": "prep', b"\xff\xfe\x00", b"[]", b"{}", b'{"inputs": null}'])
def test_a_damaged_manifest_is_named_with_the_mend(tmp_path, content):
    (tmp_path / MANIFEST).write_bytes(content)
    with pytest.raises(UserError, match=r"manifest\.json: damaged.*Delete .* and run its stage again"):
        read_manifest(tmp_path)


def test_a_missing_stage_is_named(tmp_path):
    assert read_manifest(tmp_path) is None
    with pytest.raises(UserError) as error:
        require_manifest(tmp_path / "samples", "prepare", "capture")
    assert "`capture` needs the output of `prepare`" in str(error.value)
    assert "Run `draftsmith prepare`" in str(error.value)


def test_the_hash_names_the_output(made, tmp_path):
    before = manifest_hash(made)
    write_manifest(made, "prepare", {"seed": 1}, {})
    assert manifest_hash(made) != before


def test_files_are_readable_by_others(tmp_path):
    old = os.umask(0o077)
    try:
        write_text(tmp_path / "a", "x")
    finally:
        os.umask(old)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o644


def test_what_a_dead_process_left_is_removed_and_what_a_live_one_writes_is_not(tmp_path):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        left = f".tmp-{other.pid}-trainer.json", f".tmp-{os.getpid()}-a.json", ".tmpAbC123", ".tmp-4194999-b.json"
        for name in left:
            (tmp_path / name).touch()
        older = tmp_path / f".tmp-{other.pid}-older.json"  # than the process that has its number now
        older.touch()
        os.utime(older, (1, 1))
        remove_leftovers(tmp_path)
        assert [p.name for p in tmp_path.iterdir()] == [left[0]]
        other.communicate(b"\n")
    remove_leftovers(tmp_path)
    assert not list(tmp_path.iterdir())


def test_leftovers_of_any_kind_and_name_are_removed(tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "a").touch()
    (tmp_path / ".tmp-4194999-link").symlink_to(kept)
    (tmp_path / ".tmp-4194999-gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / ".tmp-4194999-folder").mkdir()
    for name in (".tmp-\N{SUPERSCRIPT TWO}-x", ".tmp-0-x", f".tmp-{2**80}-x", ".tmp--x", ".tmp-"):
        (tmp_path / name).touch()
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == [kept] and (kept / "a").exists()
