"""Rotary position embedding of the draft: its parameters, resolved against the target, and its tables.

The kinds that are kept are those that transformers (our tables) and vLLM (the server) compute alike at every length.
"""

from typing import Any

from draftsmith.core.config_train import DraftConfig
from draftsmith.core.errors import UserError

# Parameters by rope_type, those that must be there first; vLLM reads no others of these kinds.
_NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_OPTIONAL = {"yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")}


def resolve_rope(config: DraftConfig, hf_config: Any, max_positions: int) -> dict[str, Any]:
    """Rope parameters of the draft: the config's, else the target's; whole heads unless the config says otherwise.

    Args:
        config: the draft section.
        hf_config: the target's config.
        max_positions: positions that the draft will be served at.

    Raises:
        UserError: a kind that the server computes in another way, or parameters that are missing or unknown.
    """
    given = _targets(hf_config) if config.rope is None else dict(config.rope)
    source = "the target's rope" if config.rope is None else "draft.rope"
    mend = "Set draft.rope, e.g. {rope_type: default, rope_theta: 10000.0}."
    kind = given.setdefault("rope_type", "default")
    given.setdefault("rope_theta", 10000.0)
    known = ("rope_type", "rope_theta", *_NEEDED.get(kind, ()), *_OPTIONAL.get(kind, ()))
    rope = _checked(given, source, mend)
    if config.rope is not None and (unknown := sorted(given.keys() - set(known))):
        raise UserError(f"draft.rope ({kind}) has unknown keys: {', '.join(unknown)}.", f"Known: {', '.join(known)}.")
    covered = rope["factor"] * rope["original_max_position_embeddings"] if kind == "yarn" else max_positions
    if config.rope is not None and covered < max_positions:
        raise UserError(
            f"draft.rope (yarn) covers {covered:g} positions in vLLM, and the target has {max_positions}.",
            "Raise its factor.",
        )
    if config.partial_rotary_factor not in (None, 1.0):
        rope["partial_rotary_factor"] = config.partial_rotary_factor
    return rope


def read_rope(config: dict[str, Any], source: str) -> dict[str, Any]:
    """Rope parameters of a draft's config.json, in the spelling of transformers 4, of 5, or both.

    Args:
        config: its content; without any rope key vLLM takes a base of 10000, and so do we.
        source: what errors call the file.

    Raises:
        UserError: the two spellings differ, or the kind is one that the server computes in another way than we.
    """
    mend = "Ask the draft's maker which rope it was trained with, and mend config.json."
    new = dict(config.get("rope_parameters") or {})
    old = {"rope_type" if k == "type" else k: v for k, v in (config.get("rope_scaling") or {}).items()}
    old |= {k: config[k] for k in ("rope_theta", "partial_rotary_factor") if config.get(k) is not None}
    if differing := sorted(k for k in new.keys() & old.keys() if new[k] != old[k]):
        said = "; ".join(f"{k}: {new[k]} in rope_parameters, {old[k]} elsewhere" for k in differing)
        raise UserError(f"{source} contradicts itself about the rope ({said}).", mend)
    given = {"rope_type": "default", "rope_theta": 10000.0, **old, **new}
    rope = _checked(given, source, mend)
    if given.get("partial_rotary_factor") not in (None, 1.0):
        rope["partial_rotary_factor"] = given["partial_rotary_factor"]
    return rope


def _checked(given: dict[str, Any], source: str, mend: str) -> dict[str, Any]:
    """The parameters that the server reads of a kind that is supported, nulls left out."""
    kind = given["rope_type"]
    if kind not in _NEEDED:
        raise UserError(f"{source} is of type {kind}; a draft can have {', '.join(_NEEDED)}.", mend)
    known = ("rope_type", "rope_theta", *_NEEDED[kind], *_OPTIONAL.get(kind, ()))
    # vLLM cannot take a null; what the target has beyond these keys concerns images, or the target's own heads.
    rope = {key: given[key] for key in known if given.get(key) is not None}
    if missing := [key for key in _NEEDED[kind] if key not in rope]:
        raise UserError(f"{source} ({kind}) lacks {', '.join(missing)}.", mend)
    return rope


def _targets(hf_config: Any) -> dict[str, Any]:
    rope = dict(getattr(hf_config, "rope_parameters", None) or {})
    # Targets with several kinds of layers nest one set per kind; the draft's layer is a full-attention one.
    rope = dict(rope.get("full_attention", rope))
    rope.setdefault("rope_theta", float(getattr(hf_config, "rope_theta", None) or 10000.0))
    return rope


def rotary_embedding(rope: dict[str, Any], rotary_dim: int, max_positions: int) -> Any:
    """Transformers' module for the rotated part of a head: called with a tensor and positions, gives cos and sin."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    # As one head of the rotated width: vLLM too computes the frequencies of the rotated part as if it were all.
    whole = {k: v for k, v in rope.items() if k != "partial_rotary_factor"}
    config = LlamaConfig(
        hidden_size=rotary_dim,
        num_attention_heads=1,
        head_dim=rotary_dim,
        max_position_embeddings=max_positions,
        rope_parameters=whole,
    )
    return LlamaRotaryEmbedding(config)
