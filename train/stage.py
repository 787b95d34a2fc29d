"""`train`: hidden states -> draft checkpoints."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed

from draftsmith.core.checkpoint import Checkpoint, build_objective, optimizer_state, own_weights, read_checkpoint
from draftsmith.core.config import Config
from draftsmith.core.errors import ProcessGone, StageFailed, UserError
from draftsmith.core.lineage import check_trained, check_upstream, train_inputs
from draftsmith.core.losses import LossOptions
from draftsmith.core.manifest import read_manifest, write_manifest
from draftsmith.core.objective import Objective
from draftsmith.core.progress import say
from draftsmith.core.run import RunFolder
from draftsmith.core.target import Target, resolve_target
from draftsmith.core.target_weights import load_target_weights
from draftsmith.core.vocabulary import vocabulary_to_train
from draftsmith.hidden_state_capture.reader import HiddenStateStore
from draftsmith.train import torchspec
from draftsmith.train.average import Average
from draftsmith.train.engine import Engine, make_accelerator, open_engine
from draftsmith.train.feed import Feed, nothing_to_check, open_feed, open_store
from draftsmith.train.loop import Trainer
from draftsmith.train.metrics import Metrics
from draftsmith.train.optim import make_optimizer
from draftsmith.train.signals import end_with_launcher
from draftsmith.train.start import Start, starting_point
from draftsmith.train.state import TrainState
from draftsmith.train.step import TrainingStep, fused_dtype

# Share of the random initial fc that stays beside the identity; 0, 0.1 and 1 reach the same within seeds' noise.
_FC_REST = 0.1


def train(config: Config, check_capture: Callable[[], None] = nothing_to_check) -> None:
    """Train the draft; goes on from the newest complete checkpoint.

    Args:
        config: of the run.
        check_capture: raises what ended the capture that feeds this training.

    Raises:
        UserError: capture has not been run, or the run was trained with other settings.
        StageFailed: gradients stayed non-finite, or the capture of a spool ended.
    """
    if config.train.engine == "torchspec":
        return torchspec.train(config)
    end_with_launcher()
    run = RunFolder.of(config)
    store = open_store(config)
    target = resolve_target(config.target)
    check_upstream(config, run, target, store.manifest)
    accelerator = make_accelerator(run)
    engine = open_engine(config, accelerator)
    if accelerator.is_main_process:
        vocabulary_to_train(config, run, target)
    accelerator.wait_for_everyone()
    start = starting_point(config, run, target, store.manifest["layer_ids"])
    # What this machine cannot run is refused before anything is written.
    fused_dtype(config.train, start.shape, accelerator.device, engine.half)
    inputs = train_inputs(config, run)
    feed = open_feed(store, config, accelerator.process_index, accelerator.num_processes, check_capture)
    total = len(feed.plan) // config.train.grad_accum_steps
    if not total:
        raise UserError(f"{run.hidden_states} holds no training sample.", "Add prompts, or lower data.eval_share.")
    batches_per_step = accelerator.num_processes * config.train.grad_accum_steps
    state = TrainState(0, total, 0, batches_per_step, inputs)
    checkpoint = _newest(run, state, accelerator)
    if checkpoint and checkpoint.state["step"] == checkpoint.state["total_steps"]:
        if accelerator.is_main_process and not read_manifest(run.checkpoints):  # killed before this
            _write_manifest(run, checkpoint.state)
        say(f"draft: {checkpoint.folder} (already there)")
        return
    if accelerator.is_main_process:
        run.open(config)
    set_seed(config.run.seed)
    try:
        with _reasons(config, state):
            feed.start(checkpoint.state["step"] * config.train.grad_accum_steps if checkpoint else 0)
            trainer = _trainer(config, run, store, target, engine, feed, state, start, checkpoint)
            finished = trainer.run()
    finally:
        feed.close(finished=state.step == total)
    trainer.metrics.close()
    if not finished:
        say(f"draft: stopped by SIGTERM at step {state.step} of {total}, which is saved; the same command goes on")
        return
    if accelerator.is_main_process:
        _write_manifest(run, asdict(state))
    say(f"draft: {total} steps -> {run.checkpoints}/step-{total:07d}")


@contextmanager
def _reasons(config: Config, state: TrainState) -> Iterator[None]:
    """What ends a training from outside, said as such."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise StageFailed(
            f"training ran out of GPU memory at step {state.step + 1}; lower train.tokens_per_batch (now "
            f"{config.train.tokens_per_batch}) or data.draft_vocab_size. {error}"
        ) from None
    except RuntimeError as error:
        # Gloo has no type of its own for it.
        if not isinstance(error, torch.distributed.DistError) and "gloo" not in str(error):
            raise
        raise ProcessGone(
            f"another process of the training is gone, after step {state.step}; the same command goes on from the last "
            "checkpoint."
        ) from error


def _write_manifest(run: RunFolder, state: dict[str, Any]) -> None:
    outputs = {"checkpoint": f"step-{state['step']:07d}", "steps": state["step"]}
    outputs["batches_per_step"] = state["batches_per_step"]
    write_manifest(run.checkpoints, "train", state["inputs"], outputs)


def _newest(run: RunFolder, state: TrainState, accelerator: Accelerator) -> Checkpoint | None:
    accelerator.wait_for_everyone()  # with --fresh the main process has deleted what was there
    done = run.complete_checkpoints()
    names = gather_object([done[-1].name if done else None])
    if len(set(names)) > 1:
        raise UserError(
            f"the processes see different checkpoints in {run.checkpoints}: {', '.join(map(str, names))}.",
            "Let run.dir be a folder that all hosts share.",
        )
    if not done:
        return None
    checkpoint = read_checkpoint(done[-1])
    recorded = checkpoint.state
    check_trained(run, done[-1], recorded["inputs"], state.inputs)
    each = recorded["batches_per_step"]
    if each != state.batches_per_step and recorded["step"] < recorded["total_steps"]:
        raise UserError(
            f"{done[-1]} was trained with {each} batches a step (processes times train.grad_accum_steps), and this has "
            f"{state.batches_per_step}.",
            f"Set train.grad_accum_steps to {each} / the number of processes, or start again with "
            "`draftsmith train --fresh`, which deletes the trained draft.",
        )
    return checkpoint


def _trainer(
    config: Config,
    run: RunFolder,
    store: HiddenStateStore,
    target: Target,
    engine: Engine,
    feed: Feed,
    state: TrainState,
    start: Start,
    checkpoint: Checkpoint | None,
) -> Trainer:
    shape, target_ids = start.shape, torch.from_numpy(start.mapping.target_ids)
    norm_form = store.manifest["last_state"]["norm_form"]
    loss = LossOptions.of(config.train)
    bare = build_objective(target, shape, target_ids, norm_form, loss)
    if checkpoint:
        bare.draft.load_state_dict(own_weights(checkpoint))
        for name in ("step", "skipped_in_a_row", "skipped", "best"):
            setattr(state, name, checkpoint.state[name])
        say(f"draft: going on from step {state.step} of {state.total_steps}")
    elif start.tensors:
        bare.draft.load_state_dict(start.tensors)
        say(f"draft: starting from {config.train.init_from}, with its vocabulary of {shape.draft_vocab_size} tokens")
    elif config.draft.init == "target":
        init_from_target(bare, target, target_ids)
    bare.draft.lm_head.requires_grad_(config.draft.train_lm_head)
    accelerator = engine.accelerator
    step = TrainingStep(bare, config.train, fused_dtype(config.train, shape, accelerator.device, engine.half))
    engine.prepare(step, partial(make_optimizer, config.train))
    if checkpoint:
        engine.load_optimizer(optimizer_state(checkpoint))
    decay, kept = config.train.ema_decay, checkpoint.tensors if checkpoint else None
    average = Average(engine, decay, kept) if decay else None
    metrics, held_out = Metrics(run.metrics, accelerator, config, state.step), store.numbers("eval")
    return Trainer(
        config, accelerator, store, engine, engine.step, feed, held_out, metrics, start.mapping, state, average
    )


def init_from_target(objective: Objective, target: Target, target_ids: torch.Tensor) -> None:
    """Start as the target's early exit: its last auxiliary state, passed on by fc, through its own lm_head rows.

    The final norm starts at ones all the same. On the embedded target, replayed acceptance length after the same
    training: random fc 1.506, fc as here 1.530 (first prompt set); the target's final norm copied as well 1.622,
    ones 1.666 (second prompt set); seeds differ by 0.005.
    """
    weights, draft = load_target_weights(target), objective.draft
    hidden = draft.shape.hidden_size
    with torch.no_grad():
        draft.lm_head.weight.copy_(weights.head_VH[target_ids])
        draft.fc.weight.mul_(_FC_REST)
        draft.fc.weight[:, -hidden:] += torch.eye(hidden)
