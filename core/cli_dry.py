"""`draftsmith STAGE --dry-run`: what a stage would run, as JSON; nothing is started, fetched or written.

Like the other modules of the command line it imports a stage when it is asked for. The target need not be here:
`--target-config` names its config.json.
"""

import json
import os
import shlex
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from draftsmith.core.capturable import check_capturable
from draftsmith.core.cli_spool import spool_refusal
from draftsmith.core.commands import with_config
from draftsmith.core.config import Config
from draftsmith.core.config_io import load_config
from draftsmith.core.draft_shape import DraftShape, resolve_shape
from draftsmith.core.named import check_paths
from draftsmith.core.plan import described_folder, target_shape
from draftsmith.core.run import RunFolder
from draftsmith.core.sizes import draft_parameters
from draftsmith.core.target import Target, context_of, resolve_layer_ids

DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be run, and run nothing.")]
TargetConfigFile = Annotated[
    Path | None, typer.Option("--target-config", help="With --dry-run: the target's config.json, where it is not here.")
]


def dry_run(
    stage: str,
    file: Path,
    overrides: list[str] | None,
    target_config: Path | None,
    fresh: bool = False,
    draft: Path | None = None,
) -> None:
    """Check what can be checked without the target's weights, and print what the stage would do.

    Args:
        stage: prepare, capture, train, eval or export; train of TorchSpec prints its YAML and its command.
        file: the config.
        overrides: section.key=value.
        target_config: the target's config.json or its folder; None: as the config names the target.
        fresh: the stage's own output would be made anew.
        draft: of eval: the folder of another draft than the run's.

    Raises:
        UserError: the config, the target's shape, the draft's shape, or what the stage finds in the run's folder would
            be refused.
    """
    from draftsmith.core.there import STAGES, look_at
    from draftsmith.train import dry_run as training

    config = load_config(file, overrides)
    if stage == "train":
        training.check(config)
        if config.train.engine == "torchspec":
            return training.dry_run(_with_target(config, target_config))
    check_paths(config, target=target_config is None, sources=False)
    target = target_shape(config.target, target_config)
    layer_ids = resolve_layer_ids(config.capture, target.num_layers)
    vocab = min(config.data.draft_vocab_size or target.vocab_size, target.vocab_size)
    shape = resolve_shape(config.draft, target, len(layer_ids), vocab)
    run = RunFolder.of(config)
    there = look_at(config, run, target, target_config is not None)
    for needed in STAGES[: STAGES.index(stage) + (not fresh)]:
        if why := there.get(needed):
            raise why
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    fits = stage in ("capture", "train") and "prepare" in there
    if fits and (refused := spool_refusal(config, run, target, layer_ids, processes)):
        raise refused
    told: dict[str, Callable[..., dict[str, Any]]] = {
        "prepare": _prepare, "capture": _capture, "train": _train, "export": _export,
        "eval": partial(_eval, draft=draft),
    }  # fmt: skip
    made = {
        "stage": stage,
        "run": str(run.root),
        "there": [name for name, why in there.items() if why is None],
        "does_not_fit": {name: with_config(str(why)) for name, why in there.items() if why},
        **told[stage](config, run, target, layer_ids, shape),
    }
    if os.environ.get("RANK", "0") == "0":  # under torchrun every process comes here
        print(json.dumps(made, indent=2))


def _with_target(config: Config, target_config: Path | None) -> Config:
    if target_config is None:
        return config
    folder = described_folder(target_config)
    return config.model_copy(update={"target": config.target.model_copy(update={"path": str(folder)})})


def _engine(config: Config) -> dict[str, Any]:
    target = config.target
    return {"model": target.path, "revision": target.revision, "dtype": target.dtype,
            "tensor_parallel_size": target.tensor_parallel, **target.engine_args}  # fmt: skip


def _prepare(config: Config, run: RunFolder, target: Target, layer_ids: list[int], shape: DraftShape) -> dict[str, Any]:
    data = config.data
    asked: dict[str, Any] = {"vllm": {**_engine(config), "max_model_len": data.max_length}}
    if data.server:
        asked = {"server": data.server.model_dump()}
    return {
        "sources": [s.model_dump(exclude_defaults=True) for s in data.sources],
        "replies": {"by": "the source"} if data.replies == "keep" else asked,
        "sampling": data.sampling.model_dump(),
        "template": {"file": config.target.chat_template, "variables": config.target.chat_template_kwargs,
                     "reasoning_parser": config.target.reasoning_parser},
        "longest_sample": data.max_length,
        "context": context_of(target.hf_config),
        "draft_vocabulary": shape.draft_vocab_size,
        "writes": [str(run.samples), str(run.vocab_mapping)],
    }  # fmt: skip


def _capture(config: Config, run: RunFolder, target: Target, layer_ids: list[int], shape: DraftShape) -> dict[str, Any]:
    from draftsmith.hidden_state_capture.driver import Job, engine_args

    check_capturable(config.capture, target)
    job = Job(config, target, layer_ids, run.samples, run.hidden_states, 0, config.capture.data_parallel, 0)
    return {
        "mode": config.capture.mode,
        "engines": config.capture.data_parallel,
        "gpus": config.capture.spool_gpus or config.capture.data_parallel * config.target.tensor_parallel,
        "vllm": {**_engine(config), **engine_args(job, 0, spool=config.capture.mode == "spool")},
        "writes": [str(run.hidden_states), *([str(run.spool)] if config.capture.mode == "spool" else [])],
    }


def _train(config: Config, run: RunFolder, target: Target, layer_ids: list[int], shape: DraftShape) -> dict[str, Any]:
    sizes = draft_parameters(shape)
    train = config.train.model_dump(mode="json")
    return {
        "draft": {"parameters": sum(sizes.values()), **asdict(shape)},
        "layer_ids": layer_ids,
        "train": train,
        "several_gpus": "make train NPROC=GPUS CONFIG=FILE",
        "starts_a_capture": config.capture.mode == "spool" and config.capture.spool_capture == "train",
        "writes": [str(run.checkpoints), str(run.metrics)],
    }


def _eval(
    config: Config, run: RunFolder, target: Target, layer_ids: list[int], shape: DraftShape, draft: Path | None
) -> dict[str, Any]:
    from draftsmith.eval.subject import report_place

    wanted, model = config.eval, draft or run.export
    engines = [{**_engine(config), "speculative_config": _speculative(model, k)} for k in wanted.k]
    return {
        "draft": str(model),
        "replayed": {"k": sorted({*range(1, wanted.replay_k + 1), *wanted.k}), "temperature": wanted.temperature},
        "served": {"server": wanted.server.model_dump()} if wanted.server else {"vllm": [_engine(config), *engines]},
        "passes": [
            {"k": k, "temperature": t, "concurrency": c, "sets": ["held_out", *wanted.sets]}
            for k in (0, *wanted.k) for t in wanted.temperature for c in wanted.concurrency
        ],
        "writes": [str((report_place(run, draft) if draft else run).eval)],
    }  # fmt: skip


def _export(config: Config, run: RunFolder, target: Target, layer_ids: list[int], shape: DraftShape) -> dict[str, Any]:
    import torch

    from draftsmith.export.draft import Draft
    from draftsmith.export.layout import folder_config

    draft = Draft(shape, {}, torch.empty(0), layer_ids, "a dry run")
    speculative = json.dumps(_speculative(run.export, config.eval.k[0]))
    serve = ["vllm", "serve", config.target.path, "--tensor-parallel-size", str(config.target.tensor_parallel)]
    return {
        "checkpoint": config.export.checkpoint,
        "config.json": folder_config(draft, target, config.export, config.eval.k[0]),
        "proof": config.export.verify,
        "serve": shlex.join([*serve, "--speculative-config", speculative]),
        "writes": [str(run.export)],
    }


def _speculative(draft: Path, k: int) -> dict[str, Any]:
    return {"method": "eagle3", "model": str(draft), "num_speculative_tokens": k}
