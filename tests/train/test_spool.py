"""The spool: capture and training at once over a bounded folder give what the store gives, whoever is killed."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import spool_sides
from spool_sides import capture_beside

from draftsmith.core.checkpoint import final_checkpoint
from draftsmith.core.config import Config
from draftsmith.core.errors import StageFailed, UserError
from draftsmith.core.run import RunFolder
from draftsmith.core.samples import TrainSamples
from draftsmith.core.spool import held, is_alive
from draftsmith.core.target import resolve_layer_ids, resolve_target
from draftsmith.data.batching import spool_plan
from draftsmith.export.stage import export
from draftsmith.hidden_state_capture.reader import HiddenStateStore
from draftsmith.hidden_state_capture.stage import _finish, capture_inputs, samples_to_store
from draftsmith.hidden_state_capture.writer import SampleStates, ShardWriter
from draftsmith.train.feed import SpoolFeed, training_plan
from draftsmith.train.stage import train

pytestmark = pytest.mark.usefixtures("one_thread")
# A step has about 26,000 bytes: three shards fit, of a step each.
SPOOL = {"mode": "spool", "spool_bytes": 100_000, "spool_capture": "own", "shard_bytes": 16 * 1024}


@pytest.fixture
def spool_run(synthetic_run, changed):
    """A prepared run whose held-out samples are captured for spool mode, without vLLM."""
    return captured(changed(synthetic_run, capture=SPOOL))


def captured(config):
    """What `capture` stores of a run, without vLLM."""
    run, target = RunFolder.of(config), resolve_target(config.target)
    shutil.rmtree(run.hidden_states)
    samples, layer_ids = samples_to_store(config), resolve_layer_ids(config.capture, target.num_layers)
    capture = config.capture
    writer = ShardWriter(run.hidden_states, capture.shard_bytes, capture.pending_bytes, capture.storage)
    for s in samples:
        states = spool_sides.drawn_states(int(s.sample_id[2:5]), len(s.input_ids))
        writer.put(SampleStates(s.sample_id, s.input_ids, [list(x) for x in s.loss_spans], states, ready=bool))
    writer.flush()
    probe = {"norm_form": "rms", "eps": 1e-6, "argmax_agreement": 1.0, "positions": 8, "state_errors": None}
    (run.hidden_states / "probe.json").write_text(json.dumps(probe))
    _finish(config, target, layer_ids, samples, [], capture_inputs(config, target, layer_ids, run))
    return config


@pytest.fixture
def from_store(_trained_run, synthetic_run, changed):
    """The same training from the store, without a stop."""
    return changed(synthetic_run, run={"dir": str(_trained_run / "runs")})


def logged(config):
    return [json.loads(line) for line in RunFolder.of(config).metrics.read_text().splitlines()]


def figures(config):
    """What was logged, without what the clock and the spool decide."""
    clock = (
        "time",
        "tokens_per_second",
        "data_wait_seconds",
        "capture_wait_seconds",
        "spool_bytes",
        "spool_peak_bytes",
    )
    return [{k: v for k, v in row.items() if k not in clock} for row in logged(config)]


def weights(config):
    return (final_checkpoint(RunFolder.of(config), "test") / "draft.safetensors").read_bytes()


def plan_of(config, world_size=1):
    run = RunFolder.of(config)
    return spool_plan(TrainSamples(run.samples), config, HiddenStateStore(run.hidden_states).manifest, world_size)


# ---- the same training as from the store -----------------------------------------------------------------------------


def test_a_spool_trains_as_the_store_does_bit_for_bit(spool_run, from_store):
    with capture_beside(spool_run) as ended:
        train(spool_run)
    assert not ended
    assert weights(spool_run) == weights(from_store)
    assert figures(spool_run) == figures(from_store)
    run = RunFolder.of(spool_run)
    assert not run.spool.exists()
    assert HiddenStateStore(run.hidden_states).manifest["mode"] == "spool"
    assert {r["split"] for r in HiddenStateStore(run.hidden_states).index} == {"eval"}


def test_a_spool_in_fp8_trains_as_a_store_in_fp8(synthetic_run, changed, from_store):
    stored = captured(changed(synthetic_run, capture={"storage": "fp8"}))
    train(stored)
    from_fp8 = weights(stored)
    shutil.rmtree(RunFolder.of(stored).checkpoints)
    spooled = captured(changed(synthetic_run, capture={**SPOOL, "storage": "fp8", "spool_bytes": 60_000}))
    with capture_beside(spooled) as ended:
        train(spooled)
    assert not ended
    assert weights(spooled) == from_fp8 != weights(from_store)


def test_bytes_in_flight_and_both_sides_waits_are_logged(spool_run, capsys):
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
    assert "verified: True" in capsys.readouterr().out
    train(spool_run)
    assert "already there" in capsys.readouterr().out
    with capture_beside(spool_run):  # a capture that comes too late has nothing to wait for
        pass


def test_some_samples_are_stored_where_none_are_held_out(spool_run, changed):
    folder = RunFolder.of(spool_run).samples
    from draftsmith.core.samples import read_samples, write_samples

    samples = [s for s in read_samples(folder) if s.split == "train"]
    write_samples(folder, samples)
    assert samples_to_store(spool_run) == samples[:8]
    assert samples_to_store(changed(spool_run, capture={"mode": "store"})) == samples


def test_eval_and_training_refuse_states_of_the_other_mode(spool_run, synthetic_run, changed):
    with pytest.raises(UserError, match='mode is "spool" there and "store" in the config'):
        train(changed(spool_run, capture={"mode": "store"}))


# ---- the plan --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_shards_hold_every_step_once_and_those_beside_each_other_fit(spool_run, changed, world_size):
    config = changed(spool_run, capture={"spool_bytes": 200_000, "shard_bytes": random.choice([1024, 60_000])})
    plan = plan_of(config, world_size)
    steps = [s for shard in plan.shards for s in range(shard.first, shard.end)]
    assert steps == list(range(len(plan.steps)))
    assert [plan.shard_of(s).number for s in steps] == [x.number for x in plan.shards for _ in range(x.first, x.end)]
    assert plan.beside == sorted(plan.beside) and plan.beside[-1] > 0
    for number, oldest in enumerate(plan.beside):
        there = sum(s.nbytes for s in plan.shards[oldest : number + 1])
        assert there <= 200_000
        assert oldest == 0 or there + plan.shards[oldest - 1].nbytes > 200_000, "there would have been room"


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_plan_is_the_stores(spool_run, from_store, world_size):
    store = HiddenStateStore(RunFolder.of(from_store).hidden_states)
    samples = TrainSamples(RunFolder.of(spool_run).samples)
    for rank in range(world_size):
        ours = [[samples.ids[n] for n in step[rank]] for step in plan_of(spool_run, world_size).steps]
        theirs = training_plan(store, from_store, rank, world_size)
        assert ours == [[store.index[n]["sample_id"] for n in step] for step in theirs]


def test_shards_are_no_larger_than_planned(spool_run, monkeypatch):
    plan, sizes = plan_of(spool_run), {}
    read = SpoolFeed.batch

    def measured(self, step):
        batch = read(self, step)
        shard = plan.shard_of(step)
        sizes[shard.number] = sum(f.stat().st_size for f in self.folder.glob(f"shard-{shard.number:05d}.*"))
        return batch

    monkeypatch.setattr(SpoolFeed, "batch", measured)
    with capture_beside(spool_run):
        train(spool_run)
    assert len(sizes) == len(plan.shards)
    assert all(0.9 * plan.shards[n].nbytes < size <= plan.shards[n].nbytes for n, size in sizes.items())


@pytest.mark.parametrize("bytes_", [1, 40_000])
def test_a_spool_that_cannot_hold_two_shards_is_refused_with_figures(spool_run, changed, bytes_):
    config = changed(spool_run, capture={"spool_bytes": bytes_})
    with pytest.raises(UserError) as error:
        train(config)
    least = int(str(error.value).split("Set capture.spool_bytes to ")[1].split()[0])
    assert f"capture.spool_bytes is {bytes_:,}" in str(error.value) and 50_000 < least < 80_000
    assert not RunFolder.of(config).spool.exists() and not RunFolder.of(config).checkpoints.exists()
    plan_of(changed(spool_run, capture={"spool_bytes": least}))  # the figure that the error names is enough
    with pytest.raises(UserError):
        plan_of(changed(spool_run, capture={"spool_bytes": least - 1}))


def test_the_smallest_spool_trains_the_same(spool_run, from_store, changed):
    with pytest.raises(UserError) as error:
        plan_of(changed(spool_run, capture={"spool_bytes": 1}))
    least = int(str(error.value).split("Set capture.spool_bytes to ")[1].split()[0])
    config = changed(spool_run, capture={"spool_bytes": least})
    with capture_beside(config):
        train(config)
    assert weights(config) == weights(from_store)


def test_spool_mode_without_a_bound_is_refused():
    with pytest.raises(ValueError, match=r"set capture\.spool_bytes"):
        Config.model_validate({"capture": {"mode": "spool"}})


# ---- samples without usable states -----------------------------------------------------------------------------------


def test_training_goes_on_without_rejected_samples_and_names_them(spool_run, changed, monkeypatch):
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
    said = pytest.raises(StageFailed, match="the capture has ended without shard-")
    with capture_beside(spool_run, spoiled=("c-003/0", "c-007/0")) as ended, said:
        train(spool_run)
    assert "of 20 samples have unusable states (capture.max_rejected_share is 1.0%)" in str(ended[0])


# ---- two sides that do not fit ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "values", "named"),
    [
        ("train", {"tokens_per_batch": 80}, "tokens_per_batch is 64 there and 80 in the config"),
        ("train", {"epochs": 3}, "epochs is 2 there and 3"),
        ("run", {"seed": 5}, "seed is 0 there and 5"),
        ("capture", {"shard_bytes": 20_000}, "shard_bytes is 16384 there and 20000"),
    ],
)
def test_a_capture_with_another_config_is_refused_by_what_differs(spool_run, changed, section, values, named):
    with capture_beside(spool_run) as ended, pytest.raises(UserError, match=named):
        train(changed(spool_run, **{section: values}))
    assert isinstance(ended[0], StageFailed)


def test_a_second_capture_and_a_second_training_are_refused(spool_run):
    from draftsmith.hidden_state_capture.spool import feed_training

    folder = RunFolder.of(spool_run).spool
    folder.mkdir()
    with held(folder, "capture"), pytest.raises(UserError, match="another capture works on"):
        feed_training(spool_run, spool_sides.prefill())
    with held(folder, "trainer"), pytest.raises(UserError, match="another trainer works on"):
        train(spool_run)
    assert not is_alive(folder, "capture") and not is_alive(folder, "trainer")


# ---- deaths ----------------------------------------------------------------------------------------------------------


def attempts(config, config_file, tmp_path, kills, world_size=1):
    """Run both sides as processes, once for every kill; see spool_sides.py."""
    log = tmp_path / "log"
    log.mkdir(exist_ok=True)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "SIDES_WORLD_SIZE": str(world_size), "MASTER_PORT": str(free_port())}
    done = subprocess.run(
        [sys.executable, spool_sides.__file__, config_file(config), str(log), *kills],
        capture_output=True, text=True, env=env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (log / "batches.jsonl").read_text().splitlines()
    batches = [json.loads(line) for line in lines if line.endswith("}")]  # a kill may cut a line
    return json.loads(done.stdout), {(b["rank"], b["step"], tuple(b["ids"])) for b in batches}


def free_port():
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def planned(config, world_size=1):
    ids = TrainSamples(RunFolder.of(config).samples).ids
    steps = enumerate(plan_of(config, world_size).steps)
    return {(r, s, tuple(ids[n] for n in share)) for s, shares in steps for r, share in enumerate(shares)}


def test_kills_of_either_side_change_nothing(spool_run, from_store, config_file, tmp_path):
    """Every optimizer step sees the samples of the plan, however often it is made again, and the draft is the same."""
    kills = [f"{random.choice(['capture', 'train0'])}:{random.uniform(0.05, 1.2):.3f}" for _ in range(8)]
    seen, batches = attempts(spool_run, config_file, tmp_path, [*kills, "-"])
    assert seen[-1]["codes"] == {"capture": 0, "train0": 0}, (kills, seen)
    assert batches == planned(spool_run)
    assert weights(spool_run) == weights(from_store)
    assert figures(spool_run) == figures(from_store)
    assert max(s["most"] for s in seen) <= spool_run.capture.spool_bytes
    for kill, outcome in zip(kills, seen, strict=False):
        killed, other = ("capture", "train0") if kill.startswith("capture") else ("train0", "capture")
        if outcome["codes"][killed] == -signal.SIGKILL:
            assert outcome["codes"][other] in (0, 1), (kill, outcome)
            if outcome["codes"][other] == 1:
                assert "has ended" in outcome["said"][other] and "again to go on" in outcome["said"][other]


def test_a_full_disk_stops_both_sides_and_a_run_after_it_goes_on(spool_run, from_store, config_file, tmp_path):
    seen, batches = attempts(spool_run, config_file, tmp_path, ["full", "-"])
    assert seen[0]["codes"] == {"capture": 1, "train0": 1}
    assert "hidden-state writer" in seen[0]["said"]["capture"] and "too large" in seen[0]["said"]["capture"]
    assert "the capture has ended without shard-" in seen[0]["said"]["train0"]
    assert seen[1]["codes"] == {"capture": 0, "train0": 0}
    assert batches == planned(spool_run) and weights(spool_run) == weights(from_store)


def test_two_processes_share_one_spool(spool_run, changed, config_file, tmp_path):
    config = changed(spool_run, capture={"spool_bytes": 150_000})
    kills = [f"capture:{random.uniform(0.3, 2):.3f}", "-"]
    seen, batches = attempts(config, config_file, tmp_path, kills, world_size=2)
    assert seen[-1]["codes"] == {"capture": 0, "train0": 0, "train1": 0}, seen
    assert batches == planned(config, 2)


def test_what_a_killed_training_needs_again_is_not_captured_again(spool_run, changed, monkeypatch):
    """With room for everything the shards of the steps since the last checkpoint are still there."""
    from draftsmith.train.metrics import Metrics

    config = changed(spool_run, capture={"spool_bytes": 10**7})
    log = Metrics.log

    def log_until(self, at, **values):
        if at == 7:
            raise RuntimeError("a crash")
        log(self, at, **values)

    with monkeypatch.context() as patch, capture_beside(config):
        patch.setattr(Metrics, "log", log_until)
        with pytest.raises(RuntimeError, match="a crash"):
            train(config)
    shards = sorted(p.name for p in RunFolder.of(config).spool.glob("shard-*.safetensors"))
    assert len(shards) == len(plan_of(config).shards)
    before = (RunFolder.of(config).spool / shards[-1]).stat().st_mtime_ns
    seen = []
    monkeypatch.setattr(spool_sides, "drawn_states", lambda *_: pytest.fail("captured again"))
    read = SpoolFeed.batch

    def noted(self, step):
        seen.append((self.folder / shards[-1]).stat().st_mtime_ns)
        return read(self, step)

    monkeypatch.setattr(SpoolFeed, "batch", noted)
    with capture_beside(config) as ended:
        train(config)
    assert not ended and set(seen) == {before}


@pytest.mark.parametrize("spoil", ["cut", "other"])
def test_a_shard_that_does_not_fit_is_captured_again(spool_run, from_store, changed, spoil):
    """Cut short, or made for another plan: never used."""
    config = changed(spool_run, capture={"spool_bytes": 10**7})
    folder = RunFolder.of(config).spool
    folder.mkdir()
    other = config if spoil == "cut" else changed(config, run={"seed": 9})
    with capture_beside(other):
        feed = SpoolFeed(HiddenStateStore(RunFolder.of(config).hidden_states), other, 0, 1, lambda: None)
        feed.start(0)
        feed.batch(len(feed.plan) - 1)  # the capture has made everything
        feed.close(finished=False)
    if spoil == "cut":
        file = folder / "shard-00001.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
    with capture_beside(config) as ended:
        train(config)
    assert not ended and weights(config) == weights(from_store)


def test_a_training_that_is_stopped_while_it_waits_ends_at_once(spool_run):
    """Ctrl-C while there is no capture: the waiting thread does not hold the process."""
    script = "import sys, spool_sides; from draftsmith.core.config_io import load_config; "
    script += "spool_sides.train(load_config(sys.argv[1]))"
    from draftsmith.core.config_io import dump_config

    file = RunFolder.of(spool_run).root / "copy.yaml"
    file.write_text(dump_config(spool_run))
    env = {**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{Path(spool_sides.__file__).parent}"}
    process = subprocess.Popen([sys.executable, "-c", script, str(file)], env=env, stderr=subprocess.PIPE, text=True)
    import time

    give_up = time.monotonic() + 60
    while not is_alive(RunFolder.of(spool_run).spool, "trainer") and time.monotonic() < give_up:
        time.sleep(0.05)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    error = process.communicate(timeout=20)[1]
    assert "KeyboardInterrupt" in error and process.returncode != 0
    assert not is_alive(RunFolder.of(spool_run).spool, "trainer")
