"""Reads any EAGLE3 draft folder (plain Hugging Face or `speculators` layout) into our model, as vLLM reads it.

config.json decides. A key that it leaves out gets the value that vLLM takes then, and a folder that vLLM would serve
with made-up weights, or refuse, is refused here with what is wrong.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from draftsmith.core.damage import reading
from draftsmith.core.draft import DraftModel
from draftsmith.core.draft_config import read_layer_ids, read_shape
from draftsmith.core.draft_shape import DraftShape
from draftsmith.core.errors import UserError
from draftsmith.core.speculators_format import is_speculators, to_plain
from draftsmith.core.target import Target
from draftsmith.core.tensor_files import load_tensors

LayerIdConvention = Literal["vllm", "sglang"]
CONFIG = "config.json"
# Tables of the rotary embedding, which vLLM makes itself, and what other trainers keep beside the draft.
_NOT_OURS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", "verifier_norm.weight",
             "verifier_lm_head.weight")  # fmt: skip


@dataclass(frozen=True)
class DraftFolder:
    """A draft as a server reads it.

    Attributes:
        shape: the architecture.
        tensors: float32 copies of its parameters, under the names of `DraftModel`.
        target_ids: int64 [Vd], the target id of every draft id.
        layer_ids: auxiliary layers by vLLM's ids, in column order.
        config: the plain config, whatever the layout was.
        layout: how it lies on disk.
    """

    shape: DraftShape
    tensors: dict[str, Tensor]
    target_ids: Tensor
    layer_ids: list[int]
    config: dict[str, Any]
    layout: Literal["hf", "speculators"]


def read_draft_folder(
    folder: Path, target: Target | None = None, convention: LayerIdConvention | None = None
) -> DraftFolder:
    """Read a draft folder.

    Args:
        folder: `config.json` and weights: safetensors, or torch files that hold nothing but tensors.
        target: the target that it drafts for. Needed where the folder names no layers (vLLM then takes the target's
            2, n // 2 and n - 3) or has no lm_head (it then uses the target's).
        convention: of the layer ids in config.json; None: as config.json says, else vLLM's.

    Raises:
        UserError: a file is missing or damaged, the draft is of a kind that is not modelled, or it is incomplete.
    """
    if not (folder / CONFIG).is_file():
        raise UserError(f"{folder}: no draft (no {CONFIG}).", "Run `draftsmith export` first, or give its folder.")
    return read_draft(load_tensors(folder), folder / CONFIG, target, convention)


def read_draft(
    tensors: dict[str, Tensor], config_file: Path, target: Target | None, convention: LayerIdConvention | None
) -> DraftFolder:
    """A draft of tensors and a config.json that need not lie together; see `read_draft_folder`."""
    folder = config_file.parent
    config, layout = _read_config(config_file)
    tensors = _named_as_ours(tensors, folder)
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    shape = read_shape(config, tensors, str(config_file))
    layer_ids = read_layer_ids(config, shape.num_aux, target, convention, str(config_file))
    if target is not None:
        _check_target(shape, layer_ids, target, folder)
    tensors = _with_lm_head(tensors, shape, target, folder)
    _check_tensors(tensors, shape, folder)
    floats = {name: tensor.float() for name, tensor in tensors.items()}
    return DraftFolder(shape, floats, _target_ids(d2t, t2d, shape, folder), layer_ids, config, layout)


def refuse_sglang_ids(folder: Path) -> None:
    """Refuse, before an engine starts, a draft that vLLM would serve from other layers without a word.

    Raises:
        UserError: its config.json has SGLang's layer ids.
    """
    config, _ = _read_config(folder / CONFIG)
    if config.get("layer_id_convention", "vllm") != "vllm":
        raise UserError(
            f"{folder}: its layer ids are {config['layer_id_convention']}'s, and vLLM would give it other layers.",
            "Export or convert it with vLLM's (export.layer_id_convention=vllm, `draftsmith export convert`).",
        )


def tensor_shapes(shape: DraftShape) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every parameter of a draft."""
    with torch.device("meta"):
        draft = DraftModel(shape, torch.empty(shape.vocab_size, shape.hidden_size))
    return {name: tuple(tensor.shape) for name, tensor in draft.state_dict().items()}


def mapping_problem(d2t: Tensor, t2d: Tensor) -> str | None:
    """What is wrong with a vocabulary mapping: d2t int64 [Vd] offsets, t2d bool [V]; None: nothing."""
    if d2t.dtype != torch.int64 or t2d.dtype != torch.bool:
        return f"d2t is {d2t.dtype} and t2d is {t2d.dtype}, not int64 and bool"
    ids = d2t + torch.arange(len(d2t))
    if int(ids.min()) < 0 or int(ids.max()) >= len(t2d):
        return "d2t points outside the target's vocabulary (absolute ids instead of offsets?)"
    if len(set(ids.tolist())) != len(ids):
        return "d2t maps two draft ids to one target id"
    return None if torch.equal(ids.sort().values, t2d.nonzero().squeeze(1)) else "d2t and t2d name different tokens"


def _read_config(path: Path) -> tuple[dict[str, Any], Literal["hf", "speculators"]]:
    with reading(path, "Export or fetch the draft again."):
        config: Any = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise UserError(f"{path}: not a JSON object.", "Export or fetch the draft again.")
    return (to_plain(config, str(path)), "speculators") if is_speculators(config) else (config, "hf")


def _named_as_ours(tensors: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """`layers.0.` and `midlayer.` are the same, as they are to vLLM."""
    named = {
        f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name: tensor
        for name, tensor in tensors.items()
        if not name.endswith(_NOT_OURS)
    }
    if len(named) < sum(not name.endswith(_NOT_OURS) for name in tensors):
        raise UserError(f"{folder}: a tensor stands there as `midlayer.` and as `layers.0.`.", "Remove one of them.")
    return named


def _with_lm_head(
    tensors: dict[str, Tensor], shape: DraftShape, target: Target | None, folder: Path
) -> dict[str, Tensor]:
    if "lm_head.weight" in tensors:
        return tensors
    if shape.draft_vocab_size != shape.vocab_size:
        raise UserError(
            f"{folder}: a vocabulary of {shape.draft_vocab_size} without an lm_head; vLLM would take the target's "
            "rows, which are of other tokens.",
            "Fetch or export the draft again, whole.",
        )
    if target is None:
        raise UserError(
            f"{folder}: no lm_head; it is the target's, which is not named here.", "Name the target of this draft."
        )
    from draftsmith.core.target_weights import load_target_weights

    return {**tensors, "lm_head.weight": load_target_weights(target).head_VH}


def _check_tensors(tensors: dict[str, Tensor], shape: DraftShape, folder: Path) -> None:
    wanted = tensor_shapes(shape)
    problems = [f"lacks {_some(wanted.keys() - tensors.keys())}"] if wanted.keys() - tensors.keys() else []
    problems += [f"has {_some(tensors.keys() - wanted.keys())}"] if tensors.keys() - wanted.keys() else []
    problems += [
        f"{name} is {list(tensors[name].shape)}, by config.json {list(wanted[name])}"
        for name in sorted(wanted.keys() & tensors.keys())
        if tuple(tensors[name].shape) != wanted[name]
    ]
    problems += [
        f"{name} is {tensor.dtype}"
        for name, tensor in tensors.items()
        if tensor.dtype not in (torch.bfloat16, torch.float16, torch.float32)
    ]
    if problems:
        raise UserError(
            f"{folder}: not a whole EAGLE3 draft of the kind that draftsmith models: {'; '.join(problems)}. vLLM "
            "serves a draft that lacks tensors with random ones, without a word.",
            "Fetch or export the draft again.",
        )


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:5]) + (f" and {len(ordered) - 5} more" if len(ordered) > 5 else "")


def _target_ids(d2t: Tensor | None, t2d: Tensor | None, shape: DraftShape, folder: Path) -> Tensor:
    size, vocab = shape.draft_vocab_size, shape.vocab_size
    if size == vocab:
        # vLLM makes no mapping where the vocabularies are equal, whatever d2t says.
        if d2t is not None and d2t.any():
            raise UserError(f"{folder}: a full vocabulary with a d2t that moves tokens.", "Ask the draft's maker.")
        return torch.arange(vocab)
    mend = "vLLM needs d2t as int64 offsets: target id = draft id + d2t[draft id]. Export the draft again."
    if d2t is None:
        raise UserError(f"{folder}: {size} of {vocab} tokens and no d2t; vLLM would propose the first {size}.", mend)
    if d2t.is_floating_point() or d2t.shape != (size,):
        raise UserError(f"{folder}: d2t is {d2t.dtype} {list(d2t.shape)}, not int64 [{size}].", mend)
    d2t = d2t.long()
    if t2d is None:
        t2d = torch.zeros(vocab, dtype=torch.bool)
        ids = d2t + torch.arange(size)
        t2d[ids[(ids >= 0) & (ids < vocab)]] = True
    elif t2d.shape != (vocab,):
        raise UserError(f"{folder}: t2d is {list(t2d.shape)}, not [{vocab}].", mend)
    if problem := mapping_problem(d2t, t2d.bool()):
        absolute = mapping_problem(d2t - torch.arange(size), t2d.bool()) is None
        raise UserError(f"{folder}: {problem}{'; its d2t holds absolute ids' if absolute else ''}.", mend)
    return d2t + torch.arange(size)


def _check_target(shape: DraftShape, layer_ids: list[int], target: Target, folder: Path) -> None:
    wrong = []
    if shape.hidden_size != target.hidden_size:
        wrong.append(f"hidden size {shape.hidden_size}, the target {target.hidden_size}")
    if shape.vocab_size != target.vocab_size:
        wrong.append(f"vocabulary {shape.vocab_size}, the target {target.vocab_size}")
    if max(layer_ids) >= target.num_layers:
        wrong.append(f"layers {layer_ids}, the target only {target.num_layers}")
    if wrong:
        raise UserError(
            f"{folder}: no draft for {target.path}: it has {'; '.join(wrong)}.", "Name the target that it drafts for."
        )
