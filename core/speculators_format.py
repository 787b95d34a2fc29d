"""The `speculators` layout of config.json, to and from the plain one, key for key as vLLM translates it.

vLLM takes `transformer_layer_config` for the draft's config and puts a few keys of the top level over it
(`transformers_utils/configs/speculators/algos.py`); `norm_before_residual` is true there where nothing says otherwise,
in the plain layout false. Keys that its translation leaves out (the number of auxiliary states) reach it only from
within `transformer_layer_config`, so they are written in both places.
"""

from typing import Any

from draftsmith.core.errors import UserError

_FROM_THE_TOP = ("draft_vocab_size", "target_hidden_size", "eagle_aux_hidden_state_layer_ids")
_FLAGS = {"norm_before_residual": True, "norm_before_fc": False, "fc_norm": False, "norm_output": False}
# Of our own or of the model in general; the rest describes the decoder layer.
_TOP_ONLY = ("architectures", "model_type", "torch_dtype", "transformers_version", "layer_id_convention")


def is_speculators(config: dict[str, Any]) -> bool:
    """Whether a config.json is in the `speculators` layout."""
    return "speculators_model_type" in config


def to_plain(config: dict[str, Any], source: str) -> dict[str, Any]:
    """The plain config that vLLM makes of a `speculators` one.

    Args:
        config: the content of config.json.
        source: what errors call it.

    Raises:
        UserError: it is not an EAGLE3 draft, or has no decoder layer.
    """
    kind, layer = config["speculators_model_type"], config.get("transformer_layer_config")
    if kind != "eagle3":
        raise UserError(
            f"{source}: a `{kind}` speculator, not an EAGLE3 draft.", "draftsmith reads EAGLE3 drafts only."
        )
    if not isinstance(layer, dict):
        raise UserError(f"{source} lacks transformer_layer_config.", "Fetch the draft again, or ask its maker.")
    if layer.get("model_type", "llama") != "llama":
        raise UserError(
            f"{source}: its layer is of type `{layer['model_type']}`.", "draftsmith models EAGLE3 drafts of type llama."
        )
    plain = {**layer, "model_type": "llama", "architectures": ["Eagle3LlamaForCausalLM"]}
    plain |= {key: config[key] for key in _FROM_THE_TOP if config.get(key) is not None}
    plain |= {flag: config.get(flag, default) for flag, default in _FLAGS.items()}
    if "layer_id_convention" in config:
        plain["layer_id_convention"] = config["layer_id_convention"]
    return plain


def from_plain(plain: dict[str, Any], verifier: str, architectures: list[str], tokens: int) -> dict[str, Any]:
    """A `speculators` config of the same draft.

    Args:
        plain: the plain config, complete.
        verifier: path or hub id of the target.
        architectures: of the target.
        tokens: drafted tokens a round that a server takes where it is told nothing else.
    """
    layer = {k: v for k, v in plain.items() if k not in _TOP_ONLY}
    top = {k: plain[k] for k in (*_FROM_THE_TOP, *_FLAGS, "layer_id_convention", "torch_dtype") if k in plain}
    return {
        # No model_type: vLLM then recognises the layout by `speculators_config`.
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        **top,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}],
            "verifier": {"name_or_path": verifier, "architectures": architectures},
        },
        "transformer_layer_config": {**layer, "model_type": "llama"},
    }
