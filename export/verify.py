"""The proof that an export is the trained draft: complete by the contract, and the same function after reloading."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.core.batch import Batch
from draftsmith.core.checkpoint import Checkpoint
from draftsmith.core.draft import DraftModel
from draftsmith.core.draft_folder import read_draft_folder
from draftsmith.core.target import Target
from draftsmith.core.target_weights import load_target_weights
from draftsmith.core.unroll import unroll


@torch.no_grad()
def reload_error(folder: Path, checkpoint: Checkpoint, target: Target, batch: Batch, steps: int) -> dict[str, Any]:
    """Logits of the reloaded export against the trainer's own, over all steps of one held-out batch.

    Returns:
        `relative_error` (Frobenius, over all logits), `argmax_agreement` and `rows`.
    """
    embed = load_target_weights(target).embed_VH
    exported = read_draft_folder(folder)
    assert torch.equal(exported.target_ids, checkpoint.target_ids)
    trained = _model(checkpoint.shape, checkpoint.tensors, embed)
    reloaded = _model(exported.shape, exported.tensors, embed)
    off = size = 0.0
    agree = rows = 0
    for a, b in zip(unroll(trained, batch, steps), unroll(reloaded, batch, steps), strict=True):
        theirs, ours = trained.lm_head(a.hidden_RH), reloaded.lm_head(b.hidden_RH)
        off, size = off + float((ours - theirs).square().sum()), size + float(theirs.square().sum())
        agree, rows = agree + int((ours.argmax(-1) == theirs.argmax(-1)).sum()), rows + len(theirs)
    return {
        "relative_error": (off / size) ** 0.5 if rows else 0.0,
        "argmax_agreement": agree / rows if rows else 1.0,
        "rows": rows,
    }


def _model(shape: Any, tensors: dict[str, Tensor], embed_VH: Tensor) -> DraftModel:
    draft = DraftModel(shape, embed_VH)
    draft.load_state_dict(tensors)
    return draft.eval()
