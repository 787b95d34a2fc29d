"""How a draft lies in its folder: tensors under vLLM's names, config.json in the plain or the `speculators` layout."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.core.atomic import write_json
from draftsmith.core.config import ExportConfig
from draftsmith.core.draft_folder import CONFIG
from draftsmith.core.errors import UserError
from draftsmith.core.speculators_format import from_plain
from draftsmith.core.target import Target
from draftsmith.export.contract import required_config
from draftsmith.export.draft import Draft

WEIGHTS = "model.safetensors"
_LLAMA, _MINIMAX = "LlamaForCausalLMEagle3", "Eagle3MiniMaxM2ForCausalLM"


def draft_tensors(draft: Draft) -> dict[str, Tensor]:
    """bfloat16 parameters; d2t and t2d where the vocabulary is reduced; the embedding where it is the draft's own."""
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in draft.tensors.items()}
    if draft.shape.draft_vocab_size != draft.shape.vocab_size:
        tensors |= {"d2t": draft.d2t, "t2d": draft.t2d}
    return tensors


def plain_config(draft: Draft, target: Target | None, convention: str = "vllm") -> dict[str, Any]:
    """config.json in the plain layout: every flag written out, rope in the spellings of transformers 4 and 5.

    Args:
        draft: what is exported.
        target: its target; None where a folder is converted without one, whose architecture is then kept.
        convention: `vllm`: id k is the state after k layers, at the top level; `sglang`: k - 1, in `eagle_config`,
            where SGLang looks.

    Raises:
        UserError: the draft reads the embedding, which SGLang's ids cannot name.
    """
    shape = draft.shape
    scaling = {k: v for k, v in shape.rope.items() if k not in ("rope_theta", "partial_rotary_factor")}
    partial = {k: v for k, v in shape.rope.items() if k == "partial_rotary_factor"}
    return {
        "architectures": [_architecture(draft, target)],
        "model_type": "llama",
        **required_config(shape),
        **partial,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_scaling": scaling if shape.rope.get("rope_type") != "default" else None,
        **_layer_ids(draft.layer_ids, convention),
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": _token(draft, target, "bos_token_id"),
        "eos_token_id": _token(draft, target, "eos_token_id"),
    }


def folder_config(draft: Draft, target: Target | None, options: ExportConfig, tokens: int) -> dict[str, Any]:
    """config.json in the layout that the options ask for.

    Args:
        draft: what is exported.
        target: its target.
        options: format and convention.
        tokens: drafted tokens a round that the `speculators` layout recommends.

    Raises:
        UserError: the `speculators` layout is asked for without a target, or with SGLang's ids.
    """
    plain = plain_config(draft, target, options.layer_id_convention)
    if options.format == "hf":
        return plain
    if options.layer_id_convention != "vllm":
        raise UserError("export.format: speculators is vLLM's, and has vLLM's layer ids.", "Use export.format=hf.")
    if target is None:
        raise UserError("the `speculators` layout names its target, which is unknown here.", "Name it with --target.")
    architectures = list(getattr(target.hf_config, "architectures", None) or [])
    return from_plain(plain, served_name(target), architectures, tokens)


def served_name(target: Target) -> str:
    """What a server is to load the target by: its hub id, or its folder."""
    return target.path if target.revision else str(target.local_path)


def write_draft(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Write weights and config into a folder that exists."""
    # One storage each: a tensor may be a view of a larger one.
    whole = {k: v.contiguous().clone() for k, v in tensors.items()}
    save_file(whole, folder / WEIGHTS, metadata={"format": "pt"})
    write_json(folder / CONFIG, config)


def _layer_ids(ids: list[int], convention: str) -> dict[str, Any]:
    if convention == "vllm":
        return {"layer_id_convention": "vllm", "eagle_aux_hidden_state_layer_ids": ids}
    if min(ids) < 1:
        raise UserError(f"layers {ids}: SGLang's ids cannot name the embedding (0).", "Keep vLLM's convention.")
    nested = {"eagle_aux_hidden_state_layer_ids": [i - 1 for i in ids], "use_aux_hidden_state": True}
    return {"layer_id_convention": "sglang", "eagle_config": nested}


def _architecture(draft: Draft, target: Target | None) -> str:
    if target is not None:
        return _MINIMAX if target.hf_config.model_type == "minimax_m2" else _LLAMA
    return _MINIMAX if _MINIMAX in (draft.config.get("architectures") or []) else _LLAMA


def _token(draft: Draft, target: Target | None, key: str) -> Any:
    return getattr(target.hf_config, key, None) if target is not None else draft.config.get(key)
