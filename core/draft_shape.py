"""Shape and flags of an EAGLE3 draft, resolved against its target; written to checkpoints and to the export."""

from dataclasses import asdict, dataclass, field
from typing import Any

from draftsmith.core.config_train import DraftConfig
from draftsmith.core.errors import UserError
from draftsmith.core.rope import resolve_rope
from draftsmith.core.target import Target


@dataclass(frozen=True)
class DraftShape:
    """Everything that fixes the draft's architecture.

    Attributes:
        hidden_size: H, of the draft and of the target's states.
        num_aux: auxiliary states that are fused.
        vocab_size, draft_vocab_size: V of the target, Vd of the draft.
        rope: rope parameters as transformers 5 spells them (`rope_type`, `rope_theta`, `partial_rotary_factor`, ...).
        sliding_window: positions that attention looks back over, its own included; None: all.
        own_embedding: the draft has a token embedding of its own, else it uses the target's.
    """

    hidden_size: int
    num_aux: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: dict[str, Any] = field(default_factory=dict)
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    sliding_window: int | None = None
    own_embedding: bool = False

    @property
    def rotary_dim(self) -> int:
        """Leading part of every head that is rotated, even."""
        return int(self.head_dim * self.rope.get("partial_rotary_factor", 1.0))

    def to_dict(self) -> dict[str, Any]:
        """For JSON; `DraftShape(**d)` reads it back."""
        return asdict(self)


def resolve_shape(config: DraftConfig, target: Target, num_aux: int, draft_vocab_size: int) -> DraftShape:
    """The draft's shape: what the config says, else what the target has.

    Raises:
        UserError: heads do not divide, or the target's config lacks a dimension.
    """
    hf = target.hf_config
    heads = config.num_heads or _needed(target, "num_attention_heads")
    # num_kv_heads: null with num_heads set means multi-head attention of that width.
    kv_heads = config.num_kv_heads or (heads if config.num_heads else getattr(hf, "num_key_value_heads", None) or heads)
    if heads % kv_heads:
        raise UserError(
            f"draft.num_heads ({heads}) is not a multiple of draft.num_kv_heads ({kv_heads}).",
            "Change one of them.",
        )
    head_dim = config.head_dim or getattr(hf, "head_dim", None) or target.hidden_size // heads
    if target.hidden_size % heads:
        raise UserError(
            f"the draft's hidden size {target.hidden_size} is not a multiple of draft.num_heads ({heads}).",
            "transformers and vLLM refuse such a config; change draft.num_heads.",
        )
    if config.norm_before_fc and config.fc_norm:
        raise UserError(
            "draft.norm_before_fc and draft.fc_norm are both set.", "Choose one norm of the auxiliary states."
        )
    max_positions = _needed(target, "max_position_embeddings")
    shape = DraftShape(
        hidden_size=target.hidden_size,
        num_aux=num_aux,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=config.intermediate_size or _needed(target, "intermediate_size"),
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        rms_norm_eps=float(getattr(hf, "rms_norm_eps", None) or 1e-6),
        max_position_embeddings=max_positions,
        rope=resolve_rope(config, hf, max_positions),
        norm_before_residual=config.norm_before_residual,
        norm_before_fc=config.norm_before_fc,
        fc_norm=config.fc_norm,
        norm_output=config.norm_output,
        sliding_window=config.sliding_window or _imposed_window(hf),
        own_embedding=config.train_embedding,
    )
    if shape.rotary_dim % 2 or not shape.rotary_dim:
        raise UserError(
            f"draft.head_dim is {head_dim}, {shape.rotary_dim} of it rotated; rotary embeddings need an even one.",
            "Set draft.head_dim, or draft.partial_rotary_factor.",
        )
    return shape


def _needed(target: Target, key: str) -> int:
    value = getattr(target.hf_config, key, None)
    if not isinstance(value, int):
        raise UserError(
            f"{target.local_path}/config.json has no `{key}`, which sets the draft's shape.",
            f"Set it in `draft:` ({key}).",
        )
    return value


def _imposed_window(hf_config: Any) -> int | None:
    """The window that vLLM gives to every layer without one of its own: the target's, where all its layers have it."""
    kinds = set(getattr(hf_config, "layer_types", None) or ["sliding_attention"])
    return (getattr(hf_config, "sliding_window", None) or None) if kinds == {"sliding_attention"} else None
