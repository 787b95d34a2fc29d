"""Whatever happens to the bytes of some shards: what is whole is kept, what is not is captured again, once each."""

import hashlib
import os
import random

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from draftsmith.core.manifest import MANIFEST as MANIFEST_FILE
from draftsmith.core.store import INDEX
from draftsmith.hidden_state_capture.reader import HiddenStateStore
from draftsmith.hidden_state_capture.repair import repair_store
from draftsmith.hidden_state_capture.shard import committed_shards, next_number, remove_uncommitted
from draftsmith.hidden_state_capture.verify import verify_store
from draftsmith.hidden_state_capture.writer import ShardWriter, WriterConfig

pytestmark = pytest.mark.usefixtures("one_thread")
NAMES = [f"c{i}/0~{i}" if i % 3 else f"c{i}#é/0" for i in range(12)]


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def of_an_earlier_version(folder):
    """Give the index the checksums that stores had before: SHA-256 of a sample's bytes, one tensor after another."""
    table = pq.read_table(folder / INDEX)
    rows = table.to_pylist()
    names = "input_ids", "loss_mask", "aux_states", "aux_scales", "last_states", "last_scales"
    for row in rows:
        tensors = load_file(folder / f"shard-{row['shard']:05d}.safetensors")
        digest = hashlib.sha256()
        for name in (n for n in names if n in tensors):
            kind = "last_" if name.startswith("last_") else ""
            begin, length = row[f"{kind}start"], row[f"{kind}length"]
            digest.update(tensors[name][begin : begin + length].contiguous().view(torch.uint8).numpy().tobytes())
        row["sha256"] = digest.hexdigest()
    pq.write_table(table.from_pylist(rows, schema=table.schema), folder / INDEX)


@pytest.mark.parametrize("storage", ["bf16", "fp8"])
def test_a_store_of_an_earlier_version_is_whole_and_its_damage_is_found_and_mended(tmp_path, make_store, storage):
    store = make_store(tmp_path / "hidden_states", list("abcde"), 1000 if storage == "bf16" else 700, storage)
    of_an_earlier_version(store)
    assert verify_store(store).faults == []
    flip(store / "shard-00001.safetensors", -1)
    assert repair_store(store).kept == 1


def damage(file, draw):
    """Spoil a shard in one of the ways in which disks and copies do."""
    data = bytearray(file.read_bytes())
    kind = draw.choice(["bits", "bits", "header", "cut", "longer", "zeros", "gone", "another's"])
    if kind == "bits":
        for _ in range(draw.choice([1, 1, 5])):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    elif kind == "header":  # HEADER_BYTES, most of them spaces: of the JSON at its beginning
        for _ in range(draw.choice([1, 1, 3])):
            data[draw.randrange(600)] = draw.randrange(256) if draw.random() < 0.5 else draw.choice(b'0189"[],:{} FIU')
    elif kind == "cut":
        del data[draw.randrange(len(data)) :]
    elif kind == "longer":
        data += bytes(draw.randrange(1, 5000))
    elif kind == "zeros":
        at = draw.randrange(len(data))
        data[at : at + 512] = bytes(len(data[at : at + 512]))
    elif kind == "another's":
        data = bytearray(draw.choice(sorted(file.parent.glob("shard-*.safetensors"))).read_bytes())
    file.unlink()
    if kind != "gone":
        file.write_bytes(data)
    return kind


@pytest.mark.parametrize("storage", ["bf16", "fp8"])
def test_random_damage_loses_and_repeats_nothing(tmp_path, make_store, finished, sample, storage):
    first = int(os.environ.get("SALVAGE_SEED", random.randrange(2**32)))
    for seed in range(first, first + int(os.environ.get("SALVAGE_ROUNDS", "12"))):
        draw, folder = random.Random(seed), tmp_path / str(seed)
        make_store(folder, NAMES, draw.choice([1, 1000, 2000]), storage)
        before = {s.sample_id: s for s in HiddenStateStore(folder)}
        names, said = [s["file"] for s in HiddenStateStore(folder).manifest["shards"]], []
        for name in draw.sample(names, min(len(names), draw.choice([1, 1, 2, 3]))):
            said.append((name, damage(folder / name, draw)))
        verdict = repair_store(folder)
        assert (folder / MANIFEST_FILE).exists() == (not verdict.faults), (seed, said)
        if not verdict.faults:
            continue
        remove_uncommitted(folder)
        done = [row["sample_id"] for s in committed_shards(folder) for row in s["rows"]]
        assert len(done) == len(set(done)), (seed, said)
        writer = ShardWriter(folder, WriterConfig(1000, 2**30, storage, first=next_number(folder)))
        for i, name in enumerate(NAMES):
            if name not in done:
                writer.put(sample(name, tokens=6 + i % 3))
        writer.flush()
        finished(folder, storage)
        assert verify_store(folder).faults == [], (seed, said)
        for one in HiddenStateStore(folder):
            was = before.pop(one.sample_id)
            assert torch.equal(one.aux_states_TAH, was.aux_states_TAH), (seed, said)
            assert torch.equal(one.last_states_MH, was.last_states_MH), (seed, said)
            assert (one.input_ids_T == was.input_ids_T).all() and (one.loss_mask_T == was.loss_mask_T).all()
        assert not before, (seed, said)
