"""The shard writer: what is unusable is named, errors of its threads surface, memory is bounded."""

import json
import shutil
import threading
import time

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.core.fp8_states import encode
from draftsmith.hidden_state_capture.gather import SampleRows
from draftsmith.hidden_state_capture.shard import committed_shards, next_number, rejected_samples, remove_uncommitted
from draftsmith.hidden_state_capture.writer import ShardWriter, WriterConfig

pytestmark = pytest.mark.usefixtures("one_thread")
GIB = 1024**3


def test_several_replies_keep_the_rows_before_each():
    rows = SampleRows.of("a", list(range(10)), [[2, 4], [7, 10]])
    assert rows.loss_mask_T.tolist() == [0, 0, 1, 1, 0, 0, 0, 1, 1, 1]
    assert rows.last_rows_M.tolist() == [1, 2, 6, 7, 8]


def test_states_are_bf16_on_disk_whatever_the_engine_ran_in(writer, sample):
    given = sample("a")
    given.states_TSH = given.states_TSH.float()
    writer.put(given)
    writer.flush()
    tensors = load_file(writer.folder / "shard-00000.safetensors")
    assert tensors["aux_states"].dtype == tensors["last_states"].dtype == torch.bfloat16


# ---- shards ----------------------------------------------------------------------------------------------------------


def test_a_shard_is_closed_when_it_reaches_its_size(tmp_path, sample):
    one = 8 * (3 * 16 * 2 + 4 + 1) + 4 * (16 * 2 + 4)
    writer = ShardWriter(tmp_path, WriterConfig(2 * one, GIB))
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
    states, given.states_TSH = given.states_TSH.clone(), torch.zeros_like(given.states_TSH)
    given.ready = lambda: given.states_TSH.copy_(states)
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
    spoil(bad.states_TSH)
    for item in (sample("a"), bad, sample("b")):
        writer.put(item)
    writer.flush()
    assert writer.rejected == [{"sample_id": "bad", "reason": reason}]
    (shard,) = committed_shards(writer.folder)
    assert [r["sample_id"] for r in shard["rows"]] == ["a", "b"]
    assert writer.written == 3


def test_a_zero_row_is_no_zero_layer(writer, sample):
    given = sample("a")
    given.states_TSH[2] = 0
    writer.put(given)
    writer.flush()
    assert writer.rejected == []


@pytest.mark.parametrize("rows", [7, 9, 0])
def test_rows_that_are_not_the_tokens_fail_the_run(writer, sample, random_states, rows):
    bad = sample("bad")
    bad.states_TSH = random_states(rows, hidden=16)
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

    writer = ShardWriter(tmp_path, WriterConfig(GIB, pending_bytes=1))
    writer.put(sample("a", ready=fail))
    with pytest.raises(RuntimeError, match="the copy failed"):
        for i in range(3):
            writer.put(sample(f"b{i}"))


def test_what_waits_for_the_disk_is_bounded(tmp_path, sample):
    gate, size = threading.Event(), sample("a").states_TSH.nbytes
    writer = ShardWriter(tmp_path, WriterConfig(GIB, pending_bytes=2 * size))
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
    writer = ShardWriter(tmp_path, WriterConfig(GIB, pending_bytes=1))
    for i in range(3):
        writer.put(sample(f"s{i}"))
    writer.flush()
    assert writer.written == 3


# ---- several threads, several writers --------------------------------------------------------------------------------


def stored(folder):
    """sample_id -> aux_states of every committed sample, in no order."""
    found = {}
    for shard in committed_shards(folder):
        aux = load_file(folder / shard["shard"]["file"])["aux_states"]
        for row in shard["rows"]:
            assert row["sample_id"] not in found
            found[row["sample_id"]] = aux[row["start"] : row["start"] + row["length"]]
    return found


def test_threads_fill_shards_side_by_side_and_lose_nothing(tmp_path, sample):
    writer = ShardWriter(tmp_path, WriterConfig(2000, GIB, threads=3))
    gate, given = threading.Event(), [sample(f"s{i}", ready=None) for i in range(40)]
    for item in given:
        item.ready = gate.wait
        writer.put(item)
    assert len(writer._threads) == 3  # they pile up behind the gate
    gate.set()
    writer.flush()
    found = stored(tmp_path)
    assert sorted(found) == sorted(s.sample_id for s in given)
    assert all(torch.equal(found[s.sample_id], s.states_TSH[:, :-1]) for s in given)


def test_one_thread_is_enough_while_nothing_piles_up(tmp_path, sample):
    writer = ShardWriter(tmp_path, WriterConfig(GIB, GIB, threads=8))
    for i in range(20):
        writer.put(sample(f"s{i}"))
        while writer.written <= i:
            pass
    writer.flush()
    assert len(committed_shards(tmp_path)) == 1


def test_writers_of_one_folder_number_their_shards_apart(tmp_path, sample):
    writers = [ShardWriter(tmp_path, WriterConfig(1, GIB, first=5 + i, step=3)) for i in range(3)]
    for i in range(9):
        writers[i % 3].put(sample(f"s{i}"))
    for writer in writers:
        writer.flush()
    assert [s["shard"]["file"] for s in committed_shards(tmp_path)] == [
        f"shard-{5 + i:05d}.safetensors" for i in range(9)
    ]
    assert next_number(tmp_path) == 14 and len(stored(tmp_path)) == 9


def test_open_shards_are_sealed_when_nothing_comes_for_a_while(tmp_path, sample):
    writer = ShardWriter(tmp_path, WriterConfig(GIB, GIB, seal_after=0.05))
    writer.put(sample("a"))
    deadline = time.monotonic() + 20
    while not committed_shards(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert list(stored(tmp_path)) == ["a"]


def test_the_states_begin_on_a_page_of_the_file(writer, sample):
    writer.put(sample("a"))
    writer.flush()
    header = (writer.folder / "shard-00000.safetensors").read_bytes()[:4096]
    assert int.from_bytes(header[:8], "little") == 4096 - 8
    assert json.loads(header[8:])["aux_states"]["data_offsets"][0] == 0


# ---- what must not be forgotten -------------------------------------------------------------------------------------


def test_rejected_samples_are_on_disk_before_their_shard_is(writer, sample):
    bad = sample("bad")
    bad.states_TSH[0] = float("nan")
    writer.put(bad)
    writer.put(sample("a"))
    while writer.written < 2:
        pass
    assert committed_shards(writer.folder) == []
    assert rejected_samples(writer.folder) == [{"sample_id": "bad", "reason": "non-finite states"}]
    writer.flush()
    assert [r["sample_id"] for s in committed_shards(writer.folder) for r in s["rows"]] == ["a"]


def test_more_rejected_samples_than_allowed_stop_the_run(tmp_path, sample):
    writer = ShardWriter(tmp_path, WriterConfig(GIB, GIB, max_rejected=1))
    for name in ("b0", "b1"):
        bad = sample(name)
        bad.states_TSH[:] = 0
        writer.put(bad)
    with pytest.raises(RuntimeError, match=r"2 samples have unusable states, e\.g\. b1: a layer is all zero"):
        writer.flush()
    assert {r["sample_id"] for r in rejected_samples(tmp_path)} == {"b0", "b1"}


def test_a_failed_writer_says_why_in_a_file_and_leaves_nothing_half(writer, sample):
    writer.put(sample("a"))
    writer.put(sample("b", ready=lambda: 1 / 0))
    with pytest.raises(RuntimeError, match="division by zero"):
        writer.flush()
    assert json.loads((writer.folder / "failure.json").read_text()) == {
        "reason": "division by zero",
        "disk_full": False,
    }
    assert [p.name for p in writer.folder.iterdir()] == ["failure.json"]


def test_what_a_kill_left_beside_whole_shards_is_removed(tmp_path, sample):
    writer = ShardWriter(tmp_path, WriterConfig(1, GIB))
    writer.put(sample("a"))
    writer.flush()
    (tmp_path / "shard-00001.safetensors").write_bytes(b"whole, but its sidecar was not written")
    (tmp_path / ".tmp-4194999-shard-00002.safetensors").write_bytes(b"half")
    remove_uncommitted(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["shard-00000.json", "shard-00000.safetensors"]
    again = ShardWriter(tmp_path, WriterConfig(1, GIB, first=next_number(tmp_path)))
    again.put(sample("b"))
    again.flush()
    files = [f"shard-0000{i}.{e}" for i in (0, 1) for e in ("json", "safetensors")]
    assert sorted(p.name for p in tmp_path.iterdir()) == files
    assert [r["sample_id"] for s in committed_shards(tmp_path) for r in s["rows"]] == ["a", "b"]


# ---- fp8 -------------------------------------------------------------------------------------------------------------


def test_fp8_shards_hold_codes_and_scales_and_half_the_bytes(tmp_path, sample):
    sizes = {}
    for storage in ("bf16", "fp8"):
        writer = ShardWriter(tmp_path / storage, WriterConfig(GIB, GIB, storage))
        for name in ("a", "b"):
            writer.put(sample(name))
        writer.flush()
        tensors = load_file(tmp_path / storage / "shard-00000.safetensors")
        sizes[storage] = tensors["aux_states"].nbytes + tensors["last_states"].nbytes
    assert sizes["bf16"] == 2 * sizes["fp8"]
    aux, aux_scales = encode(sample("b").states_TSH[:, :-1].contiguous())
    last, last_scales = encode(sample("b").states_TSH[3:7, -1].contiguous())
    assert torch.equal(tensors["aux_states"][8:].view(torch.uint8), aux.view(torch.uint8))
    assert torch.equal(tensors["last_states"][4:].view(torch.uint8), last.view(torch.uint8))
    assert torch.equal(tensors["aux_scales"][8:], aux_scales) and torch.equal(tensors["last_scales"][4:], last_scales)


def test_states_that_are_not_finite_are_rejected_before_they_are_encoded(tmp_path, sample):
    writer = ShardWriter(tmp_path, WriterConfig(GIB, GIB, "fp8"))
    for value in ("nan", "inf"):
        bad = sample(value)
        bad.states_TSH[2, 1, 3] = float(value)
        writer.put(bad)
    writer.flush()
    assert [r["sample_id"] for r in writer.rejected] == ["nan", "inf"] and committed_shards(tmp_path) == []


def test_the_probe_is_in_bf16_whatever_the_storage(tmp_path, sample):
    writer = ShardWriter(tmp_path, WriterConfig(GIB, GIB, "fp8"))
    writer.put(sample("probe", save_to=str(tmp_path / "probe.safetensors")))
    writer.flush()
    assert load_file(tmp_path / "probe.safetensors")["aux_states"].dtype == torch.bfloat16


def test_numbers_go_on_after_the_highest_shard(tmp_path, sample):
    writer = ShardWriter(tmp_path, WriterConfig(1, GIB))
    for name in ("a", "b", "c"):
        writer.put(sample(name))
    writer.flush()
    for left in tmp_path.glob("shard-00001.*"):
        left.unlink()
    assert next_number(tmp_path) == 3
