"""The shard writer: what is unusable is named, errors of its thread surface, a kill loses nothing committed."""

import random
import shutil
import signal
import subprocess
import sys
import threading

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.core.fp8_states import encode
from draftsmith.hidden_state_capture.writer import ShardWriter, committed_shards, split_states

pytestmark = pytest.mark.usefixtures("one_thread")
GIB = 1024**3


def test_several_replies_keep_the_rows_before_each(sample):
    tensors = split_states(sample("a", 10, spans=[[2, 4], [7, 10]]))
    assert tensors["loss_mask"].tolist() == [0, 0, 1, 1, 0, 0, 0, 1, 1, 1]
    assert tensors["last_rows"].tolist() == [1, 2, 6, 7, 8]


def test_states_are_bf16_on_disk_whatever_the_engine_ran_in(sample):
    given = sample("a")
    given.states_TLH = given.states_TLH.float()
    tensors = split_states(given)
    assert tensors["aux_states"].dtype == tensors["last_states"].dtype == torch.bfloat16


# ---- shards ----------------------------------------------------------------------------------------------------------


def test_a_shard_is_closed_when_it_reaches_its_size(tmp_path, sample):
    one = sum(t.nbytes for t in split_states(sample("a")).values())
    writer = ShardWriter(tmp_path, 2 * one, GIB)
    for i in range(5):
        writer.put(sample(f"s{i}"))
    writer.flush()
    shards = committed_shards(tmp_path)
    assert [[r["sample_id"] for r in s["rows"]] for s in shards] == [["s0", "s1"], ["s2", "s3"], ["s4"]]
    assert [s["shard"]["file"] for s in shards] == [f"shard-0000{i}.safetensors" for i in range(3)]


def test_flushing_nothing_writes_nothing(writer):
    writer.flush()
    writer.flush()
    assert list(writer.folder.iterdir()) == []


def test_the_probe_is_written_to_its_own_file_and_into_no_shard(writer, sample):
    file = writer.folder / "probe.safetensors"
    writer.put(sample("probe", save_to=str(file)))
    writer.flush()
    assert load_file(file)["aux_states"].shape == (8, 3, 16)
    assert committed_shards(writer.folder) == [] and writer.written == 1


def test_the_writer_waits_for_the_copy_of_the_states(writer, sample):
    given = sample("a")
    states, given.states_TLH = given.states_TLH.clone(), torch.zeros_like(given.states_TLH)
    given.ready = lambda: given.states_TLH.copy_(states)
    writer.put(given)
    writer.flush()
    stored = load_file(writer.folder / "shard-00000.safetensors")
    assert torch.equal(stored["aux_states"], states[:, :-1])


# ---- unusable states -------------------------------------------------------------------------------------------------


def poison(column, value, row=6):
    def apply(states):
        states[row, column, 3] = value

    return apply


def zero_column(column):
    def apply(states):
        states[:, column] = 0

    return apply


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (poison(0, float("nan")), "non-finite states"),
        (poison(2, float("inf"), row=0), "non-finite states"),
        (poison(3, float("-inf")), "non-finite states"),
        (zero_column(1), "a layer is all zero"),
        (zero_column(3), "a layer is all zero"),
    ],
)
def test_unusable_states_are_rejected_by_id_and_reason(writer, sample, spoil, reason):
    bad = sample("bad")
    spoil(bad.states_TLH)
    for item in (sample("a"), bad, sample("b")):
        writer.put(item)
    writer.flush()
    assert writer.rejected == [{"sample_id": "bad", "reason": reason}]
    (shard,) = committed_shards(writer.folder)
    assert [r["sample_id"] for r in shard["rows"]] == ["a", "b"]
    assert writer.written == 3


def test_a_zero_row_is_no_zero_layer(writer, sample):
    given = sample("a")
    given.states_TLH[2] = 0
    writer.put(given)
    writer.flush()
    assert writer.rejected == []


@pytest.mark.parametrize("rows", [7, 9, 0])
def test_rows_that_are_not_the_tokens_fail_the_run(writer, sample, random_states, rows):
    bad = sample("bad")
    bad.states_TLH = random_states(rows, hidden=16)
    writer.put(bad)
    with pytest.raises(RuntimeError, match=f"sample bad: {rows} state rows for 8 tokens"):
        writer.flush()
    assert committed_shards(writer.folder) == []


# ---- errors in the writer's thread, and its memory -------------------------------------------------------------------


def test_an_error_of_the_disk_surfaces_at_flush_and_at_every_put_after(writer, sample):
    shutil.rmtree(writer.folder)
    writer.folder.write_text("a file is in the way")
    writer.put(sample("a"))
    with pytest.raises(RuntimeError, match="hidden-state writer"):
        writer.flush()
    with pytest.raises(RuntimeError, match="hidden-state writer"):
        writer.put(sample("b"))


def test_an_error_wakes_a_producer_that_waits_for_room(tmp_path, sample):
    def fail():
        raise OSError("the copy failed")

    writer = ShardWriter(tmp_path, GIB, pending_bytes=1)
    writer.put(sample("a", ready=fail))
    with pytest.raises(RuntimeError, match="the copy failed"):
        for i in range(3):
            writer.put(sample(f"b{i}"))


def test_what_waits_for_the_disk_is_bounded(tmp_path, sample):
    gate, size = threading.Event(), sample("a").nbytes
    writer = ShardWriter(tmp_path, GIB, pending_bytes=2 * size)
    admitted = []

    def produce():
        for i in range(6):
            writer.put(sample(f"s{i}", ready=gate.wait))
            admitted.append(i)

    producer = threading.Thread(target=produce)
    producer.start()
    producer.join(0.3)  # long enough to run through, were there no bound
    assert admitted == [0, 1]
    gate.set()
    producer.join()
    writer.flush()
    assert writer.written == 6


def test_a_sample_larger_than_the_bound_goes_alone(tmp_path, sample):
    writer = ShardWriter(tmp_path, GIB, pending_bytes=1)
    for i in range(3):
        writer.put(sample(f"s{i}"))
    writer.flush()
    assert writer.written == 3


# ---- kills -----------------------------------------------------------------------------------------------------------

TOTAL = 60
# One import of torch for all attempts: each is a fork that goes on from what is committed, and all but the last are
# killed after so many samples, a little later, while the writer's thread is wherever it is.
SCRIPT = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from draftsmith.hidden_state_capture.writer import SampleStates, ShardWriter, committed_shards

folder, total = Path(sys.argv[1]), int(sys.argv[2])

def attempt(kill_after):
    done = {row["sample_id"] for shard in committed_shards(folder) for row in shard["rows"]}
    writer = ShardWriter(folder, 1500, 10_000)
    for put, i in enumerate((i for i in range(total) if f"s{i}" not in done), 1):
        states = torch.full((8, 4, 16), 1.0 + i, dtype=torch.bfloat16)
        writer.put(SampleStates(f"s{i}", [i] * 8, [[4, 8]], states, bool))
        if put == kill_after:
            time.sleep(random.uniform(0, 0.01))
            os.kill(os.getpid(), signal.SIGKILL)
    writer.flush()

folder.mkdir()
for kill_after in map(int, sys.argv[3:]):
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        attempt(kill_after)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    committed = len(list(folder.glob("shard-*.json")))
    print(status, committed, len(os.listdir(folder)) - 2 * committed, flush=True)
"""


def test_kills_lose_no_committed_shard_and_repeat_no_sample(tmp_path):
    folder = tmp_path / "states"
    moments = [random.randint(1, 11) for _ in range(5)]
    command = [sys.executable, "-c", SCRIPT, str(folder), str(TOTAL), *map(str, moments), "0"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    attempts = [[int(n) for n in line.split()] for line in done.stdout.splitlines()]
    assert [a[0] for a in attempts] == [-signal.SIGKILL] * 5 + [0], attempts
    assert [a[1] for a in attempts] == sorted(a[1] for a in attempts), "a committed shard was lost"
    shards = committed_shards(folder)
    assert len(list(folder.iterdir())) == 2 * len(shards), "leftovers of a kill are still there"
    seen = []
    for shard in shards:
        tensors = load_file(folder / shard["shard"]["file"])
        for row in shard["rows"]:
            number = int(row["sample_id"][1:])
            part = {k: tensors[k][row["start"] : row["start"] + row["length"]] for k in ("input_ids", "aux_states")}
            assert (part["input_ids"] == number).all() and (part["aux_states"] == 1.0 + number).all()
            seen.append(number)
    assert sorted(seen) == list(range(TOTAL)), moments


def test_what_a_kill_left_beside_whole_shards_is_removed(tmp_path, sample):
    writer = ShardWriter(tmp_path, 1, GIB)
    writer.put(sample("a"))
    writer.flush()
    (tmp_path / "shard-00001.safetensors").write_bytes(b"whole, but its sidecar was not written")
    (tmp_path / ".tmp-1-shard-00002.safetensors").write_bytes(b"half")
    again = ShardWriter(tmp_path, 1, GIB)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["shard-00000.json", "shard-00000.safetensors"]
    again.put(sample("b"))
    again.flush()
    files = [f"shard-0000{i}.{e}" for i in (0, 1) for e in ("json", "safetensors")]
    assert sorted(p.name for p in tmp_path.iterdir()) == files
    assert [r["sample_id"] for s in committed_shards(tmp_path) for r in s["rows"]] == ["a", "b"]


# ---- fp8 -------------------------------------------------------------------------------------------------------------


def test_fp8_shards_hold_codes_and_scales_and_half_the_bytes(tmp_path, sample):
    sizes = {}
    for storage in ("bf16", "fp8"):
        writer = ShardWriter(tmp_path / storage, GIB, GIB, storage)
        for name in ("a", "b"):
            writer.put(sample(name))
        writer.flush()
        tensors = load_file(tmp_path / storage / "shard-00000.safetensors")
        sizes[storage] = tensors["aux_states"].nbytes + tensors["last_states"].nbytes
    assert sizes["bf16"] == 2 * sizes["fp8"]
    aux, aux_scales = encode(sample("b").states_TLH[:, :-1].contiguous())
    last, last_scales = encode(sample("b").states_TLH[3:7, -1].contiguous())
    assert torch.equal(tensors["aux_states"][8:].view(torch.uint8), aux.view(torch.uint8))
    assert torch.equal(tensors["last_states"][4:].view(torch.uint8), last.view(torch.uint8))
    assert torch.equal(tensors["aux_scales"][8:], aux_scales) and torch.equal(tensors["last_scales"][4:], last_scales)


def test_states_that_are_not_finite_are_rejected_before_they_are_encoded(tmp_path, sample):
    writer = ShardWriter(tmp_path, GIB, GIB, "fp8")
    for value in ("nan", "inf"):
        bad = sample(value)
        bad.states_TLH[2, 1, 3] = float(value)
        writer.put(bad)
    writer.flush()
    assert [r["sample_id"] for r in writer.rejected] == ["nan", "inf"] and committed_shards(tmp_path) == []


def test_the_probe_is_in_bf16_whatever_the_storage(tmp_path, sample):
    writer = ShardWriter(tmp_path, GIB, GIB, "fp8")
    writer.put(sample("probe", save_to=str(tmp_path / "probe.safetensors")))
    writer.flush()
    assert load_file(tmp_path / "probe.safetensors")["aux_states"].dtype == torch.bfloat16


def test_numbers_go_on_after_the_highest_shard(tmp_path, sample):
    writer = ShardWriter(tmp_path, 1, GIB)
    for name in ("a", "b", "c"):
        writer.put(sample(name))
    writer.flush()
    for left in tmp_path.glob("shard-00001.*"):
        left.unlink()
    again = ShardWriter(tmp_path, 1, GIB)
    again.put(sample("d"))
    again.flush()
    names = [s["shard"]["file"] for s in committed_shards(tmp_path)]
    assert names == [f"shard-0000{i}.safetensors" for i in (0, 2, 3)]
