"""Saves that are killed, that fail, and that run beside training."""

import json
import shutil
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

from draftsmith.core import checkpoint
from draftsmith.core.config_io import dump_config
from draftsmith.core.errors import StageFailed
from draftsmith.core.run import RunFolder
from draftsmith.train.stage import train
from draftsmith.train.writer import Writer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
def test_thirty_kills_in_every_phase_of_a_save_leave_a_whole_checkpoint(place, tmp_path, weights, figures):
    """R1: whatever was being written, renamed or deleted, training goes on and ends bit for bit where it would have."""
    settings = {"epochs": 21, "save_interval": 1, "eval_interval": 4, "keep_checkpoints": 2, "ema_decay": 0.9}
    runs = [place(name, **settings) for name in ("undisturbed", "killed-30")]
    files = []
    for config in runs:
        files.append(tmp_path / f"{config.run.name}.yaml")
        files[-1].write_text(dump_config(config))
    command = [sys.executable, str(Path(__file__).parent / "killed.py"), *map(str, files), "30", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["last"] == 0 and Counter(told["ends"]) == {-9: 30}, (told, done.stderr[-4000:])
    # What a save consists of: a folder, its files, their way to the disk, its name, what is deleted then.
    assert {"os.mkdir", "open", "os.rename", "shutil.rmtree"} <= set(told["events"])
    straight, killed = runs
    assert weights(killed) == weights(straight) and figures(killed) == figures(straight)
    left = [p.name for p in RunFolder.of(killed).checkpoints.iterdir() if p.name.startswith(".tmp")]
    assert not left


def test_a_save_runs_beside_training_and_holds_what_was_there(synthetic_run, changed, monkeypatch):
    """The writer is held up while training goes on; what it writes then is the step that it was handed."""
    config = changed(synthetic_run, train={"save_interval": 4, "keep_checkpoints": 9, "eval_interval": 100})
    straight = changed(config, run={"name": "straight"})
    shutil.copytree(RunFolder.of(config).root, RunFolder.of(straight).root)
    train(straight)
    write, threads = checkpoint.save_file, set()

    def slowly(tensors, path):
        threads.add(threading.current_thread().name)
        threading.Event().wait(0.05)  # steps of this training take a few milliseconds
        write(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", slowly)
    train(config)
    assert threads and all(name.startswith("checkpoint") for name in threads)
    for one, other in zip(*(RunFolder.of(c).complete_checkpoints() for c in (config, straight)), strict=True):
        for name in ("draft.safetensors", "optimizer.safetensors"):
            assert (one / name).read_bytes() == (other / name).read_bytes(), (one, name)


def test_a_save_that_fails_ends_training(synthetic_run, changed, monkeypatch):
    config = changed(synthetic_run, train={"save_interval": 1})
    real = checkpoint.save_file
    calls = []

    def fail(tensors, path):
        calls.append(path)
        if len(calls) > 4:
            raise OSError(28, "No space left on device", str(path))
        real(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", fail)
    with pytest.raises((OSError, StageFailed), match="No space left"):
        train(config)
    run = RunFolder.of(config)
    assert [p.name for p in run.complete_checkpoints()] == ["step-0000001", "step-0000002"]
    assert not (run.checkpoints / "manifest.json").exists()


def test_what_was_handed_over_is_written_when_training_fails_meanwhile():
    done = []
    with pytest.raises(KeyError), Writer() as writer:
        writer.submit(lambda: (threading.Event().wait(0.05), done.append(1)))
        raise KeyError
    assert done == [1]


def test_one_checkpoint_at_a_time_is_on_its_way():
    busy = []

    def write(number):
        busy.append(number)
        threading.Event().wait(0.02)
        assert busy == [number]
        busy.clear()

    with Writer() as writer:
        for number in range(4):
            writer.submit(lambda number=number: write(number))
    assert not busy
