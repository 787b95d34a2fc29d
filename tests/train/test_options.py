"""What the config's options do to a training: every loss, frozen and trained parts."""

import json
import math

import pytest
import torch

from draftsmith.core.checkpoint import final_checkpoint, read_checkpoint
from draftsmith.core.draft_folder import read_draft_folder
from draftsmith.core.run import RunFolder
from draftsmith.core.target import resolve_target
from draftsmith.core.target_weights import load_target_weights
from draftsmith.export.stage import export
from draftsmith.train.stage import train

pytestmark = pytest.mark.usefixtures("one_thread")


def losses(config):
    rows = [json.loads(line) for line in RunFolder.of(config).metrics.read_text().splitlines()]
    return [r["loss"] for r in rows if "loss" in r]


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
