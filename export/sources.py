"""Where a draft can come from: a draft folder, a checkpoint of ours, of TorchSpec, or of DeepSpeed."""

from pathlib import Path
from typing import Literal

from draftsmith.core.checkpoint import DRAFT, read_checkpoint
from draftsmith.core.distributed import is_distributed, load_distributed
from draftsmith.core.draft_folder import CONFIG, LayerIdConvention, read_draft, read_draft_folder
from draftsmith.core.errors import UserError
from draftsmith.core.run import COMPLETE
from draftsmith.core.target import Target
from draftsmith.export.draft import Draft, from_checkpoint, from_folder
from draftsmith.export.zero import is_zero, load_zero

Kind = Literal["ours", "distributed", "zero", "folder"]


def read_source(
    source: Path, target: Target | None, convention: LayerIdConvention | None, draft_config: Path | None
) -> Draft:
    """Read a draft from wherever it lies.

    Args:
        source: a folder of any kind that is known.
        target: its target, where it is known.
        convention: of the source's layer ids; None: as the source says, else TorchSpec's own (SGLang's) for its
            checkpoints and vLLM's for the rest.
        draft_config: config.json of a checkpoint that has none beside it.

    Raises:
        UserError: it is of no known kind, or incomplete.
    """
    match kind_of(source):
        case "ours":
            if not (source / COMPLETE).is_file():
                raise UserError(f"{source}: an incomplete checkpoint.", "Name one with its COMPLETE marker.")
            return from_checkpoint(read_checkpoint(source))
        case "distributed":
            tensors, config = load_distributed(source), draft_config or _beside(source)
            return from_folder(read_draft(tensors, config, target, convention or "sglang"), str(source))
        case "zero":
            config = draft_config or _beside(source)
            return from_folder(read_draft(load_zero(source), config, target, convention), str(source))
        case "folder":
            return from_folder(read_draft_folder(source, target, convention), str(source))


def kind_of(source: Path) -> Kind:
    """What a folder holds.

    Raises:
        UserError: nothing that is known.
    """
    if (source / DRAFT).is_file():
        return "ours"
    if is_distributed(source):
        return "distributed"
    if is_zero(source):
        return "zero"
    if (source / CONFIG).is_file():
        return "folder"
    raise UserError(
        f"{source}: neither a draft folder ({CONFIG}) nor a checkpoint of draftsmith, TorchSpec or DeepSpeed.",
        "Check the path.",
    )


def _beside(source: Path) -> Path:
    places = [source / CONFIG, source.parent / CONFIG]
    found = next((p for p in places if p.is_file()), None)
    if found is None:
        raise UserError(
            f"{source}: a checkpoint without a config.json, which says what its tensors are.",
            "Name the draft's config.json with --draft-config.",
        )
    return found
