"""What makes an optimizer step: its batches however they are spread, its optimizer and rate, and what is kept of it."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch

from draftsmith.core import cli
from draftsmith.core.checkpoint import BEST, final_checkpoint, own_weights, read_checkpoint
from draftsmith.core.config_train import TrainConfig
from draftsmith.core.errors import UserError
from draftsmith.core.run import RunFolder
from draftsmith.train.loop import Trainer
from draftsmith.train.metrics import Metrics
from draftsmith.train.optim import MuonWithAdamW, learning_rate, make_optimizer
from draftsmith.train.stage import train

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def straight(_trained_run, synthetic_run, changed):
    """The same run in another place, trained without a stop."""
    return changed(synthetic_run, run={"dir": str(_trained_run / "runs")})


def copies(config, changed, *runs):
    """A copy of a captured run for every change of its training, in places of their own."""
    for i, change in enumerate(runs):
        one = changed(config, run={"name": f"{config.run.name}-{i}"}, train=change)
        shutil.copytree(RunFolder.of(config).root, RunFolder.of(one).root)
        yield one


def of(logged, config, key):
    return [row[key] for row in logged(config) if key in row]


def tensors(config):
    return read_checkpoint(final_checkpoint(RunFolder.of(config), "test")).tensors


def alike(logged, one, other):
    for key in ("loss", "grad_norm", "eval_acceptance_length"):
        assert of(logged, one, key) == pytest.approx(of(logged, other, key), rel=1e-5), key
    for name, mine in tensors(one).items():
        torch.testing.assert_close(mine, tensors(other)[name], rtol=1e-4, atol=1e-5, msg=name)


# ---- batches of a step -----------------------------------------------------------------------------------------------


def test_many_small_batches_equal_a_large_one(synthetic_run, changed, logged):
    """T4: all training samples make a step, as eight batches (some without a sample), or as one."""
    small, large = copies(
        synthetic_run, changed,
        {"epochs": 4, "grad_accum_steps": 8, "eval_interval": 2, "precision": "float32"},
        {"epochs": 4, "tokens_per_batch": 10**6, "eval_interval": 2, "precision": "float32"},
    )  # fmt: skip
    train(small)
    train(large)
    assert len(of(logged, small, "loss")) == 4
    assert of(logged, small, "learning_rate") == of(logged, large, "learning_rate")
    alike(logged, small, large)


@pytest.mark.slow
def test_two_processes_equal_two_batches_of_one_and_go_on_from_them(synthetic_run, changed, logged, config_file):
    """T1, T4, T8, R2: the same steps, rates, noise and losses; a rank without samples keeps step, and nothing hangs."""
    options = {"hidden_noise": 0.1, "epochs": 3, "precision": "float32"}
    one, two = copies(synthetic_run, changed, {**options, "grad_accum_steps": 2}, {**options, "grad_accum_steps": 2})
    train(one)
    ended_by(two, signal.SIGTERM, 2)
    two = changed(two, train={"grad_accum_steps": 1})
    with pytest.raises(UserError, match=r"2 batches a step .* and this has 1\..*grad_accum_steps to 2 / the number"):
        train(two)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "draftsmith", "train", "--config", config_file(two),
    ]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "going on from step 3" in " ".join(done.stdout.split())
    assert of(logged, one, "learning_rate") == of(logged, two, "learning_rate")
    alike(logged, one, two)


# ---- optimizer, rate, average ----------------------------------------------------------------------------------------


def rates(total, **values):
    config = TrainConfig(learning_rate=1.0, **values)
    return [learning_rate(config, step, total) for step in range(total)]


def test_the_rate_warms_up_to_its_peak_and_then_falls():
    assert rates(10, warmup_ratio=0.4, schedule="constant") == [0.25, 0.5, 0.75, 1.0, *[1.0] * 6]
    assert rates(5, warmup_ratio=0.0, schedule="linear") == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    assert rates(4, warmup_ratio=0.0, schedule="cosine") == pytest.approx([1.0, 0.8535534, 0.5, 0.1464466])


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize("warmup", [0.0, 0.3, 0.99])
def test_no_step_has_a_rate_of_zero_or_above_the_peak(schedule, warmup):
    for total in (1, 2, 7, 100):
        assert all(0 < r <= 1 for r in rates(total, warmup_ratio=warmup, schedule=schedule))


def test_wsd_stays_at_its_peak_and_falls_at_the_end():
    seen = rates(10, warmup_steps=2, schedule="wsd", decay_ratio=0.4)
    assert seen == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25])
    assert all(0 < r <= 1 for n in (1, 2, 3, 50) for r in rates(n, schedule="wsd", warmup_ratio=0.3, decay_ratio=1.0))


def test_warm_up_steps_do_not_depend_on_the_length_of_the_training():
    for total in (5, 50, 500):
        assert rates(total, warmup_steps=4, schedule="constant")[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates(3, warmup_steps=10, schedule="cosine") == pytest.approx([0.1, 0.2, 0.3])  # never at its peak


def test_muon_takes_the_matrices_between_the_token_tables(synthetic_run, changed):
    config = changed(synthetic_run, draft={"train_embedding": True, "fc_norm": True}, train={"optimizer": "muon"})
    train(config)
    checkpoint = read_checkpoint(final_checkpoint(RunFolder.of(config), "test"))
    named = [(name, torch.nn.Parameter(t)) for name, t in checkpoint.tensors.items()]
    optimizer = make_optimizer(config.train, named)
    assert isinstance(optimizer, MuonWithAdamW)
    names = {id(p): name for name, p in named}
    muon, adamw = ({names[id(p)] for g in part.param_groups for p in g["params"]} for part in optimizer.parts)
    assert {"lm_head.weight", "embed_tokens.weight", "norm.weight", "fc_norm.0.weight"} <= adamw
    assert {"fc.weight", "midlayer.mlp.down_proj.weight", "midlayer.self_attn.q_proj.weight"} <= muon
    assert all(checkpoint.tensors[name].ndim == 2 for name in muon) and muon | adamw == set(names.values())


def test_muon_learns(synthetic_run, changed, logged):
    config = changed(synthetic_run, train={"optimizer": "muon", "epochs": 6, "learning_rate": 5e-3})
    train(config)
    losses = of(logged, config, "loss")
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


def test_the_average_is_what_is_kept_and_evaluated_and_training_goes_on_beside_it(synthetic_run, changed, logged):
    plain, averaged = copies(synthetic_run, changed, {}, {"ema_decay": 0.9, "save_interval": 1, "keep_checkpoints": 20})
    train(plain)
    train(averaged)
    assert of(logged, plain, "loss") == of(logged, averaged, "loss")
    assert of(logged, plain, "eval_loss_per_step") != of(logged, averaged, "eval_loss_per_step")
    kept = [read_checkpoint(p) for p in RunFolder.of(averaged).complete_checkpoints()]
    assert all(torch.equal(own_weights(kept[-1])[k], t) for k, t in tensors(plain).items())
    for before, after in itertools.pairwise(kept):
        own = own_weights(after)
        for name, was in before.tensors.items():
            assert torch.equal(after.tensors[name], was.lerp(own[name], 1 - 0.9)), name


@pytest.mark.parametrize(
    "change",
    [
        {"optimizer": "muon", "ema_decay": 0.9, "schedule": "wsd", "warmup_steps": 3},
        {"grad_accum_steps": 2, "hidden_noise": 0.2, "epochs": 4},
    ],
    ids=str,
)
def test_a_resumed_training_equals_a_straight_one_with_every_option(synthetic_run, changed, logged, change):
    """R3: optimizer state, averages, schedule, order and noise all go on where they were."""
    whole, stopped = copies(synthetic_run, changed, change, change)
    train(whole)
    for at in (3, 7):
        ended_by(stopped, signal.SIGTERM, at)
        train(stopped)
    run, other = RunFolder.of(stopped), RunFolder.of(whole)
    names = ("draft.safetensors", "own.safetensors") if "ema_decay" in change else ("draft.safetensors",)
    for name in names:
        mine, theirs = (final_checkpoint(r, "test") / name for r in (run, other))
        assert mine.read_bytes() == theirs.read_bytes(), name
    assert of(logged, stopped, "loss") == of(logged, whole, "loss")


# ---- signals ---------------------------------------------------------------------------------------------------------


def ended_by(config, number, at, run=None):
    """Train (or `run`), and get a signal while optimizer step `at` is logged."""
    log = Metrics.log

    def log_and_signal(self, step, **values):
        if step == at and "loss" in values:
            os.kill(os.getpid(), number)
        log(self, step, **values)

    before = signal.getsignal(number)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Metrics, "log", log_and_signal)
        run() if run else train(config)
    assert signal.getsignal(number) is before


def test_sigterm_saves_and_ends_and_the_same_command_goes_on(synthetic_run, straight, changed, logged, capsys):
    config = changed(synthetic_run, train={"save_interval": 100, "eval_interval": 100})
    ended_by(config, signal.SIGTERM, 3)
    run = RunFolder.of(config)
    assert [p.name for p in run.complete_checkpoints()] == ["step-0000004"]
    assert "stopped by SIGTERM at step 4 of 11" in " ".join(capsys.readouterr().out.split())
    assert not (run.checkpoints / "manifest.json").exists()
    train(config)
    assert all(torch.equal(t, tensors(straight)[name]) for name, t in tensors(config).items())
    assert of(logged, config, "loss") == of(logged, straight, "loss")


def test_sigusr1_saves_and_goes_on(synthetic_run, straight, changed):
    config = changed(synthetic_run, train={"save_interval": 100, "eval_interval": 100, "keep_checkpoints": 9})
    ended_by(config, signal.SIGUSR1, 3)
    assert [p.name for p in RunFolder.of(config).complete_checkpoints()] == ["step-0000004", "step-0000011"]
    assert all(torch.equal(t, tensors(straight)[name]) for name, t in tensors(config).items())


def test_a_terminated_command_ends_with_code_0(synthetic_run, config_file, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["draftsmith", "train", "--config", config_file(synthetic_run)])
    with pytest.raises(SystemExit) as end:
        ended_by(synthetic_run, signal.SIGTERM, 2, cli.main)
    assert end.value.code in (0, None)
    assert [p.name for p in RunFolder.of(synthetic_run).complete_checkpoints()] == ["step-0000003"]


# ---- the best checkpoint ---------------------------------------------------------------------------------------------


def test_the_best_checkpoint_is_never_deleted(synthetic_run, changed, monkeypatch):
    """Not by newer ones, nor after a resume; one that is no better than it does not take its place."""
    lengths = {5: 1.9, 10: 1.9, 11: 1.2}
    monkeypatch.setattr(Trainer, "_replay", lambda self: lengths[self.state.step])
    config = changed(synthetic_run, train={"save_interval": 2, "keep_checkpoints": 1})
    ended_by(config, signal.SIGTERM, 7)
    run = RunFolder.of(config)
    assert [p.name for p in run.complete_checkpoints()] == ["step-0000005", "step-0000008"]
    train(config)
    assert [p.name for p in run.complete_checkpoints()] == ["step-0000005", "step-0000011"]
    best = json.loads((run.checkpoints / BEST).read_text())
    assert best == {"checkpoint": "step-0000005", "step": 5, "acceptance_length": 1.9}
    assert read_checkpoint(final_checkpoint(run, "test")).state["best"] == {"step": 5, "acceptance_length": 1.9}
