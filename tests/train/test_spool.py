"""The spool: capture and training at once over a bounded folder give what the store gives."""

import shutil

import pytest
import spool_sides
from spool_sides import capture_beside

from draftsmith.core.atomic import write_json
from draftsmith.core.errors import StageFailed, UserError
from draftsmith.core.run import RunFolder
from draftsmith.core.samples import TrainSamples
from draftsmith.core.spool import held, is_alive, spool_inputs
from draftsmith.export.stage import export
from draftsmith.hidden_state_capture.reader import HiddenStateStore
from draftsmith.hidden_state_capture.stage import heads_to_store
from draftsmith.hidden_state_capture.todo import Head
from draftsmith.train.feed import SpoolFeed
from draftsmith.train.stage import train

pytestmark = pytest.mark.usefixtures("one_thread")


# ---- the same training as from the store -----------------------------------------------------------------------------


def test_a_spool_trains_as_the_store_does_bit_for_bit(spool_run, from_store, figures, weights):
    with capture_beside(spool_run) as ended:
        train(spool_run)
    assert not ended
    assert weights(spool_run) == weights(from_store)
    assert figures(spool_run) == figures(from_store)
    run = RunFolder.of(spool_run)
    assert not run.spool.exists()
    assert HiddenStateStore(run.hidden_states).manifest["mode"] == "spool"
    assert {r["split"] for r in HiddenStateStore(run.hidden_states).index} == {"eval"}


def test_a_spool_in_fp8_trains_as_a_store_in_fp8(synthetic_run, recaptured, from_store, weights):
    stored = recaptured(synthetic_run, storage="fp8")
    train(stored)
    from_fp8 = weights(stored)
    shutil.rmtree(RunFolder.of(stored).checkpoints)
    spool = {"mode": "spool", "spool_bytes": 60_000, "spool_capture": "own", "shard_bytes": 8 * 1024}
    spooled = recaptured(synthetic_run, storage="fp8", **spool)
    with capture_beside(spooled) as ended:
        train(spooled)
    assert not ended
    assert weights(spooled) == from_fp8 != weights(from_store)


def test_so_does_one_with_accumulated_steps(spool_run, recaptured, changed, weights):
    config = recaptured(changed(spool_run, train={"grad_accum_steps": 3}), spool_bytes=250_000)
    with capture_beside(config) as ended:
        train(config)
    assert not ended
    from_spool = weights(config)
    shutil.rmtree(RunFolder.of(config).checkpoints)
    config = recaptured(config, mode="store")
    train(config)
    assert weights(config) == from_spool


def test_bytes_in_flight_and_both_sides_waits_are_logged(spool_run, capsys, logged):
    with capture_beside(spool_run):
        train(spool_run)
    rows = [r for r in logged(spool_run) if "spool_bytes" in r]
    assert len(rows) == 11
    bound = spool_run.capture.spool_bytes
    assert all(0 < r["spool_bytes"] <= bound and 50_000 < r["spool_peak_bytes"] <= bound for r in rows[1:])
    assert rows[-1]["data_wait_seconds"] > 0 and rows[-1]["capture_wait_seconds"] > 0
    assert "spool: training waited" in capsys.readouterr().out


def test_an_export_of_a_spool_run_is_proven_on_its_held_out_samples(spool_run, capsys):
    with capture_beside(spool_run):
        train(spool_run)
    export(spool_run)
    assert "proven" in capsys.readouterr().out
    train(spool_run)
    assert "already there" in capsys.readouterr().out
    with capture_beside(spool_run):  # a capture that comes too late has nothing to wait for
        pass


def test_some_samples_are_stored_where_none_are_held_out(spool_run, changed):
    folder = RunFolder.of(spool_run).samples
    from draftsmith.core.samples import read_samples, write_samples

    samples = [s for s in read_samples(folder) if s.split == "train"]
    write_samples(folder, samples)
    heads = [Head.of(s) for s in samples]
    assert heads_to_store(spool_run) == heads[:8]
    assert heads_to_store(changed(spool_run, capture={"mode": "store"})) == heads


def test_eval_and_training_refuse_states_of_the_other_mode(spool_run, synthetic_run, changed):
    with pytest.raises(UserError, match='mode is "spool" there and "store" in the config'):
        train(changed(spool_run, capture={"mode": "store"}))


# ---- samples without usable states -----------------------------------------------------------------------------------


def test_training_goes_on_without_rejected_samples_and_names_them(spool_run, changed, monkeypatch, logged):
    seen = []
    read = SpoolFeed.batch

    def noted(self, step):
        batch = read(self, step)
        seen.extend(batch.sample_ids)
        return batch

    monkeypatch.setattr(SpoolFeed, "batch", noted)
    config = changed(spool_run, capture={"max_rejected_share": 0.1})
    with capture_beside(config, spoiled=("c-003/0", "c-007/0")) as ended:
        train(config)
    assert not ended
    reported = [e for r in logged(config) for e in r.get("rejected_samples", [])]
    assert sorted(e["sample_id"] for e in reported) == ["c-003/0", "c-003/0", "c-007/0", "c-007/0"]  # once an epoch
    assert {e["reason"] for e in reported} == {"non-finite states"}
    ids = TrainSamples(RunFolder.of(config).samples).ids
    assert sorted(seen) == sorted(2 * [i for i in ids if i not in ("c-003/0", "c-007/0")])


def test_too_many_rejected_samples_stop_both_sides(spool_run):
    ends = pytest.raises(StageFailed, match="the capture has ended without shard-")
    with capture_beside(spool_run, spoiled=("c-003/0", "c-007/0")) as ended, ends:
        train(spool_run)
    assert "of 20 samples have unusable states (capture.max_rejected_share is 1.0%)" in str(ended[0])
    assert RunFolder.of(spool_run).complete_checkpoints()  # at the last step that had its samples


# ---- two sides that do not fit ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "values", "named"),
    [
        ("train", {"tokens_per_batch": 80}, "tokens_per_batch is 64 there and 80 here"),
        ("train", {"epochs": 3}, "epochs is 2 there and 3"),
        ("run", {"seed": 5}, "seed is 0 there and 5"),
        ("capture", {"shard_bytes": 20_000}, "shard_bytes is 16384 there and 20000"),
    ],
)
def test_a_capture_with_another_config_is_refused_by_what_differs(spool_run, changed, section, values, named):
    run = RunFolder.of(spool_run)
    run.spool.mkdir()
    inputs = spool_inputs(spool_run, HiddenStateStore(run.hidden_states).manifest)
    write_json(run.spool / "capture.json", {"inputs": inputs})
    with held(run.spool, "capture"), pytest.raises(UserError, match=named):
        train(changed(spool_run, **{section: values}))


def test_a_second_capture_and_a_second_training_are_refused(spool_run):
    from draftsmith.hidden_state_capture.spool import feed_training

    folder = RunFolder.of(spool_run).spool
    folder.mkdir()
    with held(folder, "capture"), pytest.raises(UserError, match="another capture works on"):
        feed_training(spool_run, spool_sides.prefill())
    with held(folder, "trainer"), pytest.raises(UserError, match="another trainer works on"):
        train(spool_run)
    assert not is_alive(folder, "capture") and not is_alive(folder, "trainer")
