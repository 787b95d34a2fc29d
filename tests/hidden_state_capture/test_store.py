"""The hidden-state store: what goes in comes out bit for bit, and what is not whole is refused by name."""

import json

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from draftsmith.core.errors import StageFailed, UserError
from draftsmith.core.run import RunFolder
from draftsmith.core.samples import Sample, read_samples
from draftsmith.core.store import INDEX, INDEX_SCHEMA
from draftsmith.core.target import resolve_target
from draftsmith.hidden_state_capture.finish import Captured, finish
from draftsmith.hidden_state_capture.reader import HiddenStateStore
from draftsmith.hidden_state_capture.shard import sample_sha256
from draftsmith.hidden_state_capture.stage import capture, capture_inputs
from draftsmith.hidden_state_capture.todo import Head


@pytest.fixture
def store(synthetic_run):
    return HiddenStateStore(RunFolder.of(synthetic_run).hidden_states)


# ---- round trip ------------------------------------------------------------------------------------------------------


def test_every_sample_is_read_back_bit_for_bit(store, synthetic_samples, random_states):
    by_id = {s.sample_id: (i, s) for i, s in enumerate(synthetic_samples)}
    for stored in store:
        i, given = by_id.pop(stored.sample_id)
        states = random_states(len(given.input_ids), i)
        rows = [t for t in range(len(given.input_ids) - 1) if given.loss_mask[t + 1]]
        assert stored.input_ids_T.tolist() == given.input_ids
        assert stored.loss_mask_T.tolist() == given.loss_mask.tolist()
        assert stored.last_rows_M.tolist() == rows
        assert torch.equal(stored.aux_states_TAH, states[:, :-1]) and stored.aux_states_TAH.dtype == torch.bfloat16
        assert torch.equal(stored.last_states_MH, states[rows, -1])
    assert not by_id


def test_the_files_are_as_the_format_says(store):
    shard = store.manifest["shards"][0]
    tensors = load_file(store.folder / shard["file"])
    dtypes = {name: str(t.dtype).removeprefix("torch.") for name, t in tensors.items()}
    assert dtypes == {
        "input_ids": "int32", "loss_mask": "uint8", "aux_states": "bfloat16",
        "last_states": "bfloat16", "last_rows": "int32", "sample_offsets": "int64",
    }  # fmt: skip
    size = tensors["sample_offsets"][-1].item()
    assert shard["tokens"] == size == len(tensors["input_ids"]) == len(tensors["aux_states"])
    assert shard["samples"] == len(tensors["sample_offsets"]) - 1
    assert pq.read_schema(store.folder / INDEX).remove_metadata() == INDEX_SCHEMA


def test_the_manifest_says_what_the_states_are(store):
    manifest = store.manifest
    assert manifest["target"]["num_layers"] == 6 and manifest["target"]["hidden_size"] == 64
    assert manifest["layer_ids"] == [3, 4, 5] and "vllm" in manifest["layer_id_convention"]
    assert manifest["last_state"]["layer_id"] == 6 and manifest["last_state"]["norm"] == "pre"
    assert sorted(p.name for p in store.folder.iterdir()) == sorted(
        ["index.parquet", "manifest.json", *(s["file"] for s in manifest["shards"])]
    )


def test_the_index_hashes_the_samples_bytes(store):
    for row, stored in zip(store.index, store, strict=True):
        parts = (stored.input_ids_T, stored.loss_mask_T, stored.aux_states_TAH, stored.last_states_MH)
        names = ("input_ids", "loss_mask", "aux_states", "last_states")
        assert row["sha256"] == sample_sha256(dict(zip(names, parts, strict=True)))
        assert row["supervised_tokens"] == stored.loss_mask_T.sum()
    assert len({row["sha256"] for row in store.index}) == len(store.index)


def test_the_split_of_the_samples_is_in_the_index(store, synthetic_samples):
    held_out = sorted(s.sample_id for s in synthetic_samples if s.split == "eval")
    assert [store.index[i]["sample_id"] for i in store.numbers("eval")] == held_out
    assert len(store.numbers("train")) == len(synthetic_samples) - len(held_out)


# ---- the end of a capture -------------------------------------------------------------------------------------------


def end(config, samples, rejected=(), long=()):
    run, target = RunFolder.of(config), resolve_target(config.target)
    for i, entry in enumerate(rejected):
        (run.hidden_states / f"rejected-{90 + i}.json").write_text(json.dumps([entry]))
    heads, inputs = [Head.of(s) for s in samples], capture_inputs(config, target, [3, 4, 5], run)
    finish(Captured(config, target, [3, 4, 5], heads, [Head.of(s) for s in long], inputs, run.hidden_states))


@pytest.fixture
def half_done(synthetic_run):
    """A capture whose shards and probe are on disk and whose index and manifest are not."""
    folder = RunFolder.of(synthetic_run).hidden_states
    store = HiddenStateStore(folder)
    rows = [{k: v for k, v in r.items() if k not in ("shard", "split", "source")} for r in store.index]
    for number, shard in enumerate(store.manifest["shards"]):
        mine = [r for r, full in zip(rows, store.index, strict=True) if full["shard"] == number]
        sidecar = folder / shard["file"].replace(".safetensors", ".json")
        sidecar.write_text(json.dumps({"shard": shard, "rows": mine}))
    (folder / "probe.json").write_text(json.dumps(store.manifest["probe"]))
    (folder / "manifest.json").unlink()
    (folder / INDEX).unlink()
    return synthetic_run


def test_a_capture_that_lost_samples_fails_and_names_one(half_done, synthetic_samples):
    extra = Sample("lost/0", [1, 2, 3], [(1, 3)], "s", "stop", "train")
    with pytest.raises(StageFailed, match=r"1 samples were not captured, e\.g\. lost/0"):
        end(half_done, [*synthetic_samples, extra])
    assert not (RunFolder.of(half_done).hidden_states / "manifest.json").exists()


def test_rejected_samples_are_in_the_manifest_and_too_many_fail(half_done, changed, synthetic_samples):
    samples = [*synthetic_samples, Sample("bad/0", [1, 2], [(1, 2)], "s", "stop", "train")]
    rejected = [{"sample_id": "bad/0", "reason": "non-finite states"}]
    with pytest.raises(StageFailed, match=r"1 of 25 samples have unusable states.*bad/0: non-finite states"):
        end(half_done, samples, rejected)
    end(changed(half_done, capture={"max_rejected_share": 0.04}), samples)
    assert HiddenStateStore(RunFolder.of(half_done).hidden_states).manifest["rejected"] == rejected


def test_a_capture_begun_with_other_settings_is_not_mixed(half_done, changed):
    run, target = RunFolder.of(half_done), resolve_target(half_done.target)
    begun = capture_inputs(half_done, target, [3, 4, 5], run)
    (run.hidden_states / "inputs.json").write_text(json.dumps(begun))
    with pytest.raises(UserError, match=r"layer_ids is \[3, 4, 5\] there and \[1, 2, 3\] in the config"):
        capture(changed(half_done, capture={"layer_ids": [1, 2, 3]}))


# ---- the reader ------------------------------------------------------------------------------------------------------


def test_a_store_that_is_not_complete_is_refused(half_done):
    with pytest.raises(UserError, match="`train` needs the output of `capture`"):
        HiddenStateStore(RunFolder.of(half_done).hidden_states)


@pytest.mark.parametrize("spoil", [lambda f: f.write_bytes(f.read_bytes()[:-1]), lambda f: f.unlink()])
def test_a_shard_cut_short_or_missing_is_refused_by_name(store, spoil):
    file = store.folder / store.manifest["shards"][1]["file"]
    spoil(file)
    with pytest.raises(UserError, match=f"{file.name}: missing or not .* bytes long.*store repair"):
        HiddenStateStore(store.folder)


def test_a_finished_capture_is_not_made_again(synthetic_run, tree_of, capsys):
    run = RunFolder.of(synthetic_run)
    before = tree_of(run.root)
    capture(synthetic_run)
    assert tree_of(run.root) == before
    assert f"{len(read_samples(run.samples))} samples (already there)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda m: m.pop("shards"), "shards: Field required"),
        (lambda m: m.update(shards="abc"), "shards: Input should be a valid list"),
        (lambda m: m["shards"][0].update(file="../../passwd"), "shards.0.file"),
        (lambda m: m["shards"].append(m["shards"][0]), "a shard is named twice"),
        (lambda m: m.update(layer_ids=["a"]), "layer_ids.0"),
        (lambda m: m.update(storage="int3"), "storage"),
    ],
)
def test_a_manifest_of_wrong_content_is_refused_by_what_is_wrong(store, spoil, named):
    manifest = json.loads((store.folder / "manifest.json").read_text())
    spoil(manifest)
    (store.folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=f"manifest.json: damaged, or not of a hidden-state store .{named}"):
        HiddenStateStore(store.folder)
