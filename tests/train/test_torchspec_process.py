"""Starting, following, ending and going on: real processes, with a script in the place of TorchSpec's driver.

The script (torchspec_driver.py) trains nothing; it prints TorchSpec's lines and starts children that nobody's group
holds, as Ray's and vLLM's are.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp

from draftsmith.core.checkpoint import build_objective, read_checkpoint
from draftsmith.core.config_io import dump_config
from draftsmith.core.errors import StageFailed, UserError
from draftsmith.core.run import RunFolder
from draftsmith.core.target_weights import load_target_weights
from draftsmith.export.stage import export
from draftsmith.train.dry_run import dry_run
from draftsmith.train.stage import train
from draftsmith.train.torchspec import entry
from draftsmith.train.torchspec.launch import _MARK
from draftsmith.train.torchspec.plan import make_plan

DRIVER = Path(__file__).with_name("torchspec_driver.py")
TOTAL = 10  # 20 samples, 4 a step, 2 epochs
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def run(synthetic_run, changed, monkeypatch, tmp_path):
    """`run("dies")`: a config whose TorchSpec is the script, in that mode; checkpoints of three steps lie ready."""
    theirs = {"micro_batch_size": 4, "stall_seconds": 60.0, "stop_seconds": 2.0}

    def make(mode, **torchspec):
        config = changed(synthetic_run, train={"engine": "torchspec", "torchspec": {**theirs, **torchspec}})
        if not (tmp_path / "ready").exists():
            for step in (4, 8, 10):
                lay_ready(tmp_path / "ready", make_plan(config), step)
        monkeypatch.setattr(entry, "__file__", str(DRIVER))
        monkeypatch.setenv("PYTHONPATH", str(installed(tmp_path / "site")), prepend=os.pathsep)
        for name, value in (("MODE", mode), ("READY", str(tmp_path / "ready")), ("TOTAL", str(TOTAL))):
            monkeypatch.setenv(f"DRIVER_{name}", value)
        return config

    yield make
    for process in marked():
        process.kill()


def installed(site, torchspec=True, vllm="0.31.0"):
    """A folder for PYTHONPATH in which TorchSpec and a vLLM are found; neither is ever imported."""
    site.mkdir(exist_ok=True)
    if torchspec:
        (site / "torchspec").mkdir(exist_ok=True)
        for name in ("__init__.py", "train_entry.py"):
            (site / "torchspec" / name).write_text("raise RuntimeError('imported')\n" if name[0] != "_" else "")
    (site / f"vllm-{vllm}.dist-info").mkdir(exist_ok=True)
    (site / f"vllm-{vllm}.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {vllm}\n")
    return site


def lay_ready(folder, plan, step):
    """A checkpoint in TorchSpec's layout, of random weights that the step decides."""
    torch.manual_seed(step)
    draft = build_objective(plan.target, plan.shape, torch.from_numpy(plan.mapping.target_ids), "rms").draft
    tensors = {**draft.state_dict(), "embed_tokens.weight": load_target_weights(plan.target).embed_VH}
    model = {f"draft_model.{name}": t.to(torch.bfloat16) for name, t in tensors.items()}
    model |= {
        "draft_model.d2t": torch.from_numpy(plan.mapping.d2t),
        "draft_model.t2d": torch.from_numpy(plan.mapping.t2d),
    }
    path = folder / f"iter_{step + 1:07d}"
    parts = {
        "model": {"model_state": {"model": model}},
        "optimizer": {"optim_state": {"fp32_params": {"0": torch.zeros(3)}}},
        "lr_scheduler": {"lr_scheduler_state": {"lr_scheduler": {"num_steps": step}}},
    }
    for part, state in parts.items():
        (path / part).mkdir(parents=True)
        dcp.save(state, checkpoint_id=str(path / part), no_dist=True)
    torch.save({}, path / "rng.pt")
    (path / "meta.json").write_text(json.dumps({"global_step": step, "iteration": step + 1}))


def marked():
    """Live processes that a job of ours has started."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and _MARK in process.environ():
                found.append(process)
        except psutil.Error:
            continue
    return found


def until(condition, seconds=30.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to be"
        time.sleep(0.1)


def metrics_of(config):
    return [json.loads(line) for line in RunFolder.of(config).metrics.read_text().splitlines()]


@pytest.mark.parametrize(
    ("there", "said"),
    [
        ({"torchspec": False}, r"TorchSpec is not installed for .*pip install -r requirements/torchspec\.txt"),
        ({"vllm": "0.32.0"}, r"from 0\.18 to below 0\.32, and this is 0\.32\.0 .*train\.torchspec\.backend=sglang"),
    ],
)
def test_what_is_not_installed_is_said_before_anything_is_written(run, there, said, tmp_path, monkeypatch, capsys):
    config = run("")
    monkeypatch.setenv("PYTHONPATH", str(installed(tmp_path / "other", **there)))
    with pytest.raises(UserError, match=said):
        train(config)
    assert not RunFolder.of(config).torchspec.exists()
    dry_run(config)
    assert re.search(f"# does not fit: .*{said}", capsys.readouterr().out)


def test_a_python_that_is_not_there_is_said(run):
    with pytest.raises(UserError, match=r"/nonexistent/python cannot be run .*Check train\.torchspec\.python"):
        train(run("", python="/nonexistent/python"))


def test_a_training_to_its_end(run, capsys):
    config = run("")
    train(config)
    folder = RunFolder.of(config)
    taken = read_checkpoint(folder.complete_checkpoints()[-1])
    assert taken.folder.name == "step-0000010" and taken.state["step"] == taken.state["total_steps"] == TOTAL
    ready = dcp.FileSystemReader(str(Path(os.environ["DRIVER_READY"]) / "iter_0000011" / "model"))
    name = "model_state.model.draft_model.fc.weight"
    whole = {name: torch.empty(ready.read_metadata().state_dict_metadata[name].size, dtype=torch.bfloat16)}
    dcp.load(whole, storage_reader=ready, no_dist=True)
    assert torch.equal(taken.tensors["fc.weight"], whole[name].float())
    rows = metrics_of(config)
    assert [r["step"] for r in rows if "loss" in r] == list(range(1, TOTAL + 1))
    assert rows[0]["loss"] == pytest.approx(3.0 * (1 + 0.8 + 0.64)) and rows[0]["loss_per_step"] == [3.0] * 3
    assert rows[0]["grad_norm"] is None and rows[0]["learning_rate"] == 1e-3
    assert [r["eval_loss"] for r in rows if "eval_loss" in r] == [4.1] * 3
    assert not marked()
    said = capsys.readouterr().out
    assert "10/10 steps" in said and re.search(r"saved \S+iter_0000011", said)
    export(config)  # the stages after it go on as after any other engine
    proof = json.loads((folder.export / "verification.json").read_text())
    assert proof["passed"] and (folder.export / "model.safetensors").is_file()
    train(config)  # nothing is started again
    assert "already there" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("dies", r"ended with code 1 at step 5: RuntimeError: Inference engine failed: out of memory; its messages"),
        ("tokenises", "not with our token ids"),
        ("unloaded", "without having loaded the draft"),
        ("no norm", "goes on without what it was told to load: Failed to load verifier norm"),
        ("stalls", r"made no step for 1 s \(step 0\)"),
    ],
)
def test_what_ends_it(run, mode, said):
    config = run(mode, stall_seconds=1.0 if mode == "stalls" else 60.0)
    with pytest.raises(StageFailed, match=said):
        train(config)
    assert not marked()


def test_it_goes_on_from_its_newest_whole_checkpoint(run, capsys):
    config = run("dies")
    with pytest.raises(StageFailed, match="at step 5"):
        train(config)
    checkpoints = RunFolder.of(config).torchspec / "output" / "checkpoints"
    cut = checkpoints / "iter_0000006"  # a save that was killed, and its name already in the tracker
    (cut / "model").mkdir(parents=True)
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("6")
    run("")
    train(config)
    assert "goes on from step 4 of 10" in capsys.readouterr().out
    rows = [r["step"] for r in metrics_of(config) if "loss" in r]
    assert rows == list(range(1, TOTAL + 1))  # steps 5 on were logged again, once
    assert read_checkpoint(RunFolder.of(config).complete_checkpoints()[-1]).state["step"] == TOTAL


def test_other_settings_are_refused_until_fresh(run, changed):
    config = run("dies")
    with pytest.raises(StageFailed):
        train(config)
    with pytest.raises(UserError, match="learning_rate"):
        train(changed(config, train={"learning_rate": 5e-4}))


def test_one_that_hangs_when_it_is_done_is_ended(run):
    config = run("hangs at the end")
    train(config)
    assert not marked() and RunFolder.of(config).complete_checkpoints()


def background(config, tmp_path):
    """`train` in a process of its own."""
    file = tmp_path / "background.yaml"
    file.write_text(dump_config(config))
    code = (
        "import sys\nfrom pathlib import Path\nfrom draftsmith.core.config_io import load_config\n"
        "from draftsmith.train.torchspec import entry\nfrom draftsmith.train.stage import train\n"
        f"entry.__file__ = {str(DRIVER)!r}\ntrain(load_config(Path({str(file)!r})))\n"
    )
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def at_step_5(config):
    def reached():
        file = RunFolder.of(config).metrics
        return file.is_file() and '"step": 5' in file.read_text() and len(marked()) >= 3

    return reached


@pytest.mark.parametrize("mode", ["waits", "deaf"])
def test_sigterm_ends_all_and_keeps_what_is_whole(run, tmp_path, mode):
    config = run(mode)
    process = background(config, tmp_path)
    until(at_step_5(config))
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 0 and "step 4 of 10 is saved" in said
    assert not marked()
    [taken] = RunFolder.of(config).complete_checkpoints()
    assert taken.name == "step-0000004"


def test_a_killed_draftsmith_takes_everything_along(run, tmp_path):
    config = run("deaf")
    process = background(config, tmp_path)
    until(at_step_5(config))
    assert len(marked()) >= 3  # the driver and two generations of children, each in a session of its own
    process.kill()
    process.wait()
    until(lambda: not marked(), 15.0)
