"""Replies from a real engine, from a real vLLM server, and from an engine that was killed on the way: the same rows."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from draftsmith.core.embedded import embedded_checkpoint
from draftsmith.core.samples import read_samples

pytestmark = pytest.mark.vllm

TALKS = [
    {"id": str(i), "turns": [f"Name {i + 2} {kind}.", "And why?"]}
    for i, kind in enumerate(["animals", "rivers", "colours", "towns", "tools", "dishes"])
]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """`config(name, **data)`: a config file; all runs have the same prompts."""
    folder = tmp_path_factory.mktemp("regeneration")
    source = folder / "talks.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in TALKS))

    def write(name, **data):
        sections = {
            "run": {"name": name, "dir": str(folder / "runs")},
            "target": {"dtype": "float32"},  # in bfloat16 a reply depends on what else is in its batch
            "data": {
                "sources": [{"path": str(source)}], "sampling": {"max_tokens": 24}, "max_length": 192,
                "draft_vocab_size": 512, "dedup": {"near": False}, **data,
            },
        }  # fmt: skip
        file = folder / f"{name}.yaml"
        file.write_text(json.dumps(sections))  # JSON is YAML
        return file, folder / "runs" / name

    return write


@pytest.fixture(scope="module")
def whole(config, cli):
    file, run = config("whole")
    cli("prepare", "--config", file)
    return read_samples(run / "samples")


def test_every_turn_is_answered_or_listed_as_cut_off(whole, config):
    replies = {str(i): 0 for i in range(len(TALKS))}
    for sample in whole:
        replies[sample.conversation_id] += len(sample.loss_spans)
    listed = (config("whole")[1] / "samples" / "skipped.jsonl").read_text().splitlines()
    cut = sum(json.loads(line)["reason"] == "after_length_cut" for line in listed)
    assert min(replies.values()) >= 1 and sum(replies.values()) == 2 * len(TALKS) - cut
    assert {s.author for s in whole} == {"target"}


def test_a_killed_prepare_goes_on_and_ends_with_the_same_samples(config, cli, whole, left_engines):
    file, run = config("killed")
    command = [sys.executable, "-m", "draftsmith.core.cli", "prepare", "--config", str(file)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    journal, deadline = run / "journal", time.monotonic() + 300
    while process.poll() is None and time.monotonic() < deadline:
        written = [line for f in journal.rglob("replies.jsonl") for line in f.read_bytes().splitlines()]
        if len(written) >= 2:
            break
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (run / "samples").exists() and written
    while left_engines() and time.monotonic() < deadline:
        time.sleep(0.5)
    said = cli("prepare", "--config", file).stdout
    assert "are there already" in said
    assert read_samples(run / "samples") == whole
    assert not journal.exists()


def test_replies_are_drawn_where_prompts_fill_more_than_one_batch(config, cli, tmp_path):
    # Cut in parts, a prompt with a seed of its own ended vLLM's CPU engine.
    source = tmp_path / "long.jsonl"
    rows = [{"id": str(i), "prompt": f"{i}. " + "Name some animals and rivers. " * 20} for i in range(48)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sampling = {"temperature": 0.7, "max_tokens": 4}
    dedup = {"near": False, "exact": False}
    file, run = config("drawn", sources=[{"path": str(source)}], sampling=sampling, dedup=dedup)
    cli("prepare", "--config", file)
    samples = read_samples(run / "samples")
    assert len(samples) == 48 and sum(s.loss_spans[0][0] for s in samples) > 4096


@pytest.fixture(scope="module")
def server(serving, tmp_path_factory):
    """URL of vLLM's own OpenAI server on the same target."""
    with serving(
        tmp_path_factory.mktemp("server") / "log",
        "--model", str(embedded_checkpoint()), "--dtype", "float32",
        "--max-model-len", "192",
    ) as url:  # fmt: skip
        yield url


def test_a_running_server_writes_the_same_samples(config, cli, whole, server):
    file, run = config("served", server={"url": server, "concurrency": 4})
    cli("prepare", "--config", file)
    mine = read_samples(run / "samples")
    assert [s.sample_id for s in mine] == [s.sample_id for s in whole]
    same = sum(a.input_ids == b.input_ids for a, b in zip(mine, whole, strict=True))
    assert same >= len(whole) - 1  # another batch may turn a near-tie
