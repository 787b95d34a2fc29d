"""Matrix products in float8 (`train.matmul: fp8`), twice as fast as bfloat16 on Hopper.

Every operand is scaled by its largest value just before it is used: e4m3 (three bits of mantissa) for weights and
activations, e5m2 (range before precision) for gradients, which differ by orders of magnitude between rows. The tensor
cores want the summed dimension contiguous on both sides, so an output's gradient is written twice, as it is and
transposed, in one read. Sums are float32.

Shape suffixes: M rows, N outputs and K inputs of a layer y_MN = x_MK @ w_NK.T.
"""

from dataclasses import dataclass, replace
from typing import Any

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
_TILE = 32


@triton.jit
def _cast(
    X, PEAK, SCALE, PLAIN, TURNED, rows, columns, x_width, turned_width, largest,
    WITH_PLAIN: tl.constexpr, WITH_TURNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A tile of X / scale in float8, as it is and transposed; the transposed rows end in zeros."""
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    j = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    peak = tl.load(PEAK)
    scale = tl.where(peak == 0.0, 1.0, peak / largest)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(SCALE, scale)
    inside = (i[:, None] < rows) & (j[None, :] < columns)
    x = tl.load(X + i[:, None] * x_width + j[None, :], mask=inside, other=0.0).to(tl.float32) / scale
    if WITH_PLAIN:
        tl.store(PLAIN + i[:, None] * columns + j[None, :], x.to(PLAIN.dtype.element_ty), mask=inside)
    if WITH_TURNED:
        fits = (j[:, None] < columns) & (i[None, :] < turned_width)
        y = tl.trans(x.to(TURNED.dtype.element_ty))
        tl.store(TURNED + j[:, None] * turned_width + i[None, :], y, mask=fits)


@dataclass(frozen=True)
class Scaled:
    """A matrix in float8: values are `plain` * scale, or `turned`.T * scale (its rows padded with zeros).

    Attributes:
        dtype: that it was cast from, and that products of it are returned in.
    """

    plain: Tensor | None
    turned: Tensor | None
    scale: Tensor
    dtype: torch.dtype


def scaled(x: Tensor, dtype: torch.dtype, plain: bool, turned: bool, peak: Tensor | None = None) -> Scaled:
    """Cast a contiguous matrix; a value that is not finite makes all that is computed from it NaN, as in bfloat16."""
    rows, columns = x.shape
    if peak is None:
        peak = largest(x)
    if not x.is_cuda:
        return scaled_eagerly(x, peak, dtype, plain, turned)
    as_is = torch.empty(rows if plain else 0, columns, dtype=dtype, device=x.device)
    across = torch.empty(columns if turned else 0, padded(rows), dtype=dtype, device=x.device)
    scale = cast_into(x, peak, as_is, across, torch.finfo(dtype).max)
    return Scaled(as_is if plain else None, across if turned else None, scale, x.dtype)


def largest(x: Tensor) -> Tensor:
    """Largest absolute value, float32; NaN where there is one."""
    found: Tensor = torch.linalg.vector_norm(x, float("inf"), dtype=torch.float32)
    return found


def padded(rows: int) -> int:
    """Columns of the transpose of a matrix of so many rows."""
    return int(triton.cdiv(rows, MULTIPLE)) * MULTIPLE


def cast_into(x: Tensor, peak: Tensor, plain: Tensor, turned: Tensor, most: float) -> Tensor:
    """Fill those of `plain` [M, N] and `turned` [N, padded M] that are not empty, `peak` becoming `most`; the scale."""
    scale, (rows, columns), width = torch.empty_like(peak), x.shape, padded(len(x))
    grid = (triton.cdiv(width, _TILE), triton.cdiv(columns, _TILE))
    _cast[grid](
        x, peak, scale, plain, turned, rows, columns, x.stride(0), width, most, plain.numel() > 0, turned.numel() > 0,
        _TILE,
    )  # fmt: skip
    return scale


def scaled_eagerly(x: Tensor, peak: Tensor, dtype: torch.dtype, plain: bool, turned: bool) -> Scaled:
    """`scaled` in PyTorch: its reference, and what CPUs run (Triton's interpreter rounds float8 wrongly)."""
    scale = torch.where(peak == 0.0, 1.0, peak / torch.finfo(dtype).max)
    cast = (x.float() / scale).to(dtype)
    return Scaled(cast if plain else None, _turned_eagerly(cast) if turned else None, scale, x.dtype)


def _turned_eagerly(x: Tensor) -> Tensor:
    return F.pad(x.view(torch.uint8), (0, 0, 0, padded(len(x)) - len(x))).view(x.dtype).T.contiguous()


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

    def measured(self, x: Tensor) -> Tensor:
        """One read."""
        return largest(x)

    def raised(self, like: Tensor) -> Tensor:
        """To be raised by atomic maxima, whose order does not matter."""
        return torch.zeros((), dtype=torch.float32, device=like.device)

    def normed(self, weight_H: Tensor) -> Tensor:
        """A bound: no element of a row is more than sqrt(H) times its rms. Float8 has the range to be scaled by it."""
        return largest(weight_H).mul(len(weight_H) ** 0.5)

    def forward(self, x_MK: Tensor, w: Scaled, out: Tensor | None = None, peak: Tensor | None = None) -> Tensor:
        """X @ w.T in x's dtype."""
        x = scaled(x_MK, E4M3, plain=True, turned=False, peak=peak)
        assert x.plain is not None and w.plain is not None
        return _product(x.plain, w.plain, x.scale, w.scale, x_MK.dtype, out)

    def gradient(
        self, dy_MN: Tensor, into_input: bool = True, into_weight: bool = True, peak: Tensor | None = None
    ) -> Scaled:
        """Cast once for both."""
        return scaled(dy_MN, E5M2, plain=into_input, turned=into_weight, peak=peak)

    def into_input(self, dy: Scaled, w: Scaled, out: Tensor | None = None) -> Tensor:
        """The gradient dy @ w of x."""
        assert dy.plain is not None and w.turned is not None
        return _product(dy.plain, w.turned, dy.scale, w.scale, dy.dtype, out)

    def into_weight(self, total_NK: Tensor | None, dy: Scaled, x_MK: Tensor, peak: Tensor | None = None) -> Tensor:
        """`total` + dy.T @ x in float32; what is added is rounded to bfloat16, 2^-5 of the operands' own rounding."""
        x = scaled(x_MK, E4M3, plain=False, turned=True, peak=peak)
        assert dy.turned is not None and x.turned is not None
        dtype = torch.float32 if total_NK is None else dy.dtype
        made = _product(dy.turned, x.turned, dy.scale, x.scale, dtype, None)
        return made if total_NK is None else total_NK.add_(made)

    def overwriting(self, values_MN: Tensor, peak: Tensor) -> tuple[Any, Tensor, Tensor | None]:
        """In float8 at the start of each row: an element lies where an earlier value was, which has been read."""
        if not values_MN.is_cuda:
            return super().overwriting(values_MN, peak)
        plain, scale = values_MN.view(E5M2)[:, : values_MN.shape[1]], peak / torch.finfo(E5M2).max
        return Scaled(plain, None, scale, values_MN.dtype), plain, scale

    def overwritten(self, gradient: Any, into_weight: bool) -> Scaled:
        """Transposed where the weight's gradient is wanted."""
        if not isinstance(gradient, Scaled):
            return self.gradient(gradient, into_weight=into_weight)
        plain = gradient.plain
        if not into_weight or plain is None:
            return gradient
        turned = torch.empty(plain.shape[1], padded(len(plain)), dtype=plain.dtype, device=plain.device)
        cast_into(plain, torch.ones_like(gradient.scale), plain[:0], turned, 1.0)
        return replace(gradient, turned=turned)


def _product(
    a_MK: Tensor, b_NK: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, out: Tensor | None
) -> Tensor:
    given = {} if out is None else {"out": out}
    made: Tensor = torch._scaled_mm(a_MK, b_NK.T, scale_a, scale_b, out_dtype=dtype, use_fast_accum=True, **given)
    return made
