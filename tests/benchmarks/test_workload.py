"""The documents of the training benchmark: reproducible, within the budget, distributed as stated."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "training" / "workload.py"


@pytest.fixture(scope="module")
def workload():
    spec = importlib.util.spec_from_file_location("benchmark_workload", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_dense_is_one_document_all_supervised(workload):
    (document,) = workload.dense(2048)
    assert (document.length, document.supervised) == (2048, 2048)
    assert workload.loss_mask(document).all()


@pytest.mark.parametrize("tokens", [300, 8192, 65_536])
def test_conversations_fill_the_budget_and_never_pass_it(workload, tokens):
    for seed in range(20):
        total = sum(document.length for document in workload.conversations(tokens, seed))
        assert total <= tokens
        assert total >= 0.98 * tokens or tokens - total < workload.SHORTEST


def test_conversations_depend_on_the_seed_alone(workload):
    assert workload.conversations(8192, 3) == workload.conversations(8192, 3)
    assert workload.conversations(8192, 3) != workload.conversations(8192, 4)


def test_the_reply_is_the_last_sixty_percent(workload):
    for document in workload.conversations(65_536, 0):
        mask = workload.loss_mask(document)
        assert mask.shape == (document.length,)
        assert mask.sum() == document.supervised == round(0.6 * document.length)
        assert not mask[: document.reply_start].any()


def test_lengths_have_the_stated_median_and_mean(workload):
    generator = np.random.default_rng(0)
    lengths = [workload.conversation_length(generator) for _ in range(50_000)]
    assert np.median(lengths) == pytest.approx(600, rel=0.02)
    assert np.mean(lengths) == pytest.approx(1000, rel=0.03)  # the cut at 8192 takes 1.7 %
    assert max(lengths) == workload.LONGEST


def test_a_budget_below_one_conversation_is_refused(workload):
    with pytest.raises(ValueError, match="holds no conversation"):
        workload.conversations(15, 0)
