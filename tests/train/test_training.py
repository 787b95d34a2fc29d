"""Training on a small run: resumed equals straight bit for bit, checkpoints are whole, nothing is skipped silently."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from draftsmith.core.checkpoint import BEST, final_checkpoint, read_checkpoint
from draftsmith.core.errors import StageFailed, UserError
from draftsmith.core.objective import Objective, StepSums
from draftsmith.core.run import COMPLETE, RunFolder
from draftsmith.hidden_state_capture.reader import HiddenStateStore
from draftsmith.train.feed import training_plan
from draftsmith.train.metrics import Metrics
from draftsmith.train.optim import learning_rate
from draftsmith.train.stage import train

pytestmark = pytest.mark.usefixtures("one_thread")


class Interrupted(Exception):
    pass


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def logged(config):
    return [json.loads(line) for line in RunFolder.of(config).metrics.read_text().splitlines()]


def figures(config):
    """What was logged, without what the clock decides."""
    return [
        {k: v for k, v in row.items() if not k.endswith(("time", "tokens_per_second", "_seconds"))}
        for row in logged(config)
    ]


def weights(config):
    run = RunFolder.of(config)
    return (final_checkpoint(run, "test") / "draft.safetensors").read_bytes()


@pytest.fixture
def straight(_trained_run, synthetic_run, changed):
    """The same run in another place, trained without a stop."""
    return changed(synthetic_run, run={"dir": str(_trained_run / "runs")})


def interrupt_at(monkeypatch, step):
    """Raise out of the loop when optimizer step `step` is logged, as a crash would."""
    log = Metrics.log

    def log_until(self, at, **values):
        if at == step:
            raise Interrupted
        log(self, at, **values)

    monkeypatch.setattr(Metrics, "log", log_until)


# ---- resume ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stops", [[6], [2, 5, 10]], ids=str)
def test_a_resumed_training_equals_a_straight_one_bit_for_bit(synthetic_run, straight, stops):
    for step in stops:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
            interrupt_at(patch, step)
            train(synthetic_run)
    train(synthetic_run)
    assert weights(synthetic_run) == weights(straight)
    assert figures(synthetic_run) == figures(straight)


def test_a_training_killed_after_a_checkpoint_equals_a_straight_one(synthetic_run, straight, config_file, changed):
    run, wanted = RunFolder.of(synthetic_run), weights(straight)
    command = [sys.executable, "-m", "draftsmith", "train", "--config", config_file(synthetic_run)]
    process = subprocess.Popen(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        while not run.complete_checkpoints() and process.poll() is None:
            time.sleep(0.001)
    finally:
        process.send_signal(signal.SIGKILL)
        output = process.communicate()[0]
    assert run.complete_checkpoints(), output.decode()
    train(synthetic_run)
    assert weights(synthetic_run) == wanted
    assert figures(synthetic_run) == figures(straight)


def test_no_step_is_logged_twice_after_a_resume(synthetic_run, monkeypatch):
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        interrupt_at(patch, 7)
        train(synthetic_run)
    assert [r["step"] for r in logged(synthetic_run) if "loss" in r] == [1, 2, 3, 4, 5, 6]
    train(synthetic_run)
    assert [r["step"] for r in logged(synthetic_run) if "loss" in r] == list(range(1, 12))


def test_a_metrics_line_cut_off_by_a_kill_is_dropped(synthetic_run):
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        interrupt_at(patch, 7)
        train(synthetic_run)
    with RunFolder.of(synthetic_run).metrics.open("a") as file:
        file.write('{"step": 7, "time": 17')
    train(synthetic_run)
    assert [r["step"] for r in logged(synthetic_run) if "loss" in r] == list(range(1, 12))


def test_a_finished_training_is_left_alone(synthetic_run, tree_of, capsys):
    train(synthetic_run)
    before = tree_of(RunFolder.of(synthetic_run).root)
    train(synthetic_run)
    assert tree_of(RunFolder.of(synthetic_run).root) == before
    assert "step-0000011 (already there)" in capsys.readouterr().out


def test_the_seed_decides_the_draft(synthetic_run, straight, changed):
    train(changed(synthetic_run, run={"seed": 1}))
    assert weights(synthetic_run) != weights(straight)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def test_a_checkpoint_without_its_marker_does_not_exist(synthetic_run, straight):
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        interrupt_at(patch, 9)
        train(synthetic_run)
    run = RunFolder.of(synthetic_run)
    newest = run.complete_checkpoints()[-1]
    assert newest.name == "step-0000008"
    (newest / COMPLETE).unlink()
    (newest / "draft.safetensors").write_bytes(b"cut off")
    assert [p.name for p in run.complete_checkpoints()] == ["step-0000005"]
    train(synthetic_run)
    assert weights(synthetic_run) == weights(straight)


@pytest.mark.parametrize("keep", [1, 3])
def test_the_newest_checkpoints_and_the_best_are_kept(synthetic_run, changed, keep):
    config = changed(synthetic_run, train={"save_interval": 2, "keep_checkpoints": keep})
    train(config)
    run = RunFolder.of(config)
    best = json.loads((run.checkpoints / BEST).read_text())
    lengths = {r["step"]: r["eval_acceptance_length"] for r in logged(config) if "eval_acceptance_length" in r}
    assert best == {"checkpoint": f"step-{best['step']:07d}", "step": max(lengths, key=lengths.get),
                    "acceptance_length": max(lengths.values())}  # fmt: skip
    improved = [s for i, s in enumerate(sorted(lengths)) if all(lengths[s] > lengths[e] for e in sorted(lengths)[:i])]
    saved = sorted({2, 4, 6, 8, 10, 11, *improved})
    kept = sorted({best["checkpoint"], *(f"step-{n:07d}" for n in saved[-keep:])})
    assert names(run.checkpoints) == [BEST, "manifest.json", *kept]


def test_a_checkpoint_holds_float32_weights_and_readable_state(synthetic_run):
    train(synthetic_run)
    checkpoint = read_checkpoint(final_checkpoint(RunFolder.of(synthetic_run), "test"))
    assert {t.dtype for t in checkpoint.tensors.values()} == {torch.float32}
    assert (checkpoint.state["step"], checkpoint.state["total_steps"]) == (11, 11)
    assert checkpoint.layer_ids == [3, 4, 5] and checkpoint.norm_form == "rms"
    assert checkpoint.t2d.nonzero().squeeze(1).tolist() == checkpoint.target_ids.tolist()


def test_norm_weights_move(synthetic_run, straight):
    """In bf16 they would stay at 1.0 (known fault T6)."""
    checkpoint = read_checkpoint(final_checkpoint(RunFolder.of(straight), "test"))
    assert (checkpoint.tensors["midlayer.hidden_norm.weight"] != 1).all()


# ---- what does not fit is refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"train": {"learning_rate": 5e-4}}, "train.learning_rate is 0.001 there and 0.0005 in the config"),
        ({"train": {"epochs": 3}}, "train.epochs is 2 there and 3"),
        ({"draft": {"fc_norm": True}}, "draft.fc_norm is false there and true"),
        ({"run": {"seed": 1}}, "seed is 0 there and 1"),
    ],
)
def test_a_changed_setting_refuses_to_go_on(synthetic_run, changed, tree_of, change, named):
    train(synthetic_run)
    before = tree_of(RunFolder.of(synthetic_run).root)
    with pytest.raises(UserError) as error:
        train(changed(synthetic_run, **change))
    assert named in str(error.value) and "draftsmith train --fresh" in str(error.value)
    assert tree_of(RunFolder.of(synthetic_run).root) == before


def test_settings_that_do_not_change_the_draft_may_change(synthetic_run, straight, changed):
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        interrupt_at(patch, 6)
        train(synthetic_run)
    train(changed(synthetic_run, train={"log_interval": 3, "eval_interval": 4, "save_interval": 2}))
    assert weights(synthetic_run) == weights(straight)


def other_target(tiny_target, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "other"
    folder.mkdir()
    for file in tiny_target.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {k: t.roll(1, 0).contiguous() + 1 for k, t in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return str(folder)


def test_states_of_another_target_than_the_configs_are_refused(synthetic_run, changed, tiny_target, tmp_path):
    with pytest.raises(UserError, match=r"capture|target"):
        train(changed(synthetic_run, target={"path": other_target(tiny_target, tmp_path)}))
    assert not RunFolder.of(synthetic_run).checkpoints.exists()


def test_states_of_other_layers_than_the_configs_are_refused(synthetic_run, changed):
    with pytest.raises(UserError, match="layer_ids"):
        train(changed(synthetic_run, capture={"layer_ids": [1, 2, 3]}))
    assert not RunFolder.of(synthetic_run).checkpoints.exists()


def test_a_draft_that_cannot_be_built_leaves_the_run_as_it_was(synthetic_run, changed, tree_of):
    before = tree_of(RunFolder.of(synthetic_run).root)
    with pytest.raises(UserError, match=r"draft\.num_heads \(3\) is not a multiple of draft\.num_kv_heads \(2\)"):
        train(changed(synthetic_run, draft={"num_heads": 3, "num_kv_heads": 2}))
    assert tree_of(RunFolder.of(synthetic_run).root) == before


def test_a_store_without_training_samples_is_refused(synthetic_run):
    import pyarrow as pa
    import pyarrow.parquet as pq

    from draftsmith.core.store import INDEX, INDEX_SCHEMA

    folder = RunFolder.of(synthetic_run).hidden_states
    rows = [{**r, "split": "eval"} for r in HiddenStateStore(folder).index]
    pq.write_table(pa.Table.from_pylist(rows, schema=INDEX_SCHEMA), folder / INDEX)
    with pytest.raises(UserError, match="holds no training sample"):
        train(synthetic_run)


# ---- gradients that are not finite -----------------------------------------------------------------------------------


def spoil_loss(monkeypatch, spoiled):
    """Make the objective's loss infinite on the calls that `spoiled(n)` names, counted from 1."""
    calls, forward = [], Objective.forward

    def forward_spoiled(self, batch, steps):
        sums = forward(self, batch, steps)
        calls.append(batch)
        return StepSums(sums.loss_J * float("inf"), sums.rows_J, sums.hits_J) if spoiled(len(calls)) else sums

    monkeypatch.setattr(Objective, "forward", forward_spoiled)
    return calls


def test_a_step_with_a_gradient_that_is_not_finite_is_skipped_and_named(synthetic_run, monkeypatch):
    calls = spoil_loss(monkeypatch, lambda n: n in (3, 4))
    train(synthetic_run)
    skips = [r for r in logged(synthetic_run) if r.get("skipped_step")]
    assert [r["step"] for r in skips] == [3, 4]
    assert [r["sample_ids"] for r in skips] == [list(calls[i].sample_ids) for i in (2, 3)]
    checkpoint = read_checkpoint(final_checkpoint(RunFolder.of(synthetic_run), "test"))
    assert all(torch.isfinite(t).all() for t in checkpoint.tensors.values())


def test_metrics_are_json_where_a_loss_was_not_finite_too(synthetic_run, monkeypatch):
    def refuse(text):
        raise AssertionError(f"{text} is not JSON")

    spoil_loss(monkeypatch, lambda n: n == 3)
    train(synthetic_run)
    for line in RunFolder.of(synthetic_run).metrics.read_text().splitlines():
        json.loads(line, parse_constant=refuse)


def test_a_skipped_step_changes_no_weight(synthetic_run, monkeypatch, changed):
    config = changed(synthetic_run, train={"save_interval": 1, "keep_checkpoints": 20})
    spoil_loss(monkeypatch, lambda n: n == 3)
    train(config)
    steps = [read_checkpoint(p).tensors for p in RunFolder.of(config).complete_checkpoints()]
    same = [all(torch.equal(a[k], b[k]) for k in a) for a, b in itertools.pairwise(steps)]
    assert same == [False, True, *[False] * 8]


@pytest.mark.parametrize("stops", [[], [6]], ids=str)
def test_a_training_that_took_no_step_is_not_done(synthetic_run, monkeypatch, changed, stops):
    """T7, shorter than max_skipped_steps: no checkpoint says that it has ended, and a resumed one says the same."""
    config = changed(synthetic_run, train={"max_skipped_steps": 100})
    spoil_loss(monkeypatch, lambda n: True)
    for step in stops:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
            interrupt_at(patch, step)
            train(config)
    with pytest.raises(StageFailed, match="no step was taken"):
        train(config)
    run = RunFolder.of(config)
    assert [p.name for p in run.complete_checkpoints()][-1] < "step-0000011"
    assert not (run.checkpoints / "manifest.json").exists()
    with pytest.raises(UserError, match="training stopped at step"):
        final_checkpoint(run, "export")


def test_training_stops_after_too_many_skipped_steps_in_a_row(synthetic_run, monkeypatch, changed):
    config = changed(synthetic_run, train={"max_skipped_steps": 3})
    calls = spoil_loss(monkeypatch, lambda n: n != 2 and n != 5)
    with pytest.raises(StageFailed) as error:
        train(config)
    assert len(calls) == 8
    assert "not finite in 3 steps in a row, last at step 8" in str(error.value)
    assert calls[-1].sample_ids[0] in str(error.value) and "train.learning_rate" in str(error.value)


def test_infinite_states_are_skipped_and_named(synthetic_run, changed, monkeypatch):
    read = HiddenStateStore.stored

    def read_spoiled(self, number):
        sample = read(self, number)
        if self.index[number]["sample_id"] == "c-003/0":
            sample["aux_states"][:] = float("inf")
        return sample

    monkeypatch.setattr(HiddenStateStore, "stored", read_spoiled)
    train(synthetic_run)
    skips = [r for r in logged(synthetic_run) if r.get("skipped_step")]
    assert len(skips) == 2 and all("c-003/0" in r["sample_ids"] for r in skips)  # once an epoch


# ---- plan and schedule -----------------------------------------------------------------------------------------------


def test_the_plan_holds_every_training_sample_once_an_epoch(synthetic_run, changed):
    store = HiddenStateStore(RunFolder.of(synthetic_run).hidden_states)
    config = changed(synthetic_run, train={"epochs": 3})
    for world in (1, 2):
        plans = [training_plan(store, config, rank, world) for rank in range(world)]
        assert len({len(p) for p in plans}) == 1
        seen = [n for plan in plans for batch in plan for n in batch]
        assert sorted(seen) == sorted(store.numbers("train") * 3)


def test_the_logged_rates_are_those_of_the_schedule(synthetic_run):
    train(synthetic_run)
    seen = [r["learning_rate"] for r in logged(synthetic_run) if "learning_rate" in r]
    assert seen == [learning_rate(synthetic_run.train, step, 11) for step in range(11)]


def test_evaluations_come_at_their_interval_and_at_the_end(synthetic_run):
    train(synthetic_run)
    assert [r["step"] for r in logged(synthetic_run) if "eval_loss_per_step" in r] == [5, 10, 11]


def test_the_loss_falls(synthetic_run, changed):
    config = changed(synthetic_run, train={"epochs": 12, "learning_rate": 1e-2, "eval_interval": 1000})
    train(config)
    losses = [r["loss"] for r in logged(config) if "loss" in r]
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("name", ["draft.safetensors", "draft.json", "state.json"])
def test_a_damaged_checkpoint_is_named_with_its_mend(trained_run, name):
    file = RunFolder.of(trained_run).complete_checkpoints()[-1] / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(UserError, match=r"step-\d+: missing or damaged.*Delete .*step-\d+ and run"):
        train(trained_run)
