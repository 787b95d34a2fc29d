"""Capture on real engines: in chunks, on two at once with one killed, on Ray, by a server; always the same states."""

import json
import shlex
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.core.manifest import write_manifest
from draftsmith.core.samples import Sample, write_samples
from draftsmith.hidden_state_capture.reader import HiddenStateStore

pytestmark = pytest.mark.vllm
STAGE = (
    "import sys; from draftsmith.core.config_io import load_config; from draftsmith.core.errors import StageFailed\n"
    "from draftsmith.hidden_state_capture.stage import capture\n"
    "try: capture(load_config(sys.argv[1], sys.argv[2:]))\n"
    "except StageFailed as error: sys.exit(f'failed: {error}')"
)
COUNT = 60


@pytest.fixture(scope="module")
def target(tmp_path_factory, tiny_target):
    """A random Llama whose heads vLLM's CPU attention takes, with the tiny target's tokenizer."""
    folder = tmp_path_factory.mktemp("capture") / "tiny"
    config = LlamaConfig(
        num_hidden_layers=6, hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, vocab_size=512, max_position_embeddings=512, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=1, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.lm_head.weight.data *= 10  # else near-ties decide what the greedy token is
    model.save_pretrained(folder)
    for file in tiny_target.glob("*token*.json"):
        shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def prepared(target):
    """`prepared(name)`: config file and folder of a run of its own; all have the same samples."""
    draw = torch.Generator().manual_seed(1)
    samples = []
    for i in range(COUNT):
        tokens = int(torch.randint(20, 200, (), generator=draw))
        ids = torch.randint(2, 512, (tokens,), generator=draw).tolist()
        samples.append(Sample(f"s{i:02d}", ids, [(tokens // 2, tokens)], "random", "stop", "train"))

    def make(name, **capture):
        run = target.parent / name
        run.mkdir()
        (run / "samples").mkdir()
        write_samples(run / "samples", samples)
        write_manifest(run / "samples", "prepare", {}, {})
        sections = {
            "run": {"name": name, "dir": str(target.parent)},
            "target": {"path": str(target), "dtype": "float32"},
            "data": {"max_length": 256, "sampling": {"max_tokens": 16}},
            "capture": {"shard_bytes": 200_000, **capture},
        }
        file = target.parent / f"{name}.yaml"
        file.write_text(json.dumps(sections))
        return file, run

    return make


def stage(file, *overrides, check=True):
    done = subprocess.run(
        [sys.executable, "-c", STAGE, str(file), *overrides], capture_output=True, text=True, timeout=400
    )
    assert not check or done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done


def states(run):
    """sample_id -> its ids and states."""
    found = {s.sample_id: s for s in HiddenStateStore(run / "hidden_states")}
    assert sorted(found) == [f"s{i:02d}" for i in range(COUNT)]
    return found


@pytest.fixture(scope="module")
def one_by_one(prepared):
    """Every prompt alone, in one piece."""
    file, run = prepared("alone", max_num_seqs=1)
    stage(file)
    return states(run)


def assert_alike(run, one_by_one):
    for sample_id, mine in states(run).items():
        theirs = one_by_one[sample_id]
        assert torch.equal(mine.input_ids_T, theirs.input_ids_T) and torch.equal(mine.last_rows_M, theirs.last_rows_M)
        for a, b in ((mine.aux_states_TAH, theirs.aux_states_TAH), (mine.last_states_MH, theirs.last_states_MH)):
            error = (a.float() - b.float()).norm(dim=-1) / b.float().norm(dim=-1)
            assert error.max() < 0.01, sample_id  # bfloat16 on disk


def test_many_in_chunks_on_two_engines_one_of_them_killed(prepared, one_by_one, left_engines):
    file, run = prepared("chunks", max_batched_tokens=64, max_num_seqs=8, data_parallel=2)
    process = subprocess.Popen([sys.executable, "-c", STAGE, str(file)], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 300
    while not list((run / "hidden_states").glob("shard-*.json")):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.01)
    engines = [p for p in psutil.Process(process.pid).children() if "spawn_main" in " ".join(p.cmdline())]
    assert len(engines) == 2
    engines[0].send_signal(signal.SIGKILL)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 1 and "died without a message" in said
    while left_engines() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left_engines() and not (run / "hidden_states" / "manifest.json").exists()
    assert "of an earlier run are on disk" in stage(file).stdout
    assert_alike(run, one_by_one)


def test_actors_of_a_ray_cluster_capture_the_same(prepared, one_by_one):
    pytest.importorskip("ray", reason="Ray is not installed (pip install 'draftsmith[ray]')")
    file, run = prepared("ray", launcher="ray", data_parallel=2)
    stage(file)
    assert_alike(run, one_by_one)


def test_a_server_of_the_users_captures_the_same(prepared, one_by_one, cli, target, serving, free_port):
    file, run = prepared("served", server=f"http://127.0.0.1:{free_port}", seal_after=1.0)
    printed = shlex.split(cli("capture", "serve-args", "--config", file).stdout)
    assert printed[:3] == ["vllm", "serve", str(target)]
    with serving(target.parent / "server.log", "--model", *printed[2:], cache_gib=1, port=free_port):
        stage(file)
    assert_alike(run, one_by_one)
