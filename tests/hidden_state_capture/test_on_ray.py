"""Work handed out to real Ray actors that write real shards; one is killed, and nothing is lost or there twice."""

import dataclasses
import os
import signal
import time

import pytest
import torch

from draftsmith.core.errors import StageFailed
from draftsmith.core.run import RunFolder
from draftsmith.core.samples import Sample, write_samples
from draftsmith.core.target import resolve_target
from draftsmith.hidden_state_capture import on_ray
from draftsmith.hidden_state_capture.driver import Job
from draftsmith.hidden_state_capture.shard import committed_shards
from draftsmith.hidden_state_capture.todo import Head, read_heads
from draftsmith.hidden_state_capture.writer import SampleStates, ShardWriter, WriterConfig

ray = pytest.importorskip("ray", reason="Ray is not installed (pip install 'draftsmith[ray]')")
pytestmark = pytest.mark.slow
SAMPLES = 120


class Writer:
    """As `Capturer`, states made up in place of an engine's."""

    def __init__(self, job: Job, index: int) -> None:
        self.folder, self.index = job.folder, index
        self.writer = ShardWriter(job.folder, WriterConfig(3000, 1 << 20, first=job.first + index, step=job.engines))
        (job.folder.parent / f"pid-{index}").write_text(str(os.getpid()))

    def probe(self) -> None:
        """There is nothing to probe."""

    def capture(self, samples: list[Sample]) -> int:
        for s in samples:
            states = torch.full((len(s.input_ids), 4, 16), 1.0 + s.input_ids[0], dtype=torch.bfloat16)
            self.writer.put(SampleStates(s.sample_id, s.input_ids, [[1, 3]], states, bool))
            time.sleep(0.01)
        (self.folder.parent / f"did-{self.index}").touch()
        return len(samples)

    def flush(self) -> None:
        self.writer.flush()

    def close(self) -> None:
        pass


class Suicidal(Writer):
    """The second actor ends itself after its first chunk, some of it uncommitted."""

    def capture(self, samples: list[Sample]) -> int:
        count = super().capture(samples)
        if self.index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return count


class Dead(Writer):
    def capture(self, samples: list[Sample]) -> int:
        os._exit(1)


class Failing(Writer):
    def flush(self) -> None:
        raise StageFailed("the probe disagrees")


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """Ray on this host; the capture joins it, and leaves it running."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    yield
    ray.shutdown()


@pytest.fixture
def job(make_config, tmp_path, monkeypatch):
    monkeypatch.setattr(on_ray, "_CHUNK_STEPS", 1)
    config = make_config(capture={"data_parallel": 2, "launcher": "ray", "max_batched_tokens": 40})
    run, target = RunFolder.of(config), resolve_target(config.target)
    run.root.mkdir(parents=True)
    run.samples.mkdir()
    write_samples(run.samples, rows())
    return Job(config, target, [3, 4, 5], run.samples, run.hidden_states, first=0, engines=2, max_rejected=0)


def rows():
    return [Sample(f"s{i:03d}", [i] * (6 + i % 5), [(1, 3)], "s", "stop", "train") for i in range(SAMPLES)]


def captured(folder):
    return sorted(row["sample_id"] for shard in committed_shards(folder) for row in shard["rows"])


def test_what_a_killed_actor_had_not_written_is_given_to_the_other(job, capsys):
    on_ray.capture_on_ray(job, read_heads(job.samples), Suicidal)
    assert captured(job.folder) == [s.sample_id for s in rows()]
    assert "engine 2 of 2 died" in capsys.readouterr().out
    assert (job.folder.parent / "did-0").exists() and (job.folder.parent / "did-1").exists()


def test_no_actor_left_ends_the_capture_and_keeps_what_is_written(job):
    with pytest.raises(StageFailed, match=r"no engine is left .*run the same command to go on"):
        on_ray.capture_on_ray(dataclasses.replace(job, engines=1), read_heads(job.samples), Dead)


def test_a_failure_in_an_actor_is_the_captures_own(job):
    with pytest.raises(StageFailed, match="the probe disagrees"):
        on_ray.capture_on_ray(dataclasses.replace(job, engines=1), read_heads(job.samples), Failing)


def test_chunks_hold_every_sample_once(job):
    heads = [Head.of(s) for s in rows()]
    found = [s.sample_id for chunk in on_ray.chunks(job, {h.sample_id for h in heads}) for s in chunk]
    assert sorted(found) == [h.sample_id for h in heads]
