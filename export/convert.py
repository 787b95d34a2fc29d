"""`export convert`: any EAGLE3 draft written anew, in either layout and either convention of layer ids."""

from dataclasses import replace
from pathlib import Path

import torch

from draftsmith.core.atomic import atomic_folder, write_json, write_text
from draftsmith.core.config import ExportConfig
from draftsmith.core.draft_folder import LayerIdConvention
from draftsmith.core.errors import StageFailed, UserError
from draftsmith.core.progress import say
from draftsmith.core.target import Target
from draftsmith.core.target_weights import load_target_weights
from draftsmith.export.card import Facts, model_card
from draftsmith.export.draft import Draft
from draftsmith.export.layout import draft_tensors, folder_config, write_draft
from draftsmith.export.licence import target_licence
from draftsmith.export.sources import read_source
from draftsmith.export.verify import contract_check, tensors_check, verification

_EMBEDDING = "embed_tokens.weight"


def convert_draft(
    source: Path,
    folder: Path,
    options: ExportConfig,
    target: Target | None,
    convention: LayerIdConvention | None = None,
    draft_config: Path | None = None,
    fresh: bool = False,
) -> None:
    """Read a draft of any source, write it, and check that it reads back as the same.

    Args:
        source: draft folder, or checkpoint of ours, of TorchSpec or of DeepSpeed.
        folder: where to write.
        options: format, convention of the layer ids and licence.
        target: the draft's target; None: unknown, which the plain layout does without.
        convention: of the source's layer ids; None: as the source says.
        draft_config: config.json of a checkpoint that has none.
        fresh: replace what is in `folder`.

    Raises:
        UserError: the source cannot be read, or the folder is not empty.
        StageFailed: what was written is not what was read; nothing is left.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())) and not fresh:
        raise UserError(f"{folder} is there already.", "Name another folder, or add --fresh to replace it.")
    if folder.resolve() == source.resolve() or folder.resolve() in source.resolve().parents:
        raise UserError(f"{folder} holds the source.", "Name another folder.")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "config.json").is_file():
        raise UserError(
            f"{folder} holds something else than a draft.", "Name another folder; --fresh replaces drafts only."
        )
    draft = read_source(source, target, convention, draft_config)
    if target is not None:
        draft = _without_shared_embedding(draft, target)
    described = folder_config(draft, target, options, options.verify_k)
    with atomic_folder(folder) as tmp:
        write_draft(tmp, draft_tensors(draft), described)
        settings = {"source": str(source), "format": options.format, "layer_ids": draft.layer_ids}
        proof = verification(
            [contract_check(tmp, draft), tensors_check(tmp, draft)],
            "not run: a conversion has no trainer and no samples to compare with",
            settings,
        )
        if not proof["passed"]:
            raise StageFailed(f"{source} was not converted: {'; '.join(proof['problems'])}.")
        write_json(tmp / "verification.json", proof)
        licence = options.license or (target_licence(target) if target else None)
        facts = Facts(replace(draft, origin=source.name), target, options, licence, proof)
        write_text(tmp / "README.md", model_card(facts))
    say(f"export: {source} -> {folder} ({options.format}, {options.layer_id_convention}'s layer ids)")


def _without_shared_embedding(draft: Draft, target: Target) -> Draft:
    """The draft without an embedding that is the target's own, which a server shares then."""
    own = draft.tensors.get(_EMBEDDING)
    if own is None:
        return draft
    theirs = load_target_weights(target).embed_VH
    if own.shape != theirs.shape or not torch.equal(own.to(torch.bfloat16), theirs.to(torch.bfloat16)):
        return draft
    tensors = {name: tensor for name, tensor in draft.tensors.items() if name != _EMBEDDING}
    return replace(draft, tensors=tensors, shape=replace(draft.shape, own_embedding=False))
