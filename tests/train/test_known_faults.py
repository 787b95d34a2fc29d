"""Faults that other trainers are known to have. T1 to T8 and R1 to R4 each have a test here or where this says.

T1  a rank without supervised rows: test_engines.py, test_steps.py, parity/test_alignment.py; nothing supervised: here
T2, T3  alignment and the keys of earlier steps: parity/test_alignment.py, against a float64 reference; here by hand
T4  padding and accumulation: parity/test_packing.py, test_steps.py, test_engines.py
T5  here              T6  test_training.py, test_engines.py; here after a resume
T7  test_training.py; here on several processes      T8  test_steps.py; here
R1  test_saves.py, test_training.py                  R2, R3  test_engines.py, test_steps.py
R4  here
"""

import itertools
import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from draftsmith.core.checkpoint import final_checkpoint, read_checkpoint
from draftsmith.core.errors import UserError
from draftsmith.core.objective import supervised_rows
from draftsmith.core.run import RunFolder
from draftsmith.core.store import INDEX, INDEX_SCHEMA
from draftsmith.core.vocab import load_mapping, save_mapping
from draftsmith.export.stage import export
from draftsmith.hidden_state_capture.reader import HiddenStateStore
from draftsmith.train.loop import Trainer
from draftsmith.train.metrics import Metrics
from draftsmith.train.stage import train

pytestmark = pytest.mark.usefixtures("one_thread")


def of(logged, config, key):
    return [row[key] for row in logged(config) if key in row]


def final(config):
    return read_checkpoint(final_checkpoint(RunFolder.of(config), "test"))


def copied(config, changed, name, **sections):
    other = changed(config, run={"name": name}, **sections)
    shutil.copytree(RunFolder.of(config).root, RunFolder.of(other).root)
    return other


# ---- T1, T2, T5 to T8 ------------------------------------------------------------------------------------------------


def test_samples_without_a_reply_token_are_refused(synthetic_run):
    """T1: they would train to a loss of 0.00."""
    folder = RunFolder.of(synthetic_run).hidden_states
    rows = [{**row, "supervised_tokens": 0} for row in HiddenStateStore(folder).index]
    pq.write_table(pa.Table.from_pylist(rows, schema=INDEX_SCHEMA), folder / INDEX)
    with pytest.raises(UserError, match=r"no training sample .* has a reply token.*draftsmith prepare --fresh"):
        train(synthetic_run)


def test_the_mask_moves_with_the_tokens_at_every_step(make_masked):
    """T2: row t is supervised at step j iff the tokens t+1 to t+j+1 are of one reply."""
    mask = [0, 0, 1, 1, 1, 0, 1, 1]
    steps = 4
    by_hand = [
        sum(all(t + i < len(mask) and mask[t + i] for i in range(1, j + 2)) for t in range(len(mask)))
        for j in range(1, steps + 1)
    ]
    assert by_hand == [3, 1, 0, 0]
    assert supervised_rows(make_masked(mask), steps).tolist() == by_hand


@pytest.fixture
def make_masked():
    from draftsmith.core.batch import Batch

    def make(mask):
        size = len(mask)
        rows = torch.arange(size)
        return Batch(("s",), (0, size), rows, torch.tensor(mask).bool(), rows, torch.zeros(size, 1, 4),
                     torch.zeros(size, 4), rows)  # fmt: skip

    return make


def test_intervals_are_optimizer_steps_and_training_goes_on_after_an_evaluation(synthetic_run, changed, monkeypatch):
    """T5: nothing counts batches, and a module that was evaluated is trained afterwards."""
    options = {"grad_accum_steps": 3, "epochs": 6, "eval_interval": 4, "save_interval": 5, "keep_checkpoints": 99}
    config = changed(synthetic_run, train=options)
    modes, evaluate = [], Trainer._evaluate

    def noted(self):
        best = evaluate(self)
        modes.append((self.state.step, self.engine.module.training, torch.is_grad_enabled()))
        return best

    monkeypatch.setattr(Trainer, "_evaluate", noted)
    train(config)
    rows = [json.loads(line) for line in RunFolder.of(config).metrics.read_text().splitlines()]
    assert [r["step"] for r in rows if "loss" in r] == list(range(1, 13))
    assert modes == [(4, True, True), (8, True, True), (12, True, True)]
    saved = {int(p.name[5:]) for p in RunFolder.of(config).complete_checkpoints()}
    assert {5, 10, 12} <= saved <= {4, 5, 8, 10, 12}


def test_small_updates_are_not_lost_and_not_after_a_resume(synthetic_run, changed, monkeypatch):
    """T6: at this rate a bfloat16 weight of 1.0 would stay 1.0."""
    config = changed(
        synthetic_run, train={"learning_rate": 1e-5, "schedule": "constant", "save_interval": 1, "keep_checkpoints": 99}
    )

    class Stopped(Exception):
        pass

    log = Metrics.log

    def stop(self, step, **values):
        if step == 5 and "loss" in values:
            raise Stopped
        log(self, step, **values)

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(Metrics, "log", stop)
        train(config)
    train(config)
    norms = [read_checkpoint(p).tensors["midlayer.hidden_norm.weight"] for p in
             RunFolder.of(config).complete_checkpoints()]  # fmt: skip
    assert len(norms) == 11
    assert all((a != b).float().mean() > 0.95 for a, b in itertools.pairwise(norms))
    assert (norms[-1].bfloat16() == 1).all() and (norms[-1] != 1).all()


@pytest.mark.slow
def test_steps_that_are_not_finite_are_skipped_on_every_rank_and_engine(place, ranks, logged):
    """T7: one rank's infinite states cost all ranks that step and nothing else; T8: rates are those of one process."""
    engines = {
        "ddp": {},
        "fsdp2": {"shard": "fsdp2"},
        "zero2": {"engine": "deepspeed"},
        "offload": {"engine": "deepspeed", "deepspeed_config": "zero2_offload"},
        "zero3": {"engine": "deepspeed", "deepspeed_config": "zero3"},
    }
    options = {"epochs": 2, "save_interval": 1, "eval_interval": 99, "keep_checkpoints": 99}
    runs = {}
    for name, engine in engines.items():
        runs[name] = place(f"spoiled-{name}", **options, **engine)
        spoil(RunFolder.of(runs[name]), "c-003/0")
    ranks(2, *({"config": config} for config in runs.values()))
    one = place("unspoiled", epochs=2, grad_accum_steps=2, save_interval=99, eval_interval=99)
    train(one)
    for name, config in runs.items():
        skipped = [r for r in logged(config) if r.get("skipped_step")]
        assert len(skipped) == 2, name  # once an epoch
        steps = [read_checkpoint(p).tensors for p in RunFolder.of(config).complete_checkpoints()]
        assert len(steps) == 6
        still = [i + 2 for i in range(5) if all(torch.equal(t, steps[i + 1][k]) for k, t in steps[i].items())]
        assert still == [r["step"] for r in skipped if r["step"] > 1], name
        assert all(torch.isfinite(t).all() for step in steps for t in step.values()), name
        assert final(config).state["skipped"] == 2
        assert of(logged, config, "learning_rate") == of(logged, one, "learning_rate")
        assert of(logged, config, "loss")[-1] == pytest.approx(of(logged, runs["ddp"], "loss")[-1], rel=1e-5)


def spoil(run, sample_id):
    """Make a sample's states infinite where they lie."""
    store = HiddenStateStore(run.hidden_states)
    row = next(r for r in store.index if r["sample_id"] == sample_id)
    file = run.hidden_states / store.manifest["shards"][row["shard"]]["file"]
    content = bytearray(file.read_bytes())
    header = int.from_bytes(content[:8], "little")
    told = json.loads(content[8 : 8 + header])["aux_states"]
    begin, each = 8 + header + told["data_offsets"][0], 2 * told["shape"][1] * told["shape"][2]
    infinite = torch.full((each // 2 * row["length"],), float("inf")).bfloat16().view(torch.uint8).numpy().tobytes()
    content[begin + each * row["start"] : begin + each * (row["start"] + row["length"])] = infinite
    file.write_bytes(content)


# ---- R4: warm starts -------------------------------------------------------------------------------------------------


@pytest.fixture
def other_vocabulary(trained_run, changed):
    """The same run before its training, with a mapping of its own, as new data would give it."""
    config = copied(trained_run, changed, "warm")
    shutil.rmtree(RunFolder.of(config).checkpoints)
    RunFolder.of(config).metrics.unlink()
    run = RunFolder.of(config)
    own = load_mapping(run.vocab_mapping)
    t2d = own.t2d.copy()
    t2d[[int(own.target_ids[-1]), int((~t2d).nonzero()[0][0])]] = [False, True]
    ids = t2d.nonzero()[0]
    save_mapping(run.vocab_mapping, type(own)(ids - range(len(ids)), t2d), {})
    return config


@pytest.mark.parametrize("source", ["checkpoint", "export", "speculators"])
def test_a_warm_start_keeps_weights_and_vocabulary(trained_run, other_vocabulary, changed, source, logged):
    """R4: the mapping is the draft's, whatever the run's samples hold, and stays so after a resume and an export."""
    there = final(trained_run)
    if source == "checkpoint":
        folder = there.folder
    else:
        exporting = changed(trained_run, export={"format": "hf" if source == "export" else "speculators"})
        export(exporting)
        folder = RunFolder.of(trained_run).export
    if source == "export":  # as other trainers leave it
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "max_position_embeddings": 128}))
    config = changed(
        other_vocabulary,
        train={"init_from": str(folder), "learning_rate": 1e-30, "epochs": 1, "save_interval": 2},
    )
    assert not (load_mapping(RunFolder.of(config).vocab_mapping).target_ids == there.target_ids.numpy()).all()
    train(config)
    here = final(config)
    assert torch.equal(here.d2t, there.d2t) and torch.equal(here.t2d, there.t2d)
    rounding = 0 if source == "checkpoint" else 2**-8
    for name, tensor in there.tensors.items():
        torch.testing.assert_close(here.tensors[name], tensor, rtol=rounding, atol=0, msg=name)
    export(config)  # proves that vLLM's files have this mapping too
    # It goes on without the draft it began with.
    shutil.rmtree(here.folder)
    (RunFolder.of(config).checkpoints / "manifest.json").unlink()
    gone = folder.rename(folder.with_name("gone"))
    train(config)
    assert torch.equal(final(config).d2t, there.d2t)
    gone.rename(folder)


def test_a_warm_start_from_a_draft_of_another_shape_is_refused(trained_run, other_vocabulary, changed):
    folder = final(trained_run).folder
    with pytest.raises(UserError, match=r"fc_norm is False there and True here.*Set the section draft"):
        train(changed(other_vocabulary, train={"init_from": str(folder)}, draft={"fc_norm": True}))
    with pytest.raises(UserError, match="no draft"):
        train(changed(other_vocabulary, train={"init_from": str(folder.parent / "step-0000099")}))
    assert not RunFolder.of(other_vocabulary).checkpoints.exists()
