"""The draft's weights as the products want them: of one dtype, q/k/v and gate/up side by side."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.core.draft import DraftModel
from draftsmith.core.fused.products import Products


@dataclass(frozen=True)
class Weights:
    """Matrices as the products want them, norms in float32.

    Attributes:
        products: that make them so.
        fc: always in the plain dtype: auxiliary states have outliers of hundreds of times their rms.
        qkv_embed_CH, qkv_hidden_CH: the q, k and v projections' columns for the embedding and for the feature.
        gate_up: [2I, H], gate first.
        aux_norms: of the auxiliary states: none, one over all of them, or one each.
    """

    products: Products
    fc: Tensor
    qkv_embed_CH: Any
    qkv_hidden_CH: Any
    o: Any
    gate_up: Any
    down: Any
    head_VH: Any
    embed_norm: Tensor
    hidden_norm: Tensor
    post_norm: Tensor
    norm: Tensor
    aux_norms: tuple[Tensor, ...]


_LAYER, _ATTENTION, _MLP = "midlayer.", "midlayer.self_attn.", "midlayer.mlp."
_QKV = tuple(f"{_ATTENTION}{x}_proj.weight" for x in "qkv")


def aux_norm_names(draft: DraftModel) -> list[str]:
    """Parameters of the norms over the auxiliary states."""
    if draft.shape.norm_before_fc:
        return ["input_norm.weight"]
    return [f"fc_norm.{i}.weight" for i in range(draft.shape.num_aux)] if draft.shape.fc_norm else []


def gather_weights(draft: DraftModel, params: dict[str, Tensor], dtype: torch.dtype, products: Products) -> Weights:
    """Copy parameters, by their names in the draft, into products' form."""
    h, form = draft.shape.hidden_size, products.weight
    qkv = torch.cat([params[name].to(dtype) for name in _QKV])
    return Weights(
        products=products,
        fc=params["fc.weight"].to(dtype),
        qkv_embed_CH=form(qkv[:, :h].contiguous()),
        qkv_hidden_CH=form(qkv[:, h:].contiguous()),
        o=form(params[f"{_ATTENTION}o_proj.weight"].to(dtype)),
        gate_up=form(torch.cat([params[f"{_MLP}{x}_proj.weight"].to(dtype) for x in ("gate", "up")])),
        down=form(params[f"{_MLP}down_proj.weight"].to(dtype)),
        head_VH=form(params["lm_head.weight"].to(dtype)),
        embed_norm=params[f"{_LAYER}input_layernorm.weight"].float(),
        hidden_norm=params[f"{_LAYER}hidden_norm.weight"].float(),
        post_norm=params[f"{_LAYER}post_attention_layernorm.weight"].float(),
        norm=params["norm.weight"].float(),
        aux_norms=tuple(params[name].float() for name in aux_norm_names(draft)),
    )


class Gradients:
    """Weight gradients in float32, in the form of `Weights`, added up over steps."""

    def __init__(self, products: Products) -> None:
        self.products = products
        self.of: dict[str, Tensor] = {}
        self.aux_norms: list[Tensor] = []
        self.embedding: Tensor | None = None

    def add(self, name: str, grad: Tensor) -> None:
        """Add a gradient."""
        self.of[name] = self.of[name] + grad if name in self.of else grad

    def add_product(self, name: str, dy: Any, x: Tensor, peak: Tensor | None = None) -> None:
        """Add dy.T @ x, `dy` as the products made it, `peak` of x."""
        self.of[name] = self.products.into_weight(self.of.get(name), dy, x, peak)

    def by_name(self, draft: DraftModel, head: Tensor | None) -> dict[str, Tensor | None]:
        """The gradients under the parameters' names."""
        of, shape = self.of, draft.shape
        widths = [shape.num_heads * shape.head_dim, *[shape.num_kv_heads * shape.head_dim] * 2]
        halves = (of["qkv_embed_CH"].split(widths), of["qkv_hidden_CH"].split(widths))
        grads: dict[str, Tensor | None] = {
            name: torch.cat([halves[0][i], halves[1][i]], dim=1) for i, name in enumerate(_QKV)
        }
        gate, up = of["gate_up"].chunk(2)
        return grads | {
            "fc.weight": of["fc"],
            f"{_ATTENTION}o_proj.weight": of["o"],
            f"{_MLP}gate_proj.weight": gate,
            f"{_MLP}up_proj.weight": up,
            f"{_MLP}down_proj.weight": of["down"],
            "lm_head.weight": head,
            "embed_tokens.weight": self.embedding,
            f"{_LAYER}input_layernorm.weight": of["embed_norm"],
            f"{_LAYER}hidden_norm.weight": of["hidden_norm"],
            f"{_LAYER}post_attention_layernorm.weight": of["post_norm"],
            "norm.weight": of["norm"],
            **dict(zip(aux_norm_names(draft), self.aux_norms, strict=True)),
        }
