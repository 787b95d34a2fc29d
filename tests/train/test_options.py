"""What the config's options do to a training: every loss, frozen and trained parts, noise."""

import json
import math
import shutil

import pytest
import torch

from draftsmith.core.batch import Batch
from draftsmith.core.checkpoint import final_checkpoint, read_checkpoint
from draftsmith.core.config_train import TrainConfig
from draftsmith.core.draft_folder import read_draft_folder
from draftsmith.core.run import RunFolder
from draftsmith.core.target import resolve_target
from draftsmith.core.target_weights import load_target_weights
from draftsmith.export.stage import export
from draftsmith.train.noise import add_noise
from draftsmith.train.stage import train

pytestmark = pytest.mark.usefixtures("one_thread")


def losses(config):
    rows = [json.loads(line) for line in RunFolder.of(config).metrics.read_text().splitlines()]
    return [r["loss"] for r in rows if "loss" in r]


def held_out(config):
    rows = [json.loads(line) for line in RunFolder.of(config).metrics.read_text().splitlines()]
    return [r["eval_loss_per_step"] for r in rows if "eval_loss_per_step" in r]


def trained(config):
    train(config)
    return read_checkpoint(final_checkpoint(RunFolder.of(config), "test"))


@pytest.mark.parametrize("loss", ["soft_ce_full", "kl", "lk_alpha", "lk_lambda"])
def test_every_loss_falls(synthetic_run, changed, loss):
    config = changed(synthetic_run, train={"epochs": 8, "loss": loss, "loss_temperature": 1.5, "eval_interval": 100})
    train(config)
    seen = losses(config)
    assert all(math.isfinite(x) for x in seen)
    assert sum(seen[-5:]) < 0.97 * sum(seen[:5])


@pytest.mark.parametrize("weight", [0, 0.3])
def test_rejected_steps_may_weigh_less(synthetic_run, changed, weight):
    """The draft learns, and another than without; the first step's losses are reported as they are without."""
    plain, own = (changed(synthetic_run, train={"epochs": 8, "rejected_weight": w}) for w in (1.0, weight))
    without, before = trained(plain), losses(plain)
    shutil.rmtree(RunFolder.of(plain).checkpoints)
    RunFolder.of(plain).metrics.unlink()
    weighed, seen = trained(own), losses(own)
    assert seen[0] == before[0] and seen[-1] != before[-1]
    assert sum(seen[-5:]) < 0.97 * sum(seen[:5])
    assert any(not torch.equal(t, without.tensors[name]) for name, t in weighed.tensors.items())


def test_a_frozen_head_stays_the_targets_and_the_rest_learns(synthetic_run, changed):
    config = changed(synthetic_run, draft={"train_lm_head": False})
    checkpoint = trained(config)
    weights = load_target_weights(resolve_target(config.target))
    assert torch.equal(checkpoint.tensors["lm_head.weight"], weights.head_VH[checkpoint.target_ids].float())
    assert losses(config)[-1] < losses(config)[0]


def test_a_trained_embedding_is_exported_and_read_back(synthetic_run, changed):
    config = changed(synthetic_run, draft={"train_embedding": True, "sliding_window": 8, "partial_rotary_factor": 0.5})
    checkpoint = trained(config)
    embed = load_target_weights(resolve_target(config.target)).embed_VH.float()
    own = checkpoint.tensors["embed_tokens.weight"]
    moved = (own - embed).abs().sum(-1) > 0
    assert moved.any() and not moved.all()  # tokens that no sample has stay where they were
    export(config)  # proves the reloaded logits too
    exported = read_draft_folder(RunFolder.of(config).export)
    assert exported.shape == checkpoint.shape and exported.shape.sliding_window == 8
    assert torch.equal(exported.tensors["embed_tokens.weight"], own.bfloat16().float())


# ---- noise -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def states():
    """A batch whose second auxiliary state is 30 times the first one."""
    aux = torch.randn(400, 2, 64, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 30.0])[:, None]
    none = torch.zeros(0, dtype=torch.int64)
    return Batch(("s",), (0, 400), none, none.bool(), none, aux.bfloat16(), torch.zeros(0, 64), none)


def noise_of(batch, seed=0, number=0, **config):
    noisy = add_noise(batch, TrainConfig(**config), seed, number)
    assert noisy.aux_TAH.dtype == batch.aux_TAH.dtype
    return noisy.aux_TAH.float() - batch.aux_TAH.float()


def test_there_is_no_noise_unless_it_is_asked_for(states):
    assert add_noise(states, TrainConfig(), 0, 0) is states


@pytest.mark.parametrize(("kind", "spread"), [("uniform", 0.1 / math.sqrt(3)), ("gaussian", 0.1)])
def test_noise_is_a_share_of_each_states_size(states, kind, spread):
    noise = noise_of(states, hidden_noise=0.1, hidden_noise_kind=kind)
    sizes = states.aux_TAH.float().pow(2).mean(-1, keepdim=True).sqrt()
    assert torch.allclose((noise / sizes).std(dim=(0, 2)), torch.tensor(spread), rtol=0.03)
    assert float((noise / sizes).mean().abs()) < 0.002
    if kind == "uniform":
        assert float((noise / sizes).abs().max()) < 0.12  # bfloat16 rounds the sum


def test_noise_repeats_by_seed_and_number_and_by_nothing_less(states):
    first = noise_of(states, hidden_noise=0.1)
    assert torch.equal(first, noise_of(states, hidden_noise=0.1))
    for other in ({"seed": 1}, {"number": 1}):
        assert not torch.equal(first, noise_of(states, hidden_noise=0.1, **other)), other


def test_noise_changes_the_training_and_not_the_held_out_figures(synthetic_run, changed):
    config = changed(synthetic_run, train={"hidden_noise": 0.3, "learning_rate": 1e-30, "epochs": 1})
    quiet = changed(config, train={"hidden_noise": 0.0}, run={"name": "quiet"})
    shutil.copytree(RunFolder.of(config).root, RunFolder.of(quiet).root)
    train(config)
    train(quiet)
    assert losses(config) != losses(quiet)
    assert held_out(config) == held_out(quiet)
