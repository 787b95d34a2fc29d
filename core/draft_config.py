"""The shape and the layer ids that a draft's config.json describes, with vLLM's own defaults for what it leaves out."""

from typing import Any

from torch import Tensor

from draftsmith.core.draft_shape import DraftShape
from draftsmith.core.errors import UserError
from draftsmith.core.rope import read_rope
from draftsmith.core.target import Target

_SIZES = ("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# Only these values are modelled; every one is what vLLM takes where the key is missing.
_ONLY: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "logit_scale": 1.0,
    "quantization_config": None,
    "parallel_drafting": False,
}
# LlamaConfig's, which vLLM reads the file with.
_RMS_NORM_EPS, _MAX_POSITIONS = 1e-6, 2048


def read_shape(config: dict[str, Any], tensors: dict[str, Tensor], source: str) -> DraftShape:
    """The architecture that a plain config.json describes.

    Args:
        config: its content.
        tensors: the draft's tensors, which tell what no key does.
        source: what errors call the file.

    Raises:
        UserError: a key is missing that has no default, or the draft is of a kind that is not modelled.
    """
    eagle: dict[str, Any] = config.get("eagle_config") or {}
    if missing := [key for key in _SIZES if not isinstance(config.get(key), int)]:
        raise UserError(
            f"{source} lacks {', '.join(missing)}, which nothing else tells.", "Export or fetch the draft again."
        )
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    other = [f"{k}: {config[k]}" for k, only in _ONLY.items() if config.get(k, only) not in (only, None)]
    if config.get("target_hidden_size") not in (None, hidden):
        other.append(f"target_hidden_size: {config['target_hidden_size']} beside hidden_size: {hidden}")
    if not eagle.get("use_aux_hidden_state", True):
        other.append("eagle_config.use_aux_hidden_state: false")
    if other:
        raise UserError(
            f"{source}: {'; '.join(other)}: a draft of a kind that draftsmith does not model.",
            "It reads EAGLE3 drafts of one Llama-type layer over three or four auxiliary states.",
        )
    flags = {flag: bool(config.get(flag) or False) for flag in _FLAGS}
    flags["norm_before_fc"] = bool(eagle.get("norm_before_fc", flags["norm_before_fc"]))
    # vLLM looks for a window only where `layer_types` says that there is one.
    windowed = (config.get("layer_types") or ["full_attention"])[0] == "sliding_attention"
    return DraftShape(
        hidden_size=hidden,
        num_aux=_num_aux(config, eagle, tensors, source),
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        intermediate_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        draft_vocab_size=config.get("draft_vocab_size") or config["vocab_size"],
        rms_norm_eps=float(config.get("rms_norm_eps") or _RMS_NORM_EPS),
        max_position_embeddings=config.get("max_position_embeddings") or _MAX_POSITIONS,
        rope=read_rope(config, source),
        sliding_window=config.get("sliding_window") if windowed else None,
        own_embedding="embed_tokens.weight" in tensors,
        **flags,
    )


def read_layer_ids(
    config: dict[str, Any], num_aux: int, target: Target | None, convention: str | None, source: str
) -> list[int]:
    """The auxiliary layers by vLLM's ids, in column order.

    Raises:
        UserError: they are not named and the target is unknown, or their number does not fit.
    """
    eagle: dict[str, Any] = config.get("eagle_config") or {}
    said = config.get("layer_id_convention")
    if convention and said and convention != said:
        raise UserError(f"{source} says that its layer ids are {said}'s, not {convention}'s.", "Leave it out.")
    convention = convention or said or "vllm"
    ids = config.get("eagle_aux_hidden_state_layer_ids") or eagle.get("eagle_aux_hidden_state_layer_ids")
    if not ids:
        if target is None:
            raise UserError(
                f"{source} names no layers; vLLM then takes 2, n // 2 and n - 3 of the target's n layers.",
                "Name the target of this draft.",
            )
        ids, convention = [2, target.num_layers // 2, target.num_layers - 3], "vllm"
    if convention not in ("vllm", "sglang") or not all(isinstance(i, int) for i in ids):
        raise UserError(f"{source}: layer ids {ids} of convention `{convention}`.", "Known: vllm, sglang.")
    ids = [i + 1 for i in ids] if convention == "sglang" else list(ids)
    if ids != sorted(set(ids)) or min(ids) < 0 or len(ids) != num_aux:
        # vLLM sorts them and drops the doubled ones, so the columns would be other ones than the draft's.
        raise UserError(
            f"{source}: layers {ids} for {num_aux} auxiliary states; they must ascend, one for each.",
            "Ask the draft's maker which layers it was trained on.",
        )
    return ids


def _num_aux(config: dict[str, Any], eagle: dict[str, Any], tensors: dict[str, Tensor], source: str) -> int:
    said = config.get("num_aux_hidden_states") or len(eagle.get("eagle_aux_hidden_state_layer_ids") or [0] * 3)
    if "fc.weight" in tensors and tensors["fc.weight"].dim() == 2:
        columns = tensors["fc.weight"].shape[1]
        if columns != said * config["hidden_size"]:
            raise UserError(
                f"{source}: fc.weight has {columns} columns, and vLLM will look for {said} auxiliary states of "
                f"{config['hidden_size']}.",
                f"Set num_aux_hidden_states ({columns // config['hidden_size']}?) in it.",
            )
    return int(said)
