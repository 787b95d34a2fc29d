"""The proof, as far as it needs no engine: complete by vLLM's contract, and the trained function after reloading.

`verification.json`:
    passed:   every check that was made is within its bound; null where none was made
    served:   `checked`, or why the engine was not asked
    summary:  which parts are proven, which are not and why, in one line
    checks:   [{name, passed, measured, bound, detail, why}], passed is null where a figure is not judged, and why says
              the reason
    problems: one line for each check that failed
    settings, versions
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.core.batch import Batch
from draftsmith.core.draft import DraftModel
from draftsmith.core.draft_folder import CONFIG, read_draft_folder
from draftsmith.core.draft_shape import DraftShape
from draftsmith.core.manifest import package_versions
from draftsmith.core.target import Target
from draftsmith.core.tensor_files import load_tensors
from draftsmith.core.unroll import unroll
from draftsmith.export.contract import find_problems
from draftsmith.export.draft import Draft


@dataclass(frozen=True)
class Check:
    """One figure of the proof.

    Attributes:
        name: what was checked.
        passed: whether it is within its bound; None: it is not judged.
        measured: the figures.
        bound: what they were judged by.
        detail: one sentence, for people.
        why: it is not judged; empty where it is.
    """

    name: str
    passed: bool | None
    measured: Any
    bound: Any
    detail: str
    why: str = ""


def verification(checks: list[Check], served: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The content of verification.json."""
    judged = [c.passed for c in checks if c.passed is not None]
    made = [asdict(c) for c in checks]
    return {
        "passed": all(judged) if judged else None,
        "served": served,
        "summary": summary(made, served),
        "checks": made,
        "problems": [f"{c.name}: {c.detail}" for c in checks if c.passed is False],
        "settings": settings,
        "versions": package_versions(),
    }


_PARTS = {
    "contract": "tensors",
    "reload": "reloaded values",
    "served states": "states on vLLM",
    "served logits": "logits on vLLM",
    "served drafts": "drafts on vLLM",
    "served acceptance": "acceptance on vLLM",
}


def summary(checks: list[dict[str, Any]], served: str) -> str:
    """Which parts are proven and which are not, and why: the closing line of the stage, and a line of the card.

    Args:
        checks: of verification.json.
        served: of verification.json.
    """
    proven = [_part(c) for c in checks if c["passed"]]
    said = [f"proven: {', '.join(proven)}"] if proven else []
    said += [f"FAILED: {_part(c)}" for c in checks if c["passed"] is False]
    said += [f"{_part(c)} not judged: {c.get('why') or c['detail']}" for c in checks if c["passed"] is None]
    if served != "checked":
        said.append(f"not compared on a server ({served})")
    return "; ".join(said)


def _part(check: dict[str, Any]) -> str:
    name, measured = str(_PARTS.get(check["name"], check["name"])), check["measured"]
    if check["name"] == "served drafts":
        return f"{name} {sum(measured['equal'])} of {sum(measured['compared'])}"
    return name


def contract_check(folder: Path, draft: Draft) -> Check:
    """Tensors, shapes, mapping and config.json of a written folder are what vLLM needs of this very draft."""
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    problems = find_problems(draft.shape, load_tensors(folder), config, draft.layer_ids)
    detail = "; ".join(problems) or "every tensor and key that vLLM needs is there, and no other"
    return Check("contract", not problems, {"problems": problems}, {"problems": []}, detail)


def tensors_check(folder: Path, draft: Draft) -> Check:
    """Reloaded, every tensor is the draft's, rounded to bfloat16 and no more."""
    read = read_draft_folder(folder)
    wrong = sorted(
        name
        for name in draft.tensors.keys() | read.tensors.keys()
        if name not in read.tensors
        or name not in draft.tensors
        or not torch.equal(read.tensors[name], draft.tensors[name].to(torch.bfloat16).float())
    )
    same = (read.shape, read.layer_ids) == (draft.shape, draft.layer_ids)
    passed = not wrong and same and torch.equal(read.target_ids, draft.target_ids)
    detail = "the folder reads back as the draft" if passed else f"it reads back otherwise ({', '.join(wrong[:5])})"
    return Check("reload", passed, {"different_tensors": len(wrong), "same_shape_and_layers": same}, {}, detail)


@torch.no_grad()
def logits_check(
    folder: Path, draft: Draft, target: Target, embed_VH: Tensor, batch: Batch, steps: int, bound: float
) -> Check:
    """Logits of the reloaded folder against the trainer's own, over all steps of one held-out batch."""
    read = read_draft_folder(folder, target)
    trained, reloaded = model_of(draft.shape, draft.tensors, embed_VH), model_of(read.shape, read.tensors, embed_VH)
    off = size = 0.0
    agree = rows = 0
    for a, b in zip(unroll(trained, batch, steps), unroll(reloaded, batch, steps), strict=True):
        theirs, ours = trained.lm_head(a.hidden_RH), reloaded.lm_head(b.hidden_RH)
        off, size = off + float((ours - theirs).square().sum()), size + float(theirs.square().sum())
        agree, rows = agree + int((ours.argmax(-1) == theirs.argmax(-1)).sum()), rows + len(theirs)
    error = (off / size) ** 0.5 if size else 0.0
    same_ids = torch.equal(read.target_ids, draft.target_ids)
    measured = {"relative_error": error, "argmax_agreement": agree / rows if rows else 1.0, "rows": rows}
    # In this order, so that a NaN fails.
    passed = error <= bound and same_ids
    detail = f"reloaded logits are off by {error:.4f} over {rows} rows"
    if not passed:
        detail += " (export.max_logit_error)" if same_ids else ", and its tokens are others"
    return Check("logits", passed, measured, {"relative_error": bound}, detail)


def model_of(shape: DraftShape, tensors: dict[str, Tensor], embed_VH: Tensor) -> DraftModel:
    """Our model with these parameters, in float32."""
    draft = DraftModel(shape, embed_VH)
    draft.load_state_dict(tensors)
    return draft.eval()
