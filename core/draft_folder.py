"""Reads an exported EAGLE3 draft (plain Hugging Face layout) back into our model: config.json decides, as in vLLM."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.core.draft_shape import DraftShape
from draftsmith.core.errors import UserError

# Where config.json spells a field of DraftShape differently.
_CONFIG_KEYS = {
    "num_aux": "num_aux_hidden_states",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "rope": "rope_parameters",
}
# What vLLM tells from `layer_types`, and from the tensors that are there.
_SAID_OTHERWISE = {"sliding_window", "own_embedding"}


@dataclass(frozen=True)
class DraftFolder:
    """A draft as a server reads it: float32 copies of its tensors, int64 [Vd] target ids, vLLM layer ids."""

    shape: DraftShape
    tensors: dict[str, Tensor]
    target_ids: Tensor
    layer_ids: list[int]


def read_draft_folder(folder: Path) -> DraftFolder:
    """Read a draft folder.

    Raises:
        UserError: a file or a config key is missing.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder}: no exported draft (no config.json).", "Run `draftsmith export` first.")
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    keys = {f.name: _CONFIG_KEYS.get(f.name, f.name) for f in fields(DraftShape) if f.name not in _SAID_OTHERWISE}
    if missing := [key for key in keys.values() if key not in config]:
        raise UserError(
            f"{path} lacks {', '.join(missing)}.", "Export the draft again with `draftsmith export --fresh`."
        )
    tensors = load_file(folder / "model.safetensors")
    windowed = config.get("layer_types") == ["sliding_attention"]
    shape = DraftShape(
        **{name: config[key] for name, key in keys.items()},
        sliding_window=config["sliding_window"] if windowed else None,
        own_embedding="embed_tokens.weight" in tensors,
    )
    d2t = tensors.pop("d2t", torch.zeros(shape.draft_vocab_size, dtype=torch.int64))
    tensors.pop("t2d", None)
    target_ids = d2t + torch.arange(len(d2t))
    floats = {name: tensor.float() for name, tensor in tensors.items()}
    return DraftFolder(shape, floats, target_ids, list(config["eagle_aux_hidden_state_layer_ids"]))
