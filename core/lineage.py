"""Does what is on disk fit the config at hand? Asked by every stage that reads another stage's output."""

from pathlib import Path
from typing import Any

from draftsmith.core.atomic import sha256_file
from draftsmith.core.checkpoint import WEIGHTS, Checkpoint
from draftsmith.core.config import Config
from draftsmith.core.manifest import check_inputs, manifest_hash, read_manifest
from draftsmith.core.run import RunFolder
from draftsmith.core.target import Target, resolve_layer_ids
from draftsmith.core.vocabulary import recorded_vocabulary, vocabulary_inputs

# Settings of the section data that decide nothing of the samples, or what is made from them (`core/vocabulary.py`).
NOT_OF_THE_SAMPLES = {"max_skip_share", "server", "draft_vocab_size"}


def check_upstream(config: Config, run: RunFolder, target: Target, states: dict[str, Any]) -> None:
    """Refuse hidden states and samples that this config would not have made.

    Args:
        config: the config at hand.
        run: its run folder.
        target: its resolved target.
        states: manifest of `hidden_states/`.

    Raises:
        UserError: names every setting that differs.
    """
    here = {
        "target": target.fingerprint(config.target),
        "layer_ids": resolve_layer_ids(config.capture, target.num_layers),
        "storage": config.capture.storage,
    }
    samples = read_manifest(run.samples)
    if samples:
        here["samples_manifest_sha256"] = manifest_hash(run.samples)
    if "spool" in (config.capture.mode, states["inputs"].get("mode")):
        here["mode"] = config.capture.mode
    check_inputs(run.hidden_states, states, {**states["inputs"], **here})
    if samples:
        # The sources are not asked again: what counts is what was made of them.
        data = config.data.model_dump(mode="json", exclude={*NOT_OF_THE_SAMPLES, "sources"})
        check_inputs(run.samples, samples, {**samples["inputs"], "data": {**samples["inputs"]["data"], **data}})


# Settings that change what training writes or holds on the way, but not the trained draft.
_NO_INPUT = {
    "grad_accum_steps",  # times the processes it is an input: see the training's state
    "engine",
    "shard",
    "deepspeed_config",
    "log_interval",
    "eval_interval",
    "save_interval",
    "keep_checkpoints",
    "profile_steps",
    "peak_tflops",
    "trackers",
    "max_skipped_steps",
    "logits_bytes",
}


# TorchSpec's, of which only the samples of a step decide anything.
_TORCHSPEC_INPUTS = {"training_nodes", "training_gpus_per_node", "micro_batch_size", "backend", "overrides"}


def train_inputs(config: Config, run: RunFolder) -> dict[str, Any]:
    """Everything that decides the trained draft, the number of processes apart."""
    train = config.train.model_dump(mode="json", exclude=_NO_INPUT)
    theirs = train.pop("torchspec")
    if config.train.engine == "torchspec":
        train["torchspec"] = {key: theirs[key] for key in sorted(_TORCHSPEC_INPUTS)}
    return {
        "hidden_states_manifest_sha256": manifest_hash(run.hidden_states),
        **vocabulary_inputs(config, run),
        "draft": config.draft.model_dump(mode="json"),
        "train": train,
        "seed": config.run.seed,
    }


def check_training(config: Config, run: RunFolder, checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint that this config would not have trained on these states.

    Raises:
        UserError: names every setting that differs.
    """
    check_trained(run, checkpoint.folder, checkpoint.state["inputs"], train_inputs(config, run))


def check_trained(run: RunFolder, folder: Path, recorded: dict[str, Any], inputs: dict[str, Any]) -> None:
    """Refuse what was trained with other inputs.

    Args:
        run: whose training it is.
        folder: a checkpoint, or another output of the training.
        recorded: its inputs.
        inputs: `train_inputs` of the config at hand.

    Raises:
        UserError: names every setting that differs.
    """
    check_inputs(folder, {"stage": "train", "inputs": recorded_vocabulary(run, recorded, inputs)}, inputs)


def earlier_draft(export: Path) -> str | None:
    """Why an export in a run's folder is not of the draft that the run has trained by now.

    Args:
        export: the folder; one that lies beside no checkpoints is of a draft that nobody can tell.

    Returns:
        What it is of, and what there is; None: it is of the run's draft, or no export of ours.
    """
    manifest, run = read_manifest(export) if (export / "config.json").is_file() else None, RunFolder(export.parent)
    done = run.complete_checkpoints()
    if manifest is None or manifest.get("stage") != "export" or not done:
        return None
    of, inputs = manifest["checkpoint"], manifest["inputs"]
    if inputs["export"]["checkpoint"] == "last" and of != done[-1].name:
        return f"it is of {of}, and the run has {done[-1].name} by now"
    same = run.checkpoints / of
    if same in done and sha256_file(same / WEIGHTS) != inputs["weights_sha256"]:
        return f"it is of an earlier training's {of}"
    return None
