"""What vLLM needs of an EAGLE3 draft, checked by us: it loads a draft with missing tensors without an error.

Silent traps (reference: vLLM's `llama_eagle3.py`): a missing norm or projection keeps random values, a missing
lm_head borrows the target's first rows, a missing d2t means offsets of zero.
"""

from typing import Any

import torch
from torch import Tensor

from draftsmith.core.draft_folder import mapping_problem, tensor_shapes
from draftsmith.core.draft_shape import DraftShape
from draftsmith.core.speculators_format import is_speculators, to_plain


def required_tensors(shape: DraftShape) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a complete export."""
    tensors = tensor_shapes(shape)
    if shape.draft_vocab_size != shape.vocab_size:
        tensors |= {"d2t": (shape.draft_vocab_size,), "t2d": (shape.vocab_size,)}
    return tensors


def find_problems(
    shape: DraftShape, tensors: dict[str, Tensor], config: dict[str, Any], layer_ids: list[int] | None = None
) -> list[str]:
    """Everything that keeps a draft from being complete and consistent; empty: it is.

    Args:
        shape: what was trained.
        tensors: the exported tensors by name.
        config: the exported config.json, in either layout.
        layer_ids: vLLM's ids of the layers that it was trained on; None: whatever they are.
    """
    if is_speculators(config):
        config = to_plain(config, "config.json")
    wanted = required_tensors(shape)
    problems = [f"missing tensor {name}" for name in wanted.keys() - tensors.keys()]
    problems += [f"unexpected tensor {name}" for name in tensors.keys() - wanted.keys()]
    for name in wanted.keys() & tensors.keys():
        if tuple(tensors[name].shape) != wanted[name]:
            problems.append(f"{name} has shape {tuple(tensors[name].shape)}, not {wanted[name]}")
        elif tensors[name].is_floating_point() and not torch.isfinite(tensors[name]).all():
            problems.append(f"{name} has values that are not finite")
    if "d2t" in wanted and {"d2t", "t2d"} <= tensors.keys():
        problem = mapping_problem(tensors["d2t"], tensors["t2d"])
        problems += [problem] if problem else []
    problems += [f"config.json lacks {key}" for key in required_config(shape).keys() - config.keys()]
    problems += [
        f"config.json says {key}: {config[key]}, the draft has {value}"
        for key, value in required_config(shape).items()
        if key in config and config[key] != value
    ]
    if layer_ids is not None:
        problems += _layer_problems(config, layer_ids)
    return sorted(problems)


def _layer_problems(config: dict[str, Any], layer_ids: list[int]) -> list[str]:
    nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if config.get("layer_id_convention") == "sglang":
        # At the top level vLLM would read them, and take other layers.
        right = nested == [i - 1 for i in layer_ids] and "eagle_aux_hidden_state_layer_ids" not in config
    else:
        right = nested is None and config.get("eagle_aux_hidden_state_layer_ids") == layer_ids
    said = config.get("eagle_aux_hidden_state_layer_ids", nested)
    return [] if right else [f"config.json names layers {said}, the draft was trained on {layer_ids}"]


def required_config(shape: DraftShape) -> dict[str, Any]:
    """config.json keys that decide how vLLM runs the draft, with the only right value."""
    # vLLM looks at `sliding_window` where `layer_types` says so, and takes the target's window where nothing does.
    window = {"layer_types": ["sliding_attention"], "sliding_window": shape.sliding_window}
    return {
        **(window if shape.sliding_window else {}),
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": shape.draft_vocab_size,
        "rms_norm_eps": shape.rms_norm_eps,
        "max_position_embeddings": shape.max_position_embeddings,
        "num_aux_hidden_states": shape.num_aux,
        "norm_before_residual": shape.norm_before_residual,
        "norm_before_fc": shape.norm_before_fc,
        "fc_norm": shape.fc_norm,
        "norm_output": shape.norm_output,
        "rope_parameters": shape.rope,
        "rope_theta": shape.rope["rope_theta"],
    }
