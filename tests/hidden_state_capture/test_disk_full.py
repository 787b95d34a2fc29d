"""A disk that fills up while shards are written: what is whole stays, what is missing is said, more room is enough."""

import re
import subprocess

import pytest
import torch

from draftsmith.core.errors import StageFailed
from draftsmith.core.run import RunFolder
from draftsmith.core.samples import Sample
from draftsmith.core.target import resolve_target
from draftsmith.hidden_state_capture.finish import Captured, finish
from draftsmith.hidden_state_capture.reader import HiddenStateStore
from draftsmith.hidden_state_capture.repair import repair_store
from draftsmith.hidden_state_capture.shard import next_number
from draftsmith.hidden_state_capture.stage import _missing, _with_room, capture_inputs
from draftsmith.hidden_state_capture.todo import Head, store_bytes
from draftsmith.hidden_state_capture.writer import FAILURE, SampleStates, ShardWriter, WriterConfig

TOKENS, SAMPLES = 200, 40
PROBE = '{"norm_form": "rms", "eps": 1e-6, "argmax_agreement": 1.0, "positions": 8, "state_errors": null}'


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own of 1 MiB, and a way to enlarge it."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {made.stderr.strip()}")
    yield folder, lambda size: subprocess.run(["mount", "-o", f"remount,size={size}", folder], check=True)
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture
def captured(synthetic_run, small_disk):
    target, run = resolve_target(synthetic_run.target), RunFolder.of(synthetic_run)
    samples = [Sample(f"s{i}", [i] * TOKENS, [(100, TOKENS)], "s", "stop", "train") for i in range(SAMPLES)]
    inputs = capture_inputs(synthetic_run, target, [3, 4, 5], run)
    folder = small_disk[0] / "hidden_states"
    folder.mkdir()
    (folder / "probe.json").write_text(PROBE)
    return Captured(synthetic_run, target, [3, 4, 5], [Head.of(s) for s in samples], [], inputs, folder)


def write_missing(captured):
    config = WriterConfig(200_000, 1 << 20, threads=2, first=next_number(captured.folder))
    writer = ShardWriter(captured.folder, config)
    for head in _missing(captured):
        i = int(head.sample_id[1:])
        states = torch.full((TOKENS, 4, 64), 1.0 + i, dtype=torch.bfloat16)
        writer.put(SampleStates(head.sample_id, [i] * TOKENS, [[100, TOKENS]], states, bool))
    writer.flush()


def test_a_full_disk_stops_with_what_is_needed_and_goes_on_with_more_room(captured, small_disk):
    with pytest.raises(RuntimeError, match=r"hidden-state writer: \[Errno 28\]"):
        write_missing(captured)
    assert (captured.folder / FAILURE).is_file()  # on the same full disk
    said = str(_with_room(captured, StageFailed("the engine failed")))
    missing = _missing(captured)
    assert 0 < len(missing) < SAMPLES, "nothing of what was whole is kept, or all of it fits"
    needed = store_bytes(missing, 3, 64, "bf16")
    assert f"the {len(missing)} samples to go need {needed:,} bytes and " in said
    free = int(re.search(r"and ([\d,]+) are free", said)[1].replace(",", ""))
    assert free < needed
    assert {p.suffix for p in captured.folder.iterdir()} == {".json", ".safetensors"}
    assert not (captured.folder / FAILURE).exists() and not list(captured.folder.glob(".tmp*"))

    small_disk[1]("8m")
    write_missing(captured)
    finish(captured)
    store = HiddenStateStore(captured.folder)
    assert sorted(r["sample_id"] for r in store.index) == sorted(h.sample_id for h in captured.heads)
    assert all((s.aux_states_TAH == 1.0 + float(s.sample_id[1:])).all() for s in store)


def test_a_disk_that_is_full_but_for_the_sidecar_has_room_for_the_reason(small_disk, sample):
    folder, enlarge = small_disk
    writer = ShardWriter(folder / "h", WriterConfig(1, 1 << 20))
    writer.put(sample("a"))
    writer.flush()
    (whole,) = (folder / "h").glob("*.safetensors")
    held = sum(-(-p.stat().st_size // 4096) for p in (folder / "h").iterdir())
    enlarge(f"{4 * (held + -(-whole.stat().st_size // 4096))}k")  # for another shard, and nothing else
    writer.put(sample("b"))
    with pytest.raises(RuntimeError, match=r"Errno 28"):
        writer.flush()
    left = {p.name for p in (folder / "h").iterdir()}
    assert left == {FAILURE, whole.name, whole.with_suffix(".json").name}


def test_a_repair_on_a_full_disk_leaves_the_store_as_it_was(small_disk, make_store, tree_of):
    folder, enlarge = small_disk
    store = make_store(folder / "h", list("abcdef"), shard_bytes=2000)
    file = store / "shard-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    before = tree_of(store)
    held = sum(-(-p.stat().st_size // 4096) for p in store.iterdir())
    for more in range(4):  # blocks: there is room for nothing, or for some of a shard
        enlarge(f"{4 * (held + more)}k")
        with pytest.raises(OSError, match="Errno 28"):
            repair_store(store)
        left = tree_of(store)
        assert {name: left.get(name) for name in before} == before
        assert not [name for name in left if ".tmp" in name], more
    enlarge("1m")
    assert repair_store(store).kept > 0


def test_other_failures_are_passed_on_as_they_are(captured):
    given = StageFailed("the engine failed")
    assert _with_room(captured, given) is given
