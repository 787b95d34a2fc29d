"""The EAGLE3 draft: a fusion of the target's auxiliary states and one decoder layer, as vLLM runs it.

Parameter names are those of vLLM's checkpoint format, so a state dict is an export.

Shape suffixes: T packed tokens, R rows computed, A auxiliary states, H hidden, N query heads, G key/value heads,
D head width, V draft vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.core.draft_shape import DraftShape
from draftsmith.core.rope import rotary_embedding


class RMSNorm(nn.Module):
    """RMSNorm computed in float32, returned in the input's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        """Any leading shape, last axis normed."""
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * self.weight.float()).to(x.dtype)


class Attention(nn.Module):
    """Projections only; which keys a row sees is the business of `unroll`."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        width_in, d = 2 * shape.hidden_size, shape.head_dim
        self.head_dim = d
        self.q_proj = nn.Linear(width_in, shape.num_heads * d, bias=False)
        self.k_proj = nn.Linear(width_in, shape.num_kv_heads * d, bias=False)
        self.v_proj = nn.Linear(width_in, shape.num_kv_heads * d, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * d, shape.hidden_size, bias=False)

    def embedding_half(self, embed_RH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the normed embedding adds to queries [R, N D], keys and values [R, G D], before rotation.

        The input is [embedding; feature], so a projection is the sum of two halves, and this one depends on the token
        alone: it is made once for every packed token and serves all steps that meet it.
        """
        size = embed_RH.shape[-1]
        q, k, v = (F.linear(embed_RH, p.weight[:, :size]) for p in (self.q_proj, self.k_proj, self.v_proj))
        return q, k, v

    def query(self, embed_q_RO: Tensor, feature_RH: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """[R, N, D], rotated."""
        return rotate(self._heads(self.q_proj, embed_q_RO, feature_RH), rope)

    def key_value(
        self, embed_k_RO: Tensor, embed_v_RO: Tensor, feature_RH: Tensor, rope: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """[R, G, D] each; keys rotated."""
        k_RGD = self._heads(self.k_proj, embed_k_RO, feature_RH)
        return rotate(k_RGD, rope), self._heads(self.v_proj, embed_v_RO, feature_RH)

    def _heads(self, projection: nn.Linear, embed_RO: Tensor, feature_RH: Tensor) -> Tensor:
        whole_RO = embed_RO + F.linear(feature_RH, projection.weight[:, feature_RH.shape[-1] :])
        return whole_RO.view(len(whole_RO), projection.out_features // self.head_dim, self.head_dim)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Any leading shape."""
        down: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return down


class DraftLayer(nn.Module):
    """The decoder layer, in the two halves around attention."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        h, eps = shape.hidden_size, shape.rms_norm_eps
        self.norm_before_residual = shape.norm_before_residual
        self.input_layernorm, self.hidden_norm = RMSNorm(h, eps), RMSNorm(h, eps)
        self.post_attention_layernorm = RMSNorm(h, eps)
        self.self_attn, self.mlp = Attention(shape), MLP(shape)

    def before_attention(self, feature_RH: Tensor) -> tuple[Tensor, Tensor]:
        """The feature's half of the attention input and the residual branch, [R, H] each."""
        normed_RH = self.hidden_norm(feature_RH)
        return normed_RH, normed_RH if self.norm_before_residual else feature_RH

    def after_attention(self, mixed_RND: Tensor, residual_RH: Tensor) -> Tensor:
        """The layer's output before the final norm, [R, H]."""
        residual_RH = residual_RH + self.self_attn.o_proj(mixed_RND.flatten(-2))
        out: Tensor = residual_RH + self.mlp(self.post_attention_layernorm(residual_RH))
        return out


class DraftModel(nn.Module):
    """EAGLE3 draft; the embedding is the target's, frozen and no part of the state dict, or one of its own."""

    def __init__(self, shape: DraftShape, embed_VH: Tensor) -> None:
        """Build with random weights.

        Args:
            shape: the architecture.
            embed_VH: the target's token embedding, [vocab_size, H]; one of the draft's own starts as a copy.
        """
        super().__init__()
        self.shape = shape
        h, eps = shape.hidden_size, shape.rms_norm_eps
        if shape.own_embedding:
            self.embed_tokens = nn.Embedding(shape.vocab_size, h, _weight=embed_VH.float().clone())
        else:
            self.register_buffer("embed_VH", embed_VH, persistent=False)
        self.fc = nn.Linear(shape.num_aux * h, h, bias=False)
        if shape.norm_before_fc:
            self.input_norm = RMSNorm(shape.num_aux * h, eps)
        if shape.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(h, eps) for _ in range(shape.num_aux))
        self.midlayer = DraftLayer(shape)
        self.norm = RMSNorm(h, eps)
        self.lm_head = nn.Linear(h, shape.draft_vocab_size, bias=False)
        # The tuple hides it from nn.Module: its float32 buffers are recomputed, never saved and never cast.
        self._rotary = (rotary_embedding(shape.rope, shape.rotary_dim, shape.max_position_embeddings),)

    @property
    def embedding_VH(self) -> Tensor:
        """The token embedding in use."""
        return self.embed_tokens.weight if self.shape.own_embedding else self.get_buffer("embed_VH")

    def embed(self, ids_R: Tensor) -> Tensor:
        """[R, H] in the weights' dtype."""
        return F.embedding(ids_R, self.embedding_VH).to(self.fc.weight.dtype)

    def fuse(self, aux_TAH: Tensor) -> Tensor:
        """Feature input of step 1, [T, H]."""
        aux_TAH = aux_TAH.to(self.fc.weight.dtype)
        if self.shape.fc_norm:
            aux_TAH = torch.stack([norm(aux_TAH[:, i]) for i, norm in enumerate(self.fc_norm)], dim=1)
        flat = aux_TAH.flatten(1)
        fused: Tensor = self.fc(self.input_norm(flat) if self.shape.norm_before_fc else flat)
        return fused

    def rope(self, positions_R: Tensor) -> tuple[Tensor, Tensor]:
        """Cos and sin of the rotated part of a head, [R, 1, rotary_dim] each, float32."""
        device = positions_R.device
        with torch.autocast(device.type, enabled=False):
            cos, sin = self._rotary[0].to(device)(torch.zeros((), device=device), positions_R[None])
        return cos[0, :, None], sin[0, :, None]


def rotate(x_RND: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate-half form, in float32, as Llama's; the part of a head beyond the tables' width is left as it is."""
    cos, sin = rope
    x, rest = x_RND[..., : cos.shape[-1]].float(), x_RND[..., cos.shape[-1] :]
    a, b = x.chunk(2, dim=-1)
    rotated = (x * cos + torch.cat([-b, a], dim=-1) * sin).to(x_RND.dtype)
    return torch.cat([rotated, rest], dim=-1) if rest.shape[-1] else rotated
