"""Another `data.draft_vocab_size`: samples and states stay, training follows, a trained draft is refused by name."""

import json
import shutil

import pytest

from draftsmith.core.atomic import write_json
from draftsmith.core.checkpoint import read_checkpoint
from draftsmith.core.errors import UserError
from draftsmith.core.lineage import check_training
from draftsmith.core.manifest import MANIFEST, manifest_hash, read_manifest
from draftsmith.core.run import RunFolder
from draftsmith.core.vocab import load_mapping
from draftsmith.data.stage import prepare
from draftsmith.export.stage import export
from draftsmith.hidden_state_capture.stage import capture
from draftsmith.train.stage import train

pytestmark = pytest.mark.usefixtures("one_thread")
SIZE = r"data\.draft_vocab_size is 128 there and 64 in the config"


@pytest.fixture
def smaller(changed):
    """`smaller(config)`: with half the vocabulary."""
    return lambda config: changed(config, data={"draft_vocab_size": 64})


@pytest.fixture
def old_run(synthetic_run):
    """As an earlier version left it: the size is among the samples' inputs."""
    run = RunFolder.of(synthetic_run)
    samples = read_manifest(run.samples)
    samples["inputs"]["data"]["draft_vocab_size"] = 128
    write_json(run.samples / MANIFEST, samples)
    states = read_manifest(run.hidden_states)
    states["inputs"]["samples_manifest_sha256"] = manifest_hash(run.samples)
    write_json(run.hidden_states / MANIFEST, states)
    return synthetic_run


def upstream(config):
    """Every file of samples and states."""
    run = RunFolder.of(config)
    return {p: p.read_bytes() for f in (run.samples, run.hidden_states) for p in f.rglob("*") if p.is_file()}


def newest(config):
    return read_checkpoint(RunFolder.of(config).complete_checkpoints()[-1])


@pytest.mark.parametrize("stages", [(prepare, capture, train), (train,)], ids=["all", "train alone"])
def test_samples_and_states_stay_and_the_draft_has_the_other_size(old_run, smaller, stages):
    before, config = upstream(old_run), smaller(old_run)
    prepare(old_run)
    for stage in stages:
        stage(config)
    assert upstream(config) == before
    assert newest(config).shape.draft_vocab_size == 64
    assert newest(config).state["inputs"]["data"] == {"draft_vocab_size": 64}
    export(config)
    assert json.loads((RunFolder.of(config).export / "config.json").read_text())["draft_vocab_size"] == 64


@pytest.mark.parametrize("recorded", ["now", "by an earlier version"])
@pytest.mark.parametrize("prepared", [False, True])
def test_what_was_trained_with_another_size_is_refused_by_its_name(old_run, smaller, recorded, prepared):
    train(old_run)
    checkpoint = newest(old_run)
    if recorded != "now":
        del checkpoint.state["inputs"]["data"]
        write_json(checkpoint.folder / "state.json", checkpoint.state)
    train(old_run)  # already there
    mapping = RunFolder.of(old_run).vocab_mapping
    if prepared:
        prepare(smaller(old_run))
    there = mapping.read_bytes()
    for refused in (train, export, lambda c: check_training(c, RunFolder.of(c), newest(c))):
        with pytest.raises(UserError, match=SIZE) as error:
            refused(smaller(old_run))
        assert "sha256" not in str(error.value) and "train --fresh" in str(error.value)
    assert mapping.read_bytes() == there
    prepare(old_run)  # back again: the same mapping as before, whoever made it
    assert len(load_mapping(mapping).d2t) == 128
    train(old_run)
    export(old_run)


def test_a_lost_mapping_is_made_again_for_a_training_that_has_begun(synthetic_run):
    run = RunFolder.of(synthetic_run)
    run.vocab_mapping.unlink()
    train(synthetic_run)
    made = run.vocab_mapping.read_bytes()
    run.vocab_mapping.unlink()
    train(synthetic_run)
    assert run.vocab_mapping.read_bytes() == made
    shutil.rmtree(run.samples)
    run.vocab_mapping.unlink()
    with pytest.raises(UserError, match="no samples to make vocab_mapping"):
        train(synthetic_run)
