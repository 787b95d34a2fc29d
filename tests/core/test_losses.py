"""The losses of a row: values by hand, gradients against the closed forms that the docstrings state, and hard rows."""

import math
from typing import get_args

import pytest
import torch

from draftsmith.core.config_train import LossName, TrainConfig
from draftsmith.core.losses import LOSSES, LossOptions, row_losses
from draftsmith.core.target_weights import TargetHead

R, V, FULL = 7, 12, 30
OPTIONS = LossOptions("lk_lambda", lk_eta=2.0)
ON_P = ("soft_ce_full", "lk_alpha", "lk_lambda")


@pytest.fixture
def rows():
    """z, y [R, V] and the target's log-sum-exp over FULL tokens, float64."""
    g = torch.Generator().manual_seed(0)
    z, full = torch.randn(R, V, generator=g).double() * 2, torch.randn(R, FULL, generator=g).double() * 2
    return z.requires_grad_(), full[:, :V], full.logsumexp(-1)


def test_every_name_of_the_config_is_a_loss():
    assert set(LOSSES) == set(get_args(LossName))


def test_options_come_from_the_config():
    config = TrainConfig(loss="lk_lambda", loss_temperature=2.0, lk_eta=1.5, rejected_weight=0.5)
    assert LossOptions.of(config) == LossOptions("lk_lambda", 2.0, 1.5, 0.5)
    assert [n for n in LOSSES if LossOptions(n).needs_full_vocabulary] == list(ON_P)


def test_values_by_hand():
    """q = (1/2, 1/4, 1/4); the target gives the same three tokens 0.2, 0.4, 0.2 and a fourth, out of reach, 0.2."""
    z, y = torch.tensor([[0.5, 0.25, 0.25]]).log(), torch.tensor([[0.2, 0.4, 0.2]]).log()
    lse = torch.zeros(1)  # y are log-probabilities already
    got = {name: row_losses(LossOptions(name), z, y, lse).item() for name in LOSSES}
    ln2 = math.log(2)
    # r = (1/4, 1/2, 1/4): -log q is (1, 2, 2) ln 2, and H(r) = 1.5 ln 2.
    assert got["soft_ce"] == pytest.approx(1.75 * ln2)
    assert got["kl"] == pytest.approx(0.25 * ln2)
    assert got["soft_ce_full"] == pytest.approx(1.4 * ln2)
    # min(p, q) = 0.2, 0.25, 0.2
    assert got["lk_alpha"] == pytest.approx(-math.log(0.65))
    weight = math.exp(-3 * 0.65)
    assert got["lk_lambda"] == pytest.approx(weight * 0.25 * ln2 + (1 - weight) * 0.35)


def closed_form(name, z, y, lse):
    q, r, p = z.softmax(-1), y.softmax(-1), (y - lse[:, None]).exp()
    below = (q < p).double()
    alpha = torch.minimum(p, q).sum(-1, keepdim=True)
    towards = q * ((q * below).sum(-1, keepdim=True) - below)  # of 1 - alpha
    weight = torch.exp(-OPTIONS.lk_eta * alpha)
    return {
        "soft_ce": q - r,
        "soft_ce_full": p.sum(-1, keepdim=True) * q - p,
        "kl": q - r,
        "lk_alpha": towards / alpha,
        "lk_lambda": weight * (q - r) + (1 - weight) * towards,
    }[name]


@pytest.mark.parametrize("full", [True, False], ids=["reduced", "full vocabulary"])
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_the_closed_forms(rows, name, full):
    z, y, lse = rows
    LOSSES[name](z, y, lse if full else None, OPTIONS).sum().backward()
    with torch.no_grad():
        wanted = closed_form(name, z, y, lse if full else y.logsumexp(-1))
    assert torch.allclose(z.grad, wanted, atol=1e-12)


@pytest.mark.parametrize("name", ON_P)
def test_a_full_draft_vocabulary_needs_no_other_sum(rows, name):
    z, y, _ = rows
    with_sum = LOSSES[name](z, y, y.logsumexp(-1), OPTIONS)
    assert torch.allclose(with_sum, LOSSES[name](z, y, None, OPTIONS), atol=1e-12)


def test_a_perfect_draft_has_no_loss_left(rows):
    _, y, _ = rows
    for name in ("kl", "lk_alpha", "lk_lambda"):
        assert LOSSES[name](y.clone(), y, None, OPTIONS).abs().max() < 1e-12, name


def test_lk_lambda_runs_from_kl_to_total_variation(rows):
    z, y, lse = rows
    kl = LOSSES["lk_lambda"](z, y, lse, LossOptions("lk_lambda", lk_eta=0.0))
    assert torch.allclose(kl, LOSSES["kl"](z, y, lse, OPTIONS))
    distance = LOSSES["lk_lambda"](z, y, lse, LossOptions("lk_lambda", lk_eta=1e9))
    p = torch.cat([(y - lse[:, None]).exp(), (1 - (y - lse[:, None]).exp().sum(-1))[:, None]], -1)
    q = torch.cat([z.softmax(-1), torch.zeros(R, 1).double()], -1)
    assert torch.allclose(distance, 0.5 * (p - q).abs().sum(-1))


@pytest.mark.parametrize("name", LOSSES)
def test_temperature_divides_all_logits(rows, name):
    z, y, lse = (x.detach().float() for x in rows)
    hot = row_losses(LossOptions(name, 2.0), z, y, lse)
    assert torch.equal(hot, row_losses(LossOptions(name), z / 2, y / 2, lse))


INF = float("inf")
HARD = {
    "-inf where the target has mass": ([[-INF, 0.0, 1.0]], [[5.0, 0.0, 0.0]], [5.1]),
    "-inf where it has none": ([[0.0, 0.0, 0.0]], [[-INF, 0.0, 0.0]], [1.0]),
    "only -inf": ([[-INF] * 3], [[-INF] * 3], [0.0]),
    "all mass outside the draft vocabulary": ([[0.0, 1.0, 2.0]], [[0.0, 0.0, 0.0]], [500.0]),
    "no overlap at all": ([[0.0, 3000.0, 0.0]], [[3000.0, 0.0, 0.0]], [3000.0]),
    "huge": ([[3e4, -3e4, 0.0]], [[-3e4, 3e4, 0.0]], [3e4]),
}


@pytest.mark.parametrize(("z", "y", "lse"), HARD.values(), ids=HARD)
@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient_of_a_hard_row_are_finite(name, z, y, lse):
    z = torch.tensor(z, requires_grad=True)
    loss = row_losses(LossOptions(name), z, torch.tensor(y), torch.tensor(lse))
    loss.sum().backward()
    assert torch.isfinite(loss).all() and loss >= 0
    assert torch.isfinite(z.grad).all()


def test_the_heads_log_sum_exp_is_over_all_rows_of_the_target():
    g = torch.Generator().manual_seed(0)
    full, norm, states = torch.randn(FULL, 8, generator=g), torch.rand(8) + 0.5, torch.randn(1030, 8, generator=g)
    head = TargetHead(full[:V], norm, "rms", 1e-5, full)
    everything = TargetHead(full, norm, "rms", 1e-5)
    assert torch.allclose(head.full_lse(states, 2.0), (everything(states) / 2).logsumexp(-1), atol=1e-5)
    assert everything.full_lse(states, 2.0) is None
    assert head.full_lse(states[:0], 2.0).shape == (0,)
