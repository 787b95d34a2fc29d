"""`make train` on several processes and several hosts."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from draftsmith.core.checkpoint import final_checkpoint, read_checkpoint
from draftsmith.core.config_io import dump_config
from draftsmith.core.run import RunFolder

ROOT = Path(__file__).parents[2]


def make(*settings, **environment):
    command = ["make", "-C", str(ROOT), "--no-print-directory", "NO_SETUP=1", f"PYTHON_GPU={sys.executable}", "train"]
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    env |= {"OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen([*command, *settings], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process, code=0):
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, out[-2000:] + err[-4000:]
    return out, err


def file_of(config, folder):
    path = folder / f"{config.run.name}.yaml"
    path.write_text(dump_config(config))
    return f"CONFIG={path}"


@pytest.mark.slow
def test_make_train_starts_as_many_processes_as_it_is_told(place, tmp_path):
    config = place("make-two", epochs=2, eval_interval=100, save_interval=100)
    options = "train.shard=fsdp2 train.log_interval=3 train.trackers=[tensorboard] train.profile_steps=[2,3]"
    out, _ = ended(make("NPROC=2", file_of(config, tmp_path), f"ARGS={options}"))
    assert "draft: 6 steps" in out and out.count("train: 6/6 steps") == 1
    root = RunFolder.of(config).root
    assert len(list((root / "draftsmith-make-two").glob("events*"))) == 1
    assert sorted(p.name for p in (root / "profile").glob("*.gz")) == ["rank-0.json.gz", "rank-1.json.gz"]
    assert read_checkpoint(final_checkpoint(RunFolder.of(config), "test")).state["batches_per_step"] == 2


@pytest.mark.slow
def test_what_all_processes_refuse_is_said_once(place, tmp_path):
    file = file_of(place("make-wrong"), tmp_path)
    _, err = ended(make("NPROC=2", file, "ARGS=train.init_from=/nonexistent"), code=2)
    assert err.count("error:") == 1 and "/nonexistent" in err and "Traceback" not in err and "Error 2" in err


@pytest.mark.slow
@pytest.mark.parametrize("fails", [0, 1])
def test_what_one_process_alone_meets_is_said_once_with_its_number(place, tmp_path, fails):
    """Its host's disk lacks a shard that the other's has."""
    config = place(f"one-fails-{fails}", epochs=2)
    there = tmp_path / "there" / config.run.name
    shutil.copytree(RunFolder.of(config).root, there)
    for shard in (there / "hidden_states").glob("shard-*.safetensors"):
        shard.unlink()
    files = [tmp_path / f"{rank}.yaml" for rank in range(2)]
    tree = config.model_copy(update={"run": config.run.model_copy(update={"dir": str(there.parent)})})
    for rank, file in enumerate(files):
        file.write_text(dump_config(tree if rank == fails else config))
    script = tmp_path / "by_rank.py"
    script.write_text(
        "import os, sys\nfrom draftsmith.core.cli import main\n"
        f"sys.argv = ['draftsmith', 'train', '--config', r'{tmp_path}/' + os.environ['RANK'] + '.yaml']\nmain()\n"
    )
    command = [sys.executable, "-m", "draftsmith.train.launch", "--standalone", "--nproc-per-node", "2", script]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode in (1, 2), done.stderr
    said = [line for line in done.stderr.splitlines() if "error:" in line or "failed:" in line]
    assert len(said) == 1 and said[0].startswith(f"process {fails}: ") and "shard-" in said[0], done.stderr
    assert "Traceback" not in done.stderr and "is gone" not in done.stderr


@pytest.mark.parametrize("number", ["0", "-1", "two"])
def test_a_number_of_processes_that_is_none_is_named(place, tmp_path, number):
    _, err = ended(make(f"NPROC={number}", file_of(place("make-none"), tmp_path)), code=2)
    assert f"NPROC is {number}" in err and "Traceback" not in err


@pytest.mark.slow
@pytest.mark.parametrize("which", ["launcher", "process"])
def test_a_killed_launcher_or_process_leaves_nothing_behind(place, tmp_path, which):
    config = place(f"make-killed-{which}", epochs=2000, eval_interval=10**6, save_interval=10**6)
    process, run = make("NPROC=2", file_of(config, tmp_path), "ARGS=train.log_interval=1"), RunFolder.of(config)
    deadline = time.monotonic() + 120
    while not (run.metrics.is_file() and run.metrics.read_text().count("tokens_per_second") > 2):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.2)
    children = psutil.Process(process.pid).children(recursive=True)
    [launcher] = [p for p in children if "draftsmith.train.launch" in p.cmdline()]
    ranks = [p for p in launcher.children() if "draftsmith" in p.cmdline()]
    assert len(ranks) == 2
    (launcher if which == "launcher" else ranks[1]).kill()
    _, err = ended(process, code=2)
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert not alive
    if which == "launcher":
        assert run.complete_checkpoints()  # the kernel told them, and they saved
    else:
        assert "process 1 was ended by SIGKILL" in err and "is gone" not in err
        assert "Traceback" not in err, err


@pytest.mark.slow
def test_the_same_command_on_two_hosts_makes_one_training(place, tmp_path):
    config = place("make-hosts", epochs=2, eval_interval=100, save_interval=100)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    file, where = file_of(config, tmp_path), {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    hosts = [make(file, **where, NODE_RANK=str(rank)) for rank in range(2)]
    outs = [ended(host)[0] for host in hosts]
    assert "draft: 6 steps" in outs[0] and "draft:" not in outs[1]
    assert read_checkpoint(final_checkpoint(RunFolder.of(config), "test")).state["batches_per_step"] == 2


@pytest.mark.slow
def test_a_schedulers_signals_reach_every_process_and_the_launcher_ends_with_them(place, tmp_path):
    """SIGUSR1 saves and goes on; SIGTERM saves, and the launcher's code is 0: torchrun alone would fail."""
    config = place("launched", epochs=500, eval_interval=10**6, save_interval=10**6)
    file = file_of(config, tmp_path).removeprefix("CONFIG=")
    command = [sys.executable, "-m", "draftsmith.train.launch", "--standalone", "--nproc-per-node", "2"]
    launched = subprocess.Popen(
        [*command, "-m", "draftsmith", "train", "--config", file],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    run = RunFolder.of(config)
    try:
        wait_for(lambda: run.metrics.is_file() and run.metrics.read_text().count("\n") > 3, launched)
        launched.send_signal(signal.SIGUSR1)
        wait_for(run.complete_checkpoints, launched)
        first = run.complete_checkpoints()[0]
        seen = run.metrics.read_text().count("\n")
        wait_for(lambda: run.metrics.read_text().count("\n") > seen + 3, launched)
        launched.send_signal(signal.SIGTERM)
        out, _ = ended(launched)
    finally:
        launched.kill()
    steps = [int(p.name.removeprefix("step-")) for p in run.complete_checkpoints()]
    assert steps[0] == int(first.name.removeprefix("step-")) < steps[1] < 1501
    assert f"stopped by SIGTERM at step {steps[1]} of 1501" in " ".join(out.split())


def wait_for(what, process):
    end = time.monotonic() + 120
    while not what():
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.02)


@pytest.mark.slow
def test_hosts_that_share_no_run_folder_do_not_train_apart(place, ranks, tmp_path, changed):
    """R2: one would go on from its checkpoint, and the other begin."""
    config = place("apart", epochs=2, eval_interval=100, save_interval=100, grad_accum_steps=2)
    there = tmp_path / "there"
    shutil.copytree(RunFolder.of(config).root, there / config.run.name)
    ranks(1, {"config": config, "term": 2})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    where = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    hosts = []
    for rank, folder in enumerate((RunFolder.of(config).root.parent, there)):
        one = changed(config, run={"dir": str(folder)}, train={"grad_accum_steps": 1})
        path = tmp_path / f"host-{rank}.yaml"
        path.write_text(dump_config(one))
        hosts.append(make(f"CONFIG={path}", **where, NODE_RANK=str(rank)))
    for host in hosts:
        _, err = ended(host, code=2)
        assert "the processes see different checkpoints" in err and "step-0000003, None" in err
        assert "a folder that all hosts share" in err


def test_hosts_that_do_not_know_each_other_are_told_what_is_missing(tmp_path):
    _, err = ended(make("CONFIG=none.yaml", NNODES="2"), code=2)
    assert "NNODES is 2: set NODE_RANK (0 to NNODES - 1) and MASTER_ADDR" in err


def test_one_process_is_not_launched_by_torchrun():
    out, _ = ended(make("-n", "CONFIG=some.yaml"))
    assert "-m draftsmith train --config some.yaml" in out and "draftsmith.train.launch" not in out
