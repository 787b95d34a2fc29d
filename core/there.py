"""What a run's folder holds already, and whether the config at hand would have made it: asked by a dry run.

The stages' own checks by their manifests, less what takes long: sources and weights of drafts are not read, and of a
target that is not here only the settings count.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from draftsmith.core import embedded
from draftsmith.core.config import Config
from draftsmith.core.errors import UserError
from draftsmith.core.lineage import NOT_OF_THE_SAMPLES, check_trained, train_inputs
from draftsmith.core.manifest import MANIFEST, check_inputs, manifest_hash, read_manifest
from draftsmith.core.run import RunFolder
from draftsmith.core.target import Target, resolve_layer_ids, resolve_target

STAGES = ("prepare", "capture", "train", "export", "eval")  # as one needs the other
# Of a source, what is found in it and not said by the config.
_FOUND = ("sha256", "revision")

Inputs = dict[str, Any]


def look_at(config: Config, run: RunFolder, target: Target, described: bool) -> dict[str, UserError | None]:
    """Stage -> None where its output is there and fits the config, else what the stage would say.

    Args:
        config: at hand.
        run: its folder.
        target: its shape.
        described: by a config.json of somewhere else: the target itself is not here.
    """
    path = config.target.path
    local = not described and (path == embedded.NAME or Path(path).expanduser().is_dir())
    made: dict[str, tuple[Any, Callable[[Inputs], Inputs]]] = {
        "prepare": (run.samples, partial(_samples, config)),
        "capture": (run.hidden_states, partial(_states, config, run, target)),
        "train": (run.checkpoints, partial(_checkpoints, config, run)),
        "export": (run.export, partial(_export, config)),
        "eval": (run.eval, partial(_report, config, run)),
    }
    found: dict[str, UserError | None] = {}
    for stage, (folder, wanted) in made.items():
        if not (folder / MANIFEST).is_file():
            continue
        try:
            manifest = read_manifest(folder) or {}
            inputs = manifest["inputs"]
            here = {**inputs, **wanted(inputs)}
            if "target" in inputs:
                here["target"] = _target(config, inputs["target"], local)
            if stage == "train":
                check_trained(run, folder, inputs, here)
            else:
                check_inputs(folder, manifest, here)
            found[stage] = None
        except UserError as error:
            found[stage] = error
    return found


def _target(config: Config, there: Inputs, local: bool) -> Inputs:
    """As the stages describe it, `dtype: auto` apart, which only an engine makes something of."""
    settings = config.target
    said = {"chat_template_kwargs": settings.chat_template_kwargs, "reasoning_parser": settings.reasoning_parser}
    if local:
        said = resolve_target(settings).fingerprint(settings)
    if settings.dtype == "auto" or there.get("dtype") == "auto":
        said["dtype"] = there.get("dtype")
    else:
        said["dtype"] = settings.dtype
    return {**there, **said}


def _samples(config: Config, there: Inputs) -> Inputs:
    data = config.data.model_dump(mode="json", exclude=NOT_OF_THE_SAMPLES)
    if len(data["sources"]) == len(there["data"]["sources"]):
        for given, known in zip(data["sources"], there["data"]["sources"], strict=True):
            given |= {key: known[key] for key in _FOUND if key in known and given["path"] == known["path"]}
    return {"data": {**there["data"], **data}, "seed": config.run.seed}


def _states(config: Config, run: RunFolder, target: Target, there: Inputs) -> Inputs:
    wanted: Inputs = {"layer_ids": resolve_layer_ids(config.capture, target.num_layers)}
    wanted["storage"] = config.capture.storage
    if "spool" in (config.capture.mode, there.get("mode")):
        wanted["mode"] = config.capture.mode
    if (run.samples / MANIFEST).is_file() and isinstance(there.get("samples_manifest_sha256"), str):
        wanted["samples_manifest_sha256"] = manifest_hash(run.samples)
    return wanted


def _checkpoints(config: Config, run: RunFolder, there: Inputs) -> Inputs:
    whole = (run.hidden_states / MANIFEST).is_file() and run.vocab_mapping.is_file()
    return train_inputs(config, run) if whole else {}


def _export(config: Config, there: Inputs) -> Inputs:
    return {"export": config.export.model_dump(mode="json", exclude={"license"})}


def _report(config: Config, run: RunFolder, there: Inputs) -> Inputs:
    sampling = config.data.sampling.model_dump(mode="json")
    wanted = {"eval": config.eval.model_dump(mode="json"), "sampling": sampling, "seed": config.run.seed}
    target = config.target
    wanted |= {"tensor_parallel": target.tensor_parallel, "engine_args": target.engine_args}
    for key, folder in (("hidden_states_manifest_sha256", run.hidden_states), ("export_manifest_sha256", run.export)):
        if key in there and (folder / MANIFEST).is_file():
            wanted[key] = manifest_hash(folder)
    return wanted
