"""Matrix products in float8 (`train.matmul: fp8`), twice as fast as bfloat16 on Hopper.

Every operand is scaled by its largest value just before it is used: e4m3 (three bits of mantissa) for weights and
activations, e5m2 (range before precision) for gradients, which differ by orders of magnitude between rows. The tensor
cores want the summed dimension contiguous on both sides, so an output's gradient is written twice, as it is and
transposed, in one read. Sums are float32.

Shape suffixes: M rows, N outputs and K inputs of a layer y_MN = x_MK @ w_NK.T.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from draftsmith.core.draft_shape import DraftShape
from draftsmith.core.fused.products import Products

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Every dimension that is summed over, or is the second operand's, must be a multiple of this.
MULTIPLE = 16
_TILE = 64


@triton.jit
def _cast(
    X, AMAX, SCALE, PLAIN, TURNED, rows, columns, turned_width, largest,
    WITH_PLAIN: tl.constexpr, WITH_TURNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A tile of X / scale in float8, as it is and transposed; the transposed rows end in zeros."""
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    j = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    amax = tl.load(AMAX)
    scale = tl.where(amax == 0.0, 1.0, amax / largest)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(SCALE, scale)
    inside = (i[:, None] < rows) & (j[None, :] < columns)
    x = tl.load(X + i[:, None] * columns + j[None, :], mask=inside, other=0.0).to(tl.float32) / scale
    if WITH_PLAIN:
        tl.store(PLAIN + i[:, None] * columns + j[None, :], x.to(PLAIN.dtype.element_ty), mask=inside)
    if WITH_TURNED:
        fits = (j[:, None] < columns) & (i[None, :] < turned_width)
        y = tl.trans(x.to(TURNED.dtype.element_ty))
        tl.store(TURNED + j[:, None] * turned_width + i[None, :], y, mask=fits)


@dataclass(frozen=True)
class Scaled:
    """A matrix in float8: values are `plain` * scale, or `turned`.T * scale (its rows padded with zeros)."""

    plain: Tensor | None
    turned: Tensor | None
    scale: Tensor


def scaled(x: Tensor, dtype: torch.dtype, plain: bool, turned: bool) -> Scaled:
    """Cast a contiguous matrix; a value that is not finite makes all that is computed from it NaN, as in bfloat16."""
    rows, columns = x.shape
    width = triton.cdiv(rows, MULTIPLE) * MULTIPLE
    amax = torch.linalg.vector_norm(x, float("inf"), dtype=torch.float32)
    if not x.is_cuda:
        return scaled_eagerly(x, amax, dtype, plain, turned)
    as_is = torch.empty(rows if plain else 0, columns, dtype=dtype, device=x.device)
    across = torch.empty(columns if turned else 0, width, dtype=dtype, device=x.device)
    scale = cast_into(x, amax, as_is, across, torch.finfo(dtype).max)
    return Scaled(as_is if plain else None, across if turned else None, scale)


def cast_into(x: Tensor, amax: Tensor, plain: Tensor, turned: Tensor, largest: float) -> Tensor:
    """Fill those of `plain` [M, N] and `turned` [N, padded M] that are not empty; the scale."""
    scale, (rows, columns), width = torch.empty_like(amax), x.shape, triton.cdiv(len(x), MULTIPLE) * MULTIPLE
    grid = (triton.cdiv(width, _TILE), triton.cdiv(columns, _TILE))
    _cast[grid](
        x, amax, scale, plain, turned, rows, columns, width, largest, plain.numel() > 0, turned.numel() > 0, _TILE
    )
    return scale


def scaled_eagerly(x: Tensor, amax: Tensor, dtype: torch.dtype, plain: bool, turned: bool) -> Scaled:
    """`scaled` in PyTorch: its reference, and what CPUs run (Triton's interpreter rounds float8 wrongly)."""
    scale = torch.where(amax == 0.0, 1.0, amax / torch.finfo(dtype).max)
    cast = (x.float() / scale).to(dtype)
    padded = F.pad(cast.view(torch.uint8), (0, 0, 0, -len(x) % MULTIPLE)).view(dtype)
    return Scaled(cast if plain else None, padded.T.contiguous() if turned else None, scale)


def odd_sizes(shape: DraftShape) -> dict[str, int]:
    """Sizes of a draft that float8 products cannot have, by name; empty where they can."""
    heads = {"num_heads * head_dim": shape.num_heads * shape.head_dim}
    heads |= {"(num_heads + 2 num_kv_heads) * head_dim": (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim}
    named = {name: getattr(shape, name) for name in ("hidden_size", "intermediate_size", "draft_vocab_size")}
    return {name: size for name, size in (named | heads).items() if size % MULTIPLE}


class Fp8Products(Products):
    """The three products of a layer, operands in float8."""

    def weight(self, w_NK: Tensor) -> Scaled:
        """As it is for `forward`, transposed for `into_input`."""
        return scaled(w_NK, E4M3, plain=True, turned=True)

    def forward(self, x_MK: Tensor, w: Scaled, out: Tensor | None = None) -> Tensor:
        """X @ w.T in x's dtype."""
        x = scaled(x_MK, E4M3, plain=True, turned=False)
        assert x.plain is not None and w.plain is not None
        return _product(x.plain, w.plain, x.scale, w.scale, x_MK.dtype, out)

    def gradient(self, dy_MN: Tensor, into_input: bool = True, into_weight: bool = True) -> tuple[Scaled, torch.dtype]:
        """Cast once for both."""
        return scaled(dy_MN, E5M2, plain=into_input, turned=into_weight), dy_MN.dtype

    def into_input(self, dy: tuple[Scaled, torch.dtype], w: Scaled, out: Tensor | None = None) -> Tensor:
        """The gradient dy @ w of x."""
        grad, dtype = dy
        assert grad.plain is not None and w.turned is not None
        return _product(grad.plain, w.turned, grad.scale, w.scale, dtype, out)

    def into_weight(self, total_NK: Tensor | None, dy: tuple[Scaled, torch.dtype], x_MK: Tensor) -> Tensor:
        """`total` + dy.T @ x in float32."""
        grad, x = dy[0], scaled(x_MK, E4M3, plain=False, turned=True)
        assert grad.turned is not None and x.turned is not None
        made = _product(grad.turned, x.turned, grad.scale, x.scale, torch.float32, None)
        return made if total_NK is None else total_NK.add_(made)


def _product(
    a_MK: Tensor, b_NK: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, out: Tensor | None
) -> Tensor:
    given = {} if out is None else {"out": out}
    made: Tensor = torch._scaled_mm(a_MK, b_NK.T, scale_a, scale_b, out_dtype=dtype, use_fast_accum=True, **given)
    return made
