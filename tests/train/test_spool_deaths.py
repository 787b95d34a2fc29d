"""Whoever is killed, and when: every sample once an epoch, and the same draft."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import spool_sides
from spool_sides import capture_beside

from draftsmith.core.run import RunFolder
from draftsmith.core.samples import TrainSamples
from draftsmith.core.spool import is_alive
from draftsmith.hidden_state_capture.reader import HiddenStateStore
from draftsmith.train.feed import SpoolFeed
from draftsmith.train.stage import train

pytestmark = pytest.mark.usefixtures("one_thread")
DRAW = random.SystemRandom()  # training seeds the usual one


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


def planned(config, plan):
    ids = TrainSamples(RunFolder.of(config).samples).ids
    steps = enumerate(plan.steps)
    return {(r, s, tuple(ids[n] for n in share)) for s, shares in steps for r, share in enumerate(shares)}


@pytest.mark.slow
def test_kills_of_either_side_change_nothing(spool_run, from_store, config_file, tmp_path, figures, weights, plan_of):
    """Every optimizer step sees the samples of the plan, however often it is made again, and the draft is the same."""
    kills = [f"{DRAW.choice(['capture', 'train0'])}:{DRAW.randint(0, 7)}:{DRAW.uniform(0, 0.1):.3f}" for _ in range(8)]
    seen, batches = attempts(spool_run, config_file, tmp_path, [*kills, "-"])
    assert seen[-1]["codes"] == {"capture": 0, "train0": 0}, (kills, seen)
    assert batches == planned(spool_run, plan_of(spool_run))
    assert weights(spool_run) == weights(from_store)
    assert figures(spool_run) == figures(from_store)
    assert max(s["most"] for s in seen) <= spool_run.capture.spool_bytes
    for kill, outcome in zip(kills, seen, strict=False):
        killed, other = ("capture", "train0") if kill.startswith("capture") else ("train0", "capture")
        if outcome["codes"][killed] == -signal.SIGKILL:
            assert outcome["codes"][other] in (0, 1, -signal.SIGTERM), (kill, outcome)
            if outcome["codes"][other] == 1:
                assert "has ended" in outcome["said"][other] and "again to go on" in outcome["said"][other]


@pytest.mark.slow
def test_a_full_disk_stops_both_sides_and_a_run_after_it_goes_on(
    spool_run, from_store, config_file, tmp_path, weights, plan_of
):
    seen, batches = attempts(spool_run, config_file, tmp_path, ["full", "-"])
    assert seen[0]["codes"] == {"capture": 1, "train0": 1}
    assert "hidden-state writer" in seen[0]["said"]["capture"] and "too large" in seen[0]["said"]["capture"]
    assert "the capture has ended without shard-" in seen[0]["said"]["train0"]
    assert seen[1]["codes"] == {"capture": 0, "train0": 0}
    assert batches == planned(spool_run, plan_of(spool_run)) and weights(spool_run) == weights(from_store)


@pytest.mark.slow
def test_two_processes_share_one_spool(spool_run, changed, config_file, tmp_path, plan_of):
    config = changed(spool_run, capture={"spool_bytes": 150_000})
    kills = [f"capture:{DRAW.randint(1, 9)}:{DRAW.uniform(0, 0.1):.3f}", "-"]
    seen, batches = attempts(config, config_file, tmp_path, kills, world_size=2)
    assert seen[-1]["codes"] == {"capture": 0, "train0": 0, "train1": 0}, seen
    assert batches == planned(config, plan_of(config, 2))


def test_what_a_killed_training_needs_again_is_not_captured_again(spool_run, changed, monkeypatch, plan_of):
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
def test_a_shard_that_does_not_fit_is_captured_again(spool_run, from_store, changed, spoil, weights):
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
