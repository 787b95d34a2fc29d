"""Plain Hugging Face layout of a draft, as vLLM's EAGLE3 loader reads it."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.core.atomic import write_json
from draftsmith.core.checkpoint import Checkpoint
from draftsmith.core.draft_shape import DraftShape
from draftsmith.core.target import Target
from draftsmith.export.contract import required_config

WEIGHTS = "model.safetensors"


def export_tensors(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """bfloat16 parameters; d2t and t2d where the vocabulary is reduced; the embedding where it is the draft's own."""
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in checkpoint.tensors.items()}
    if checkpoint.shape.draft_vocab_size != checkpoint.shape.vocab_size:
        tensors |= {"d2t": checkpoint.d2t, "t2d": checkpoint.t2d}
    return tensors


def export_config(shape: DraftShape, layer_ids: list[int], target: Target) -> dict[str, Any]:
    """config.json: every flag written out, rope under both spellings, layer ids in vLLM's convention."""
    scaling = {k: v for k, v in shape.rope.items() if k not in ("rope_theta", "partial_rotary_factor")}
    partial = {k: v for k, v in shape.rope.items() if k == "partial_rotary_factor"}
    return {
        "architectures": [_architecture(target)],
        "model_type": "llama",
        **required_config(shape),
        **partial,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_scaling": scaling if shape.rope.get("rope_type") != "default" else None,
        "eagle_aux_hidden_state_layer_ids": layer_ids,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": getattr(target.hf_config, "bos_token_id", None),
        "eos_token_id": getattr(target.hf_config, "eos_token_id", None),
    }


def write_export(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Write weights and config into a folder that exists."""
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / WEIGHTS, metadata={"format": "pt"})
    write_json(folder / "config.json", config)


def _architecture(target: Target) -> str:
    return "Eagle3MiniMaxM2ForCausalLM" if target.hf_config.model_type == "minimax_m2" else "LlamaForCausalLMEagle3"
