"""A run for spool mode, and what tests compare of trainings."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import spool_sides

from draftsmith.core.checkpoint import final_checkpoint
from draftsmith.core.config import Config
from draftsmith.core.config_io import dump_config, load_config
from draftsmith.core.run import RunFolder
from draftsmith.core.samples import TrainSamples, read_samples
from draftsmith.core.target import resolve_layer_ids, resolve_target
from draftsmith.data.batching import spool_plan
from draftsmith.hidden_state_capture.finish import Captured, finish
from draftsmith.hidden_state_capture.reader import HiddenStateStore
from draftsmith.hidden_state_capture.stage import capture_inputs, heads_to_store
from draftsmith.hidden_state_capture.writer import SampleStates, ShardWriter, WriterConfig

# A step has about 26,000 bytes: three shards fit, of a step each.
SPOOL = {"mode": "spool", "spool_bytes": 100_000, "spool_capture": "own", "shard_bytes": 16 * 1024}
CLOCK = ("time", "tokens_per_second", "_seconds", "spool_bytes", "spool_peak_bytes")


@pytest.fixture
def spool_run(synthetic_run, recaptured):
    """A prepared run whose held-out samples are captured for spool mode, without vLLM."""
    return recaptured(synthetic_run, **SPOOL)


@pytest.fixture
def recaptured(changed):
    """`recaptured(config, storage="fp8")`: the run with other capture settings, captured anew without vLLM."""

    def make(config, **settings):
        return _capture(changed(config, capture=settings))

    return make


def _capture(config):
    run, target = RunFolder.of(config), resolve_target(config.target)
    shutil.rmtree(run.hidden_states)
    heads, layer_ids = heads_to_store(config), resolve_layer_ids(config.capture, target.num_layers)
    sizes = config.capture.shard_bytes, config.capture.pending_bytes, config.capture.storage
    writer = ShardWriter(run.hidden_states, WriterConfig(*sizes))
    wanted = {h.sample_id for h in heads}
    for s in (s for s in read_samples(run.samples) if s.sample_id in wanted):
        states = spool_sides.drawn_states(int(s.sample_id[2:5]), len(s.input_ids))
        writer.put(SampleStates(s.sample_id, s.input_ids, [list(x) for x in s.loss_spans], states, ready=bool))
    writer.flush()
    probe = {"norm_form": "rms", "eps": 1e-6, "argmax_agreement": 1.0, "positions": 8, "state_errors": None}
    (run.hidden_states / "probe.json").write_text(json.dumps(probe))
    inputs = capture_inputs(config, target, layer_ids, run)
    finish(Captured(config, target, layer_ids, heads, [], inputs, run.hidden_states))
    return config


@pytest.fixture
def from_store(_trained_run, synthetic_run, changed):
    """The same training from the store, without a stop."""
    return changed(synthetic_run, run={"dir": str(_trained_run / "runs")})


@pytest.fixture(scope="session")
def logged():
    """`logged(config)`: the rows of metrics.jsonl."""

    def read(config):
        return [json.loads(line) for line in RunFolder.of(config).metrics.read_text().splitlines()]

    return read


@pytest.fixture(scope="session")
def figures(logged):
    """`figures(config)`: what was logged, without what the clock and the spool decide."""

    def read(config):
        return [{k: v for k, v in row.items() if not k.endswith(CLOCK)} for row in logged(config)]

    return read


@pytest.fixture(scope="session")
def weights():
    """`weights(config)`: bytes of the final draft."""

    def read(config):
        return (final_checkpoint(RunFolder.of(config), "test") / "draft.safetensors").read_bytes()

    return read


@pytest.fixture(scope="session")
def plan_of():
    """`plan_of(config)`: of its spool."""

    def make(config, world_size=1):
        run = RunFolder.of(config)
        states = HiddenStateStore(run.hidden_states).manifest
        return spool_plan(TrainSamples(run.samples), config, states, world_size)

    return make


@pytest.fixture(scope="session")
def place(tmp_path_factory, _built_run):
    """`place("name", ema_decay=0.9)`: a captured run of its own with these settings of `train`, in float32."""
    folder = tmp_path_factory.mktemp("placed")
    built = _built_run / "runs" / "test"

    def make(name, **settings):
        if not (folder / name).exists():
            shutil.copytree(built, folder / name)
        tree = load_config(built / "config.yaml").model_dump()
        tree["run"] |= {"dir": str(folder), "name": name}
        tree["train"] |= {"precision": "float32", **settings}
        return Config.model_validate(tree)

    return make


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    """`ranks(2, {"config": config, "term": 5}, ...)`: train on so many processes, one job after another (ranks.py)."""
    folder = tmp_path_factory.mktemp("jobs")

    def run(processes, *jobs, dies=False):
        told = []
        for i, job in enumerate(jobs):
            file = folder / f"{len(list(folder.iterdir()))}-{i}.yaml"
            file.write_text(dump_config(job["config"]))
            told.append({**job, "config": str(file)})
        many = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command = [*(many if processes > 1 else []), str(Path(__file__).parent / "ranks.py"), json.dumps(told)]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=600)
        assert (done.returncode != 0) == dies, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout

    return run
