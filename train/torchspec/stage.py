"""`train` with TorchSpec: write what it reads, start it, follow it, and take its checkpoints over as ours."""

import shutil
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file

from draftsmith.core.atomic import write_atomic, write_json, write_text
from draftsmith.core.checkpoint import build_objective, read_checkpoint
from draftsmith.core.config import Config
from draftsmith.core.errors import StageFailed
from draftsmith.core.lineage import check_trained, check_upstream, train_inputs
from draftsmith.core.manifest import read_manifest, require_manifest, write_manifest
from draftsmith.core.progress import say
from draftsmith.core.rope import rotary_embedding
from draftsmith.core.run import COMPLETE, RunFolder
from draftsmith.core.target import load_tokenizer, resolve_target
from draftsmith.core.target_weights import load_target_weights
from draftsmith.core.vocabulary import vocabulary_to_train
from draftsmith.train.signals import Signals
from draftsmith.train.torchspec import entry
from draftsmith.train.torchspec.checkpoints import convert, newest_whole, resume_from, write_start
from draftsmith.train.torchspec.config import batch_samples, context_length, draft_json
from draftsmith.train.torchspec.follow import Follower
from draftsmith.train.torchspec.launch import Job
from draftsmith.train.torchspec.plan import Plan, make_plan
from draftsmith.train.torchspec.rows import cache_path, write_cache, write_rows
from draftsmith.train.torchspec.there import require

YAML, ASIDE, LOG = "torchspec.yaml", "aside.safetensors", "log.txt"
_POSITIONS = 64  # of the rope's table, that are compared


def train(config: Config) -> None:
    """Train the draft on TorchSpec; goes on from its newest whole checkpoint.

    Raises:
        UserError: the samples or the held-out samples' states are missing or do not fit, or TorchSpec cannot do this.
        StageFailed: TorchSpec ended before the training was done, or trained something else.
    """
    vocabulary_to_train(config, RunFolder.of(config), resolve_target(config.target))
    plan = make_plan(config)
    states = require_manifest(plan.run.hidden_states, "capture", "train")
    check_upstream(config, plan.run, plan.target, states)
    inputs = train_inputs(config, plan.run)
    if _is_done(plan, inputs):
        return
    if manifest := read_manifest(plan.run.torchspec):
        check_trained(plan.run, plan.run.torchspec, manifest["inputs"], inputs)
    require(config)
    plan.run.open(config)
    write_inputs(plan, states["last_state"]["norm_form"])
    write_manifest(plan.run.torchspec, "train", inputs, {"command": plan.command()})
    done = plan.newest.step if plan.newest else 0
    if plan.newest:
        resume_from(plan.newest)
        say(f"draft: TorchSpec goes on from step {done} of {plan.steps} ({plan.newest.folder})")
    say(f"torchspec: {plan.shown()}")
    finished, stopped = done == plan.steps, False
    if not finished:
        finished, stopped = _run(plan, done)
    step = take_over(plan, states, inputs)
    if stopped:
        kept = (
            f"step {step} of {plan.steps} is saved, and the same command goes on from it" if step else "none is saved"
        )
        say(f"draft: stopped by SIGTERM; {kept}")
        return
    if step != plan.steps:
        raise StageFailed(f"TorchSpec's newest whole checkpoint is of step {step}, not of {plan.steps}; {_see(plan)}")
    made = {"checkpoint": f"step-{step:07d}", "steps": step, "batches_per_step": batch_samples(config)}
    write_manifest(plan.run.checkpoints, "train", inputs, made)
    say(f"draft: {step} steps -> {plan.run.checkpoints}/step-{step:07d}")


def _is_done(plan: Plan, inputs: dict[str, Any]) -> bool:
    complete = plan.run.complete_checkpoints()
    if not complete:
        return False
    checkpoint = read_checkpoint(complete[-1])
    check_trained(plan.run, checkpoint.folder, checkpoint.state["inputs"], inputs)
    if checkpoint.state["step"] < checkpoint.state["total_steps"]:
        return False
    say(f"draft: {checkpoint.folder} (already there)")
    return True


def write_inputs(plan: Plan, norm_form: str) -> None:
    """Everything that TorchSpec is given: YAML, rows and their cache, draft config, first checkpoint, entry script."""
    folder, files, tree = plan.folder, plan.files, plan.tree()
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("cache-*"):
        if old != files.cache:
            shutil.rmtree(old)
    tokenizer = load_tokenizer(plan.target, plan.config.target)
    for path, samples in ((files.rows, plan.train), (files.eval_rows, plan.held_out)):
        if path is not None:
            write_rows(path, samples, tokenizer)
            write_cache(cache_path(path, tree), samples)
    write_json(files.draft, draft_json(plan.shape))
    write_text(folder / YAML, yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))
    write_atomic(folder / "entry.py", lambda tmp: shutil.copyfile(str(entry.__file__), tmp))
    tensors = _aside(plan)
    write_atomic(folder / ASIDE, lambda tmp: save_file(tensors, tmp))
    if plan.newest is None:
        shutil.rmtree(files.output, ignore_errors=True)  # of a training that was killed before it had saved
        _write_start(plan, folder / "start", norm_form)


def _aside(plan: Plan) -> dict[str, torch.Tensor]:
    """What `entry.py` needs beside the YAML: some of the rope's table, and the vocabulary."""
    assert plan.mapping is not None
    last = min(context_length(plan.config), plan.shape.max_position_embeddings) - 1
    positions = torch.linspace(0, last, min(_POSITIONS, last + 1)).long()
    rotary = rotary_embedding(plan.shape.rope, plan.shape.rotary_dim, plan.shape.max_position_embeddings)
    cos, sin = rotary(torch.zeros(1), positions[None])
    tensors = {"positions": positions, "cos": cos[0].contiguous(), "sin": sin[0].contiguous()}
    if not plan.mapping.is_full:
        tensors |= {"d2t": torch.from_numpy(plan.mapping.d2t), "t2d": torch.from_numpy(plan.mapping.t2d)}
    return tensors


def _write_start(plan: Plan, folder: Path, norm_form: str) -> None:
    """The draft's first weights: ours, by `draft.init`; TorchSpec's own are random whatever is asked."""
    from draftsmith.train.stage import init_from_target

    assert plan.mapping is not None
    ids = torch.from_numpy(plan.mapping.target_ids)
    with torch.random.fork_rng():
        torch.manual_seed(plan.config.run.seed)
        objective = build_objective(plan.target, plan.shape, ids, norm_form)
    if plan.config.draft.init == "target":
        init_from_target(objective, plan.target, ids)
    embedding = load_target_weights(plan.target).embed_VH
    shutil.rmtree(folder, ignore_errors=True)
    write_start(folder, {**objective.draft.state_dict(), "embed_tokens.weight": embedding}, plan.mapping)


def _run(plan: Plan, done: int) -> tuple[bool, bool]:
    """Start it and follow it; whether it came to its end, and whether SIGTERM asked us to stop."""
    theirs = plan.config.train.torchspec
    log = plan.folder / LOG
    follower = Follower(plan, done)
    with Signals() as signals, Job(plan.command(), log, plan.environment(), theirs.stop_seconds) as job:
        with follower.shown():
            for line in job.lines():
                follower.take(line)
                if signals.end or follower.completed:
                    break
        if follower.completed:
            job.wait()  # it ends by itself; where it hangs while it cleans up, the block ends it
            return True, False
        if signals.end:
            return False, True
        code = job.process.wait()
    raise StageFailed(f"TorchSpec ended with code {code} at step {follower.step}: {follower.reason()}; {_see(plan)}")


def take_over(plan: Plan, states: dict[str, Any], inputs: dict[str, Any]) -> int:
    """Convert TorchSpec's newest whole checkpoint into ours; the steps it has, 0 where there is none."""
    newest = newest_whole(plan.folder / "output" / "checkpoints")
    if newest is None:
        return 0
    assert plan.mapping is not None
    folder = plan.run.checkpoints / f"step-{newest.step:07d}"
    if not (folder / COMPLETE).is_file():
        state = {
            "step": newest.step,
            "total_steps": plan.steps,
            "skipped_in_a_row": 0,
            "batches_per_step": batch_samples(plan.config),
            "inputs": inputs,
            "skipped": 0,
            "best": None,
        }
        described = {"layer_ids": plan.layer_ids, "norm_form": states["last_state"]["norm_form"]}
        weights = load_target_weights(plan.target)
        plan.run.checkpoints.mkdir(parents=True, exist_ok=True)
        convert(newest, folder, plan.shape, plan.mapping, weights, described, state)
        say(f"draft: {newest.folder} -> {folder}")
    for old in plan.run.complete_checkpoints()[: -plan.config.train.keep_checkpoints]:
        shutil.rmtree(old)
    return newest.step


def _see(plan: Plan) -> str:
    return f"its messages are in {plan.folder / LOG} and {plan.folder / 'logs'}. The same command goes on."
