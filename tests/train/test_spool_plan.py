"""What the spool's shards hold, and that they fit."""

import json
import random

import pytest
from spool_sides import capture_beside
from typer.testing import CliRunner

from draftsmith.core import cli_plan
from draftsmith.core.cli import app
from draftsmith.core.config import Config
from draftsmith.core.config_io import dump_config
from draftsmith.core.errors import UserError
from draftsmith.core.estimate import Amount
from draftsmith.core.run import RunFolder
from draftsmith.core.samples import TrainSamples
from draftsmith.hidden_state_capture.reader import HiddenStateStore
from draftsmith.train.feed import SpoolFeed, training_plan
from draftsmith.train.stage import train

STAGES = (["capture"], ["train"], ["train", "--fresh"])
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_shards_hold_every_step_once_and_those_beside_each_other_fit(spool_run, changed, world_size, plan_of):
    config = changed(spool_run, capture={"spool_bytes": 200_000, "shard_bytes": random.choice([1024, 60_000])})
    plan = plan_of(config, world_size)
    steps = [s for shard in plan.shards for s in range(shard.first, shard.end)]
    assert steps == list(range(len(plan.steps)))
    assert [plan.shard_of(s).number for s in steps] == [x.number for x in plan.shards for _ in range(x.first, x.end)]
    assert plan.beside == sorted(plan.beside) and plan.beside[-1] > 0
    for number, oldest in enumerate(plan.beside):
        there = sum(s.nbytes for s in plan.shards[oldest : number + 1])
        assert there <= 200_000
        assert oldest == 0 or there + plan.shards[oldest - 1].nbytes > 200_000, "there would have been room"


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_plan_is_the_stores(spool_run, changed, from_store, world_size, plan_of):
    store = HiddenStateStore(RunFolder.of(from_store).hidden_states)
    samples = TrainSamples(RunFolder.of(spool_run).samples)
    spool_run = changed(spool_run, capture={"spool_bytes": 200_000})
    for rank in range(world_size):
        ours = [[samples.ids[n] for n in step[rank]] for step in plan_of(spool_run, world_size).steps]
        theirs = training_plan(store, from_store, rank, world_size)
        assert ours == [[store.index[n]["sample_id"] for n in step] for step in theirs]


def test_shards_are_no_larger_than_planned(spool_run, monkeypatch, plan_of):
    plan, sizes = plan_of(spool_run), {}
    read = SpoolFeed.batch

    def measured(self, step):
        batch = read(self, step)
        shard = plan.shard_of(step)
        sizes[shard.number] = sum(f.stat().st_size for f in self.folder.glob(f"shard-{shard.number:05d}.*"))
        return batch

    monkeypatch.setattr(SpoolFeed, "batch", measured)
    with capture_beside(spool_run):
        train(spool_run)
    assert len(sizes) == len(plan.shards)
    assert all(0.9 * plan.shards[n].nbytes < size <= plan.shards[n].nbytes for n, size in sizes.items())


@pytest.mark.parametrize("bytes_", [1, 40_000])
def test_a_spool_that_cannot_hold_two_shards_is_refused_with_figures(spool_run, changed, bytes_, plan_of):
    config = changed(spool_run, capture={"spool_bytes": bytes_})
    with pytest.raises(UserError) as error:
        train(config)
    least = int(str(error.value).split("Set capture.spool_bytes to ")[1].split()[0])
    assert f"capture.spool_bytes is {bytes_:,}" in str(error.value) and 50_000 < least < 80_000
    assert not RunFolder.of(config).spool.exists() and not RunFolder.of(config).checkpoints.exists()
    plan_of(changed(spool_run, capture={"spool_bytes": least}))  # the figure that the error names is enough
    with pytest.raises(UserError):
        plan_of(changed(spool_run, capture={"spool_bytes": least - 1}))


def test_the_smallest_spool_trains_the_same(spool_run, from_store, changed, weights, plan_of):
    with pytest.raises(UserError) as error:
        plan_of(changed(spool_run, capture={"spool_bytes": 1}))
    least = int(str(error.value).split("Set capture.spool_bytes to ")[1].split()[0])
    config = changed(spool_run, capture={"spool_bytes": least})
    with capture_beside(config):
        train(config)
    assert weights(config) == weights(from_store)


def test_spool_mode_without_a_bound_is_refused():
    with pytest.raises(ValueError, match=r"set capture\.spool_bytes"):
        Config.model_validate({"capture": {"mode": "spool"}})


@pytest.mark.parametrize("processes", [1, 2])
def test_plan_and_dry_run_refuse_what_training_would_and_no_more(
    spool_run, changed, plan_of, tmp_path, processes, monkeypatch
):
    """By the samples' own sizes: fewer bytes than two full shards are enough where the samples are few."""
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    # This run's manifest of samples has no counts; the sizes are read from the samples themselves.
    monkeypatch.setattr(cli_plan, "amount_of", lambda *_: Amount(4, 400, 200, 0.9, 100, "counted", prepared=True))

    def told(bytes_):
        capture = {**spool_run.capture.model_dump(mode="json"), "spool_bytes": bytes_, "shard_bytes": 2**30}
        config = Config.model_validate({**spool_run.model_dump(mode="json"), "capture": capture})
        (tmp_path / "c.yaml").write_text(dump_config(config))
        file = str(tmp_path / "c.yaml")
        planned = CliRunner().invoke(app, ["plan", "-c", file, "--json", "--gpus", str(processes)])
        dry = [CliRunner().invoke(app, [s, "-c", file, "--dry-run", *more]) for s, *more in STAGES]
        problems = [p["what"] for p in json.loads(planned.stdout)["problems"] if "spool_bytes" in p["what"]]
        return config, problems, [str(d.exception) if d.exit_code else "" for d in dry]

    config, problems, refused = told(1)
    with pytest.raises(UserError) as error:
        plan_of(config, processes)
    assert problems == [error.value.what] and refused == [str(error.value)] * len(STAGES)
    least = int(str(error.value).split("Set capture.spool_bytes to ")[1].split()[0])
    assert least < 2**30
    assert told(least)[1:] == ([], [""] * len(STAGES))
