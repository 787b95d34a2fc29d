"""What can be watched of a training: where its time goes, trackers, the profiler's window."""

import gzip
import json

import pytest

from draftsmith.core.checkpoint import final_checkpoint, read_checkpoint
from draftsmith.core.config_train import TrainConfig
from draftsmith.core.run import RunFolder
from draftsmith.core.sizes import Workload, gpu_peak_flops, training_flops
from draftsmith.hidden_state_capture.reader import HiddenStateStore
from draftsmith.train.clock import PARTS
from draftsmith.train.speed import speed_shown
from draftsmith.train.stage import train

pytestmark = pytest.mark.usefixtures("one_thread")


def logged_losses(config):
    rows = [json.loads(line) for line in RunFolder.of(config).metrics.read_text().splitlines()]
    return [row for row in rows if "loss" in row]


# ---- time ------------------------------------------------------------------------------------------------------------


def test_a_steps_time_is_split_into_its_parts(synthetic_run):
    train(synthetic_run)
    rows = logged_losses(synthetic_run)
    for row in rows:
        parts = [row[f"{part}_seconds"] for part in PARTS]
        assert all(spent >= 0 for spent in parts)
        assert sum(parts) <= row["step_seconds"] * 1.001
        assert row["forward_seconds"] > 0 and row["backward_seconds"] > 0 and row["optimizer_seconds"] > 0
        assert row["eta_seconds"] == pytest.approx((11 - row["step"]) * row["step_seconds"])
        assert "mfu" not in row and "gpu_memory_bytes" not in row  # no GPU, and no known peak
    # Little of a step is anything else; the first one warms up, and evaluations and saves come between others.
    quiet = [row for row in rows[1:] if row["step"] in (2, 3, 8)]
    spent = sum(row[f"{part}_seconds"] for row in quiet for part in PARTS)
    assert spent > 0.6 * sum(row["step_seconds"] for row in quiet)


def test_utilisation_is_the_work_of_the_tokens_over_the_peak(synthetic_run, changed):
    config = changed(synthetic_run, train={"peak_tflops": 0.25, "log_interval": 1000})
    train(config)
    [row] = logged_losses(config)
    store = HiddenStateStore(RunFolder.of(config).hidden_states)
    rows = [store.index[n] for n in store.numbers("train")]
    tokens, supervised = (sum(r[key] for r in rows) for key in ("length", "supervised_tokens"))
    work = Workload(tokens, supervised / tokens, tokens / len(rows), config.train.ttt_steps)
    shape = read_checkpoint(final_checkpoint(RunFolder.of(config), "test")).shape
    assert row["mfu"] == pytest.approx(training_flops(shape, work) * row["tokens_per_second"] / 0.25e12)


def test_the_live_figures_are_shares_of_a_step():
    figures = {"tokens_per_second": 71100.4, "step_seconds": 0.2, "data_seconds": 0.0, "forward_seconds": 0.06,
               "backward_seconds": 0.12, "communication_seconds": 0.01, "optimizer_seconds": 0.008,
               "gpu_memory_bytes": 3 * 2**30, "mfu": 0.523}  # fmt: skip
    assert speed_shown(figures) == {
        "tok/s": "71,100",
        "step": "0.2 s (data 0% forw 30% back 60% comm 5% opti 4%)",
        "GPU": "3.0 GiB",
        "MFU": "52%",
    }


def test_peaks_of_known_gpus():
    assert gpu_peak_flops("NVIDIA H200") == gpu_peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert gpu_peak_flops("NVIDIA H100 PCIe") == 756e12 and gpu_peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert gpu_peak_flops("NVIDIA GeForce GTX 1080") is None


# ---- profiler --------------------------------------------------------------------------------------------------------


def test_the_profilers_window_is_recorded(synthetic_run, changed, capsys):
    config = changed(synthetic_run, train={"profile_steps": [3, 4]})
    train(config)
    folder = RunFolder.of(config).profile
    assert sorted(p.name for p in folder.iterdir()) == ["rank-0.json.gz", "rank-0.txt"]
    events = json.loads(gzip.decompress((folder / "rank-0.json.gz").read_bytes()))["traceEvents"]
    optimizer_steps = [e for e in events if e.get("name", "").startswith("Optimizer.step#AdamW")]
    assert len(optimizer_steps) == 2
    assert "aten::" in (folder / "rank-0.txt").read_text()
    assert "profile: steps 3 to 4" in capsys.readouterr().out


def test_a_window_that_training_ends_in_is_written_too(synthetic_run, changed):
    config = changed(synthetic_run, train={"profile_steps": [11, 20]})
    train(config)
    assert (RunFolder.of(config).profile / "rank-0.txt").is_file()


@pytest.mark.parametrize("steps", [[5, 4], [1], [0, 3], [1, 2, 3]])
def test_a_window_that_is_none_is_refused(steps):
    with pytest.raises(ValueError, match="profile_steps"):
        TrainConfig(profile_steps=steps)


# ---- trackers --------------------------------------------------------------------------------------------------------


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """Trackers that stay on this machine."""
    for name, value in {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
    }.items():
        monkeypatch.setenv(name, value)


def tags_of(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    [file] = folder.glob("events.out.tfevents.*")  # the settings' own lie a folder deeper
    events = EventAccumulator(str(file.parent)).Reload()
    return {tag: [e.value for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.slow
def test_trackers_get_every_figure_and_wandb_writes_offline(synthetic_run, changed, offline, tmp_path):
    config = changed(synthetic_run, train={"trackers": ["wandb", "tensorboard", "trackio"]})
    train(config)
    root = RunFolder.of(config).root
    [run] = (root / "wandb").glob("offline-run-*")
    [record] = run.glob("*.wandb")
    assert record.stat().st_size > 1000 and b"eval_acceptance_length" in record.read_bytes()
    losses = [row["loss"] for row in logged_losses(config)]
    tags = tags_of(root / "draftsmith-test")
    assert tags["loss"] == pytest.approx(losses) and len(tags["accuracy_per_step/3"]) == len(losses)
    assert len(tags["forward_seconds"]) == len(losses) and len(tags["eval_acceptance_length"]) == 3
    assert any((tmp_path / "trackio").rglob("*.db"))


@pytest.mark.slow
def test_a_tracker_that_does_not_start_warns_and_the_others_go_on(synthetic_run, changed, offline, capsys):
    """Its folder cannot be made: a file is in the way."""
    config = changed(synthetic_run, train={"trackers": ["tensorboard", "wandb"]})
    root = RunFolder.of(config).root
    (root / "draftsmith-test").write_text("in the way")
    train(config)
    said = " ".join(capsys.readouterr().out.split())
    assert "warning: tracker tensorboard did not start" in said and "metrics.jsonl is still written" in said
    assert "tracker wandb" not in said and list((root / "wandb").glob("offline-run-*/*.wandb"))
    assert len(logged_losses(config)) == 11 and final_checkpoint(RunFolder.of(config), "test")


@pytest.mark.slow
def test_a_tracker_that_fails_on_the_way_is_dropped(synthetic_run, changed, offline, capsys, monkeypatch):
    from accelerate.tracking import TensorBoardTracker

    log = TensorBoardTracker.log

    def log_or_fail(self, values, step=None, **rest):
        if step == 4:
            raise OSError("the disk of the log is gone")
        log(self, values, step=step, **rest)

    monkeypatch.setattr(TensorBoardTracker, "log", log_or_fail)
    config = changed(synthetic_run, train={"trackers": ["tensorboard"]})
    train(config)
    assert capsys.readouterr().out.count("warning: tracker tensorboard failed (the disk of the log is gone)") == 1
    assert len(logged_losses(config)) == 11
