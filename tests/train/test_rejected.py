"""`train.rejected_weight` in a training: however the batches of a step are spread, and where it changes nothing."""

import pytest
import torch

from draftsmith.core.checkpoint import final_checkpoint, read_checkpoint
from draftsmith.core.run import RunFolder
from draftsmith.train.stage import train

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]

OPTIONS = {"epochs": 4, "eval_interval": 3, "rejected_weight": 0.2}


def of(logged, config, key):
    return [row[key] for row in logged(config) if key in row]


def tensors(config):
    return read_checkpoint(final_checkpoint(RunFolder.of(config), "test")).tensors


@pytest.mark.parametrize("engine", [{}, {"shard": "fsdp2"}], ids=["ddp", "fsdp2"])
def test_two_processes_equal_two_batches_of_one(place, ranks, logged, engine):
    name = engine.get("shard", "ddp")
    one = place("rejected-one", grad_accum_steps=2, **OPTIONS)
    two = place(f"rejected-{name}", **OPTIONS, **engine)
    if not RunFolder.of(one).checkpoints.is_dir():
        train(one)
    ranks(2, {"config": two})
    for key in ("loss", "grad_norm", "eval_acceptance_length"):
        assert of(logged, one, key) == pytest.approx(of(logged, two, key), rel=1e-5), key
    for key, mine in tensors(one).items():
        torch.testing.assert_close(mine, tensors(two)[key], rtol=1e-4, atol=1e-5, msg=key)


def test_with_one_step_it_is_the_training_without_it_in_bfloat16_too(place):
    for precision in ("float32", "bfloat16"):
        runs = [
            place(f"rejected-{precision}-{weight}", epochs=2, ttt_steps=1, precision=precision, rejected_weight=weight)
            for weight in (1.0, 0.0)
        ]
        for run in runs:
            train(run)
        first, second = map(tensors, runs)
        assert all(torch.equal(first[name], second[name]) for name in first), precision
