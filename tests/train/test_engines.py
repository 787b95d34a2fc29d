"""Every engine trains the same draft: losses, drafts, averages; and each goes on from what another one has saved."""

import json

import pytest
import torch

from draftsmith.core.checkpoint import final_checkpoint, read_checkpoint
from draftsmith.core.draft_folder import read_draft_folder
from draftsmith.core.run import RunFolder
from draftsmith.export.stage import export
from draftsmith.train.stage import train

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]

ENGINES = {
    "ddp": {},
    "fsdp2": {"shard": "fsdp2"},
    **{
        name: {"engine": "deepspeed", "deepspeed_config": f"configs/deepspeed/{name}.json"}
        for name in ("zero1", "zero2", "zero2_offload", "zero3")
    },
}
LONG = {"epochs": 17, "eval_interval": 25, "save_interval": 25}  # 51 steps of two batches
SHORT = {"epochs": 4, "save_interval": 4, "eval_interval": 5}  # 12 of them


def of(logged, config, key):
    return [row[key] for row in logged(config) if key in row]


def tensors(config):
    return read_checkpoint(final_checkpoint(RunFolder.of(config), "test")).tensors


def alike(logged, one, other, rel=1e-5):
    for key in ("loss", "grad_norm", "eval_acceptance_length"):
        mine, theirs = of(logged, one, key), of(logged, other, key)
        assert mine and mine == pytest.approx(theirs, rel=rel), key
    for name, mine in tensors(one).items():
        torch.testing.assert_close(mine, tensors(other)[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.fixture(scope="module")
def two(place, ranks):
    """Every engine on two processes, with a running average or without, by the name of its run."""
    runs = {name: place(name, **LONG, **engine) for name, engine in ENGINES.items()}
    average = {"ema_decay": 0.9, "grad_accum_steps": 2, "hidden_noise": 0.1, **SHORT}
    runs |= {f"{name}-average": place(f"{name}-average", **average, **ENGINES[name]) for name in ENGINES}
    # DeepSpeed's stage 3 changes torch.nn.functional.linear for good: it comes last.
    ordered = sorted(runs, key=lambda name: name.startswith("zero3"))
    ranks(2, *({"config": runs[name]} for name in ordered))
    runs["alone-average"] = place("alone-average", **{**average, "grad_accum_steps": 4})
    train(runs["alone-average"])
    return runs


@pytest.mark.parametrize("name", [name for name in ENGINES if name != "ddp"])
def test_an_engine_gives_ddps_losses_over_fifty_steps(two, logged, name):
    losses = of(logged, two[name], "loss")
    assert len(losses) == 51 and losses[-1] < 0.95 * losses[0]
    alike(logged, two[name], two["ddp"])


def test_exposed_communication_is_told_apart(two, logged):
    for name, config in two.items():
        if name == "alone-average":
            continue
        rows = [row for row in logged(config) if "loss" in row]
        assert all(row["communication_seconds"] > 0 < row["forward_seconds"] for row in rows), name
        parts = ("data", "forward", "backward", "communication", "optimizer")
        assert all(sum(row[f"{p}_seconds"] for p in parts) <= 1.001 * row["step_seconds"] for row in rows), name


@pytest.mark.parametrize("name", [name for name in ENGINES if name != "ddp"])
def test_averages_batches_of_a_step_and_noise_are_the_same_on_every_engine(two, logged, name):
    alike(logged, two[f"{name}-average"], two["ddp-average"])


def test_two_processes_with_two_batches_equal_one_with_four(two, logged):
    """T4: the mean is over the optimizer step, wherever its batches are."""
    alike(logged, two["alone-average"], two["ddp-average"])
    assert of(logged, two["alone-average"], "learning_rate") == of(logged, two["ddp-average"], "learning_rate")


def test_a_draft_trained_by_stage_3_is_exported_whole_and_is_stage_1s(two):
    """X6: nothing is left in shards."""
    drafts = []
    for name in ("zero1", "zero3"):
        export(two[name])  # proves the reloaded logits too
        drafts.append(read_draft_folder(RunFolder.of(two[name]).export))
    one, three = drafts
    assert one.shape == three.shape and one.target_ids.equal(three.target_ids)
    assert one.tensors.keys() == three.tensors.keys()
    for name, tensor in one.tensors.items():
        torch.testing.assert_close(tensor, three.tensors[name], rtol=2**-7, atol=1e-5, msg=name)


def test_optimizer_state_and_weights_are_saved_whole_and_in_float32(two):
    """R3: nothing loses precision, whatever the engine; T6 needs it too."""
    folders = {name: RunFolder.of(config).complete_checkpoints()[-1] for name, config in two.items()}
    from safetensors.torch import load_file

    for name, folder in folders.items():
        state, draft = load_file(folder / "optimizer.safetensors"), read_checkpoint(folder)
        assert {t.dtype for t in [*state.values(), *draft.tensors.values()]} == {torch.float32}, name
        for key, tensor in draft.tensors.items():
            assert state[f"{key}/exp_avg"].shape == state[f"{key}/exp_avg_sq"].shape == tensor.shape, (name, key)
            assert state[f"{key}/step"] == read_checkpoint(folder).state["step"]
    norm = read_checkpoint(folders["zero3"]).tensors["midlayer.hidden_norm.weight"]
    assert (norm != 1).all()


# ---- going on --------------------------------------------------------------------------------------------------------

RESUMED = ["fsdp2", "zero1", "zero3"]


@pytest.fixture(scope="module")
def stopped(place, ranks):
    """Engines stopped twice on two processes, and straight; one run went through every engine, the last alone."""
    runs = {f"{name}-{kind}": place(f"{name}-{kind}", **SHORT, **ENGINES[name])
            for name in RESUMED for kind in ("straight", "stopped")}  # fmt: skip
    jobs = []
    for name in RESUMED:
        jobs.append({"config": runs[f"{name}-straight"]})
        jobs += [{"config": runs[f"{name}-stopped"], "term": step} for step in (3, 6, None)]
    runs["through"] = place("through", **SHORT)
    for step, name in ((2, "ddp"), (4, "zero2"), (6, "fsdp2"), (8, "zero3")):
        jobs.append({"config": place("through", **SHORT, **ENGINES[name]), "term": step})
    ranks(2, *jobs)
    ranks(1, {"config": place("through", grad_accum_steps=2, **SHORT, **ENGINES["zero1"])})
    return runs


@pytest.mark.parametrize("name", RESUMED)
def test_a_stopped_training_goes_on_bit_for_bit(stopped, weights, figures, name):
    one, other = stopped[f"{name}-straight"], stopped[f"{name}-stopped"]
    assert weights(one) == weights(other) and figures(one) == figures(other)


def test_a_training_goes_on_with_any_engine_and_number_of_processes(stopped, logged):
    """R2: two processes by DDP, ZeRO-2, FSDP2, ZeRO-3, then one by ZeRO-1."""
    assert len(of(logged, stopped["through"], "loss")) == 12
    alike(logged, stopped["through"], stopped["fsdp2-straight"])


def test_shares_of_unequal_size_are_saved_and_gone_on_from(place, ranks, logged, weights):
    """Three processes divide no size of this draft: shares differ, and the last one is padded."""
    options = {"epochs": 3, "ema_decay": 0.9, "save_interval": 4, "eval_interval": 5}
    runs, jobs = {}, []
    for name in ("fsdp2", "zero2", "zero3"):
        runs[name] = [place(f"{name}-three-{kind}", **options, **ENGINES[name]) for kind in ("straight", "stopped")]
        jobs += [{"config": runs[name][0]}, {"config": runs[name][1], "term": 3}, {"config": runs[name][1]}]
    ranks(3, *jobs)
    alone = place("three-alone", grad_accum_steps=3, **options)
    train(alone)
    for name, (straight, stopped) in runs.items():
        assert weights(straight) == weights(stopped), name
        alike(logged, stopped, alone)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("name", ["ddp", "zero2"])
def test_a_training_killed_by_sigkill_goes_on_bit_for_bit(place, ranks, weights, figures, name, processes):
    """R3, and every sample once an epoch, whatever was killed on the way."""
    straight, killed = (place(f"{name}-{processes}-{kind}", **SHORT, **ENGINES[name]) for kind in ("whole", "killed"))
    ranks(processes, {"config": straight}, {"config": killed, "kill": 7}, dies=True)
    ranks(processes, {"config": killed})
    assert weights(straight) == weights(killed) and figures(straight) == figures(killed)
    assert seen(killed, processes) == seen(straight, processes)
    steps = seen(killed, processes)
    samples = [name for _, names in sorted(steps.items()) for name in names]
    epoch = len(samples) // SHORT["epochs"]
    epochs = [samples[at : at + epoch] for at in range(0, len(samples), epoch)]
    assert len(epochs) == SHORT["epochs"] and all(len(set(ids)) == epoch == 20 for ids in epochs)


def seen(config, processes):
    """Optimizer step -> ids of the samples of all ranks; a step that was taken again counts as it was last."""
    steps = {}
    for rank in range(processes):
        lines = (RunFolder.of(config).root / f"seen-{rank}.jsonl").read_text().splitlines()
        own = {row["step"]: row["ids"] for row in map(json.loads, lines)}
        for step, ids in own.items():
            steps.setdefault(step, []).extend(ids)
    return {step: sorted(ids) for step, ids in steps.items()}
