"""What is evaluated: the draft that the run has trained and exported, or any EAGLE3 draft folder for its target."""

from dataclasses import dataclass, replace
from pathlib import Path

from draftsmith.core.atomic import sha256_file, sha256_json
from draftsmith.core.checkpoint import Checkpoint, chosen_checkpoint, read_checkpoint
from draftsmith.core.config import Config
from draftsmith.core.draft_folder import CONFIG, refuse_sglang_ids
from draftsmith.core.errors import UserError
from draftsmith.core.manifest import manifest_hash, require_manifest
from draftsmith.core.run import RunFolder


@dataclass(frozen=True)
class Subject:
    """A draft to be evaluated.

    Attributes:
        folder: what a server loads.
        name: what the report calls it: its checkpoint, or its folder.
        weights_sha256: of its weights.
        inputs: what decides the report, of the draft.
        checkpoint: as trained; None: a draft of another run or of somebody else.
    """

    folder: Path
    name: str
    weights_sha256: str
    inputs: dict[str, str]
    checkpoint: Checkpoint | None


def own_draft(config: Config, run: RunFolder) -> Subject:
    """The run's export.

    Raises:
        UserError: it is not there, or is of another checkpoint than the config names.
    """
    exported = require_manifest(run.export, "export", "eval")
    checkpoint = read_checkpoint(chosen_checkpoint(run, config.export.checkpoint, "eval"))
    if checkpoint.folder.name != exported["checkpoint"]:
        raise UserError(
            f"{run.export} holds {exported['checkpoint']}, and export.checkpoint is {checkpoint.folder.name} by now.",
            "Export again with `draftsmith export --fresh`.",
        )
    refuse_sglang_ids(run.export)
    inputs = {"export_manifest_sha256": manifest_hash(run.export)}
    return Subject(run.export, exported["checkpoint"], exported["weights_sha256"], inputs, checkpoint)


def other_draft(folder: Path) -> Subject:
    """Any draft's folder.

    Raises:
        UserError: it is no draft that vLLM would serve.
    """
    if not (folder / CONFIG).is_file():
        raise UserError(f"--draft {folder}: no draft (no {CONFIG}).", "Give the folder of an EAGLE3 draft.")
    refuse_sglang_ids(folder)
    files = sorted(f for kind in ("*.safetensors", "*.bin") for f in folder.glob(kind))
    weights = sha256_json({f.name: sha256_file(f) for f in files})
    inputs = {"draft_config_sha256": sha256_file(folder / CONFIG), "draft_weights_sha256": weights}
    return Subject(folder, str(folder), weights, inputs, None)


def report_place(run: RunFolder, draft: Path) -> RunFolder:
    """The run with a report folder of the draft's own, `eval-NAME/`, so that the run's own report stays."""
    parts = draft.resolve().parts
    name = parts[-1] if parts[-1] != "export" or len(parts) < 3 else parts[-2]
    return replace(run, report=f"eval-{name}")
