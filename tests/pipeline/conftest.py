"""Whole runs on real vLLM, made once a session and looked at by many tests."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

DRAFTSMITH = [sys.executable, "-m", "draftsmith.core.cli"]


def draftsmith(*args, check=True):
    """Run the CLI in a process of its own, as a user does."""
    done = subprocess.run([*DRAFTSMITH, *map(str, args)], capture_output=True, text=True, timeout=800)
    if check and done.returncode:
        said = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        pytest.fail(f"draftsmith {' '.join(map(str, args))} exited {done.returncode}:\n{said}")
    return done


def engine_processes():
    """Processes of ours that a stage may have left behind."""
    left = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        if process.info["status"] != psutil.STATUS_ZOMBIE and (
            "spawn_main" in line or "VLLM::" in line or "while kill -0" in line
        ):
            left.append(line)
    return left


@pytest.fixture
def free_port():
    return unused_port()


def unused_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def vllm_server(log, *arguments, cache_gib=2, port=None):
    """vLLM's own server on the CPU with these arguments; yields its URL once it answers. What it says goes to `log`."""
    port = port or unused_port()
    command = [sys.executable, str(Path(__file__).with_name("vllm_server.py")), *arguments]
    command += ["--port", str(port), "--enforce-eager"]
    env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": str(cache_gib)}
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=env, start_new_session=True)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 300
    try:
        while True:
            try:
                urllib.request.urlopen(f"{url}/v1/models", timeout=5).read()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
                time.sleep(0.5)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="session")
def serving():
    return vllm_server


@pytest.fixture(scope="session")
def cli():
    return draftsmith


@pytest.fixture(scope="session")
def left_engines():
    return engine_processes


@pytest.fixture(scope="session")
def smollm_run(tmp_path_factory):
    """prepare .. export on the embedded target with 40 prompts; `root` is the run, `config` its YAML."""
    folder = tmp_path_factory.mktemp("smollm")
    config = folder / "config.yaml"
    config.write_text(
        f"""
run: {{name: small, dir: {folder}}}
target: {{dtype: float32}}  # in bfloat16 a greedy reply depends on what else is in its batch
data:
  sources: [{{path: demo-prompts, limit: 40}}]
  sampling: {{max_tokens: 48}}
  max_length: 256
  eval_share: 0.3
  draft_vocab_size: 1024
capture: {{shard_bytes: 4000000}}
draft: {{fc_norm: true, norm_output: true}}
train: {{ttt_steps: 3, tokens_per_batch: 512, epochs: 8, learning_rate: 1.0e-3, eval_interval: 20, save_interval: 20}}
eval: {{concurrency: [4]}}
"""
    )
    for stage in ("capture", "train", "eval", "export"):  # capture prepares, eval exports
        draftsmith(stage, "--config", config)
        assert not engine_processes(), f"{stage} left a process behind"
    return {"root": folder / "small", "config": config}


@pytest.fixture(scope="session")
def report(smollm_run):
    return json.loads(Path(smollm_run["root"], "eval", "report.json").read_text())
