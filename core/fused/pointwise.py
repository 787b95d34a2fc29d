"""RMSNorm with what surrounds it, and SwiGLU: one read and one write per tensor, float32 inside.

Every backward here also gives its norm weight's gradient, as partial sums of strips of rows that are added up after.

Shape suffixes: R rows, H hidden, I intermediate, S strips.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftsmith.core.fused.launch import block, strips


@triton.jit
def _rms(X, INDEX, W, Y, RSTD, size, eps, INDEXED: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    row = tl.load(INDEX + i).to(tl.int64) if INDEXED else i
    x = tl.load(X + row * size + c, mask=c < size, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, 0) / size + eps)
    y = x * rstd * tl.load(W + c, mask=c < size, other=0.0)
    tl.store(Y + i * size + c, y.to(Y.dtype.element_ty), mask=c < size)
    tl.store(RSTD + i, rstd)


@triton.jit
def _add_rms(
    A, INDEX, B, W, SUM, Y, RSTD, W_NEXT, NEXT, RSTD_NEXT, size, eps,
    INDEXED: tl.constexpr, HAS_NEXT: tl.constexpr, NORM_OUTPUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    row = tl.load(INDEX + i).to(tl.int64) if INDEXED else i
    a = tl.load(A + row * size + c, mask=c < size, other=0.0).to(tl.float32)
    b = tl.load(B + i * size + c, mask=c < size, other=0.0).to(tl.float32)
    # Rounded before it is normed, as the eager residual stream is.
    s = (a + b).to(SUM.dtype.element_ty)
    tl.store(SUM + i * size + c, s, mask=c < size)
    x = s.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, 0) / size + eps)
    y = (x * rstd * tl.load(W + c, mask=c < size, other=0.0)).to(Y.dtype.element_ty)
    tl.store(Y + i * size + c, y, mask=c < size)
    tl.store(RSTD + i, rstd)
    if HAS_NEXT:
        f = y.to(tl.float32) if NORM_OUTPUT else x
        rstd_next = tl.rsqrt(tl.sum(f * f, 0) / size + eps) if NORM_OUTPUT else rstd
        n = f * rstd_next * tl.load(W_NEXT + c, mask=c < size, other=0.0)
        tl.store(NEXT + i * size + c, n.to(NEXT.dtype.element_ty), mask=c < size)
        tl.store(RSTD_NEXT + i, rstd_next)


@triton.jit
def _norm_grad(dy, x, rstd, w, size):
    """Gradients of y = x * rstd * w: of x, and the row's part of w's."""
    normed = x * rstd
    g = dy * w
    return rstd * (g - normed * (tl.sum(g * normed, 0) / size)), dy * normed


@triton.jit
def _output_grad(
    DY, SCALE, X, RSTD, W, DN, DRES, RSTD_NEXT, W_NEXT, DX, DW, DW_NEXT, rows, size,
    HAS_NEXT: tl.constexpr, NORM_OUTPUT: tl.constexpr, RESIDUAL_NORMED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Backward of the second `_add_rms` of a step: from the loss, and from the step after."""
    c = tl.arange(0, BLOCK)
    inside = c < size
    w = tl.load(W + c, mask=inside, other=0.0)
    scale = tl.load(SCALE)
    dw = tl.zeros([BLOCK], tl.float32)
    dw_next = tl.zeros([BLOCK], tl.float32)
    wide = size.to(tl.int64)  # rows times their width may pass 2^31
    for i in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = i * wide + c
        x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(DY + at, mask=inside, other=0.0).to(tl.float32) * scale
        rstd = tl.load(RSTD + i)
        df = tl.zeros([BLOCK], tl.float32)
        if HAS_NEXT:
            feature = (x * rstd * w).to(DX.dtype.element_ty).to(tl.float32) if NORM_OUTPUT else x
            dn = tl.load(DN + at, mask=inside, other=0.0).to(tl.float32)
            dres = tl.load(DRES + at, mask=inside, other=0.0).to(tl.float32)
            if RESIDUAL_NORMED:
                dn += dres
            w_next = tl.load(W_NEXT + c, mask=inside, other=0.0)
            df, part = _norm_grad(dn, feature, tl.load(RSTD_NEXT + i), w_next, size)
            dw_next += part
            if not RESIDUAL_NORMED:
                df += dres
        if NORM_OUTPUT:
            dx, part = _norm_grad(dy + df, x, rstd, w, size)
        else:
            dx, part = _norm_grad(dy, x, rstd, w, size)
            dx += df
        dw += part
        tl.store(DX + at, dx.to(DX.dtype.element_ty), mask=inside)
    tl.store(DW + tl.program_id(0) * wide + c, dw, mask=inside)
    if HAS_NEXT:
        tl.store(DW_NEXT + tl.program_id(0) * wide + c, dw_next, mask=inside)


@triton.jit
def _rms_grad(
    DY, DRES, DRES_INDEX, X, INDEX, RSTD, W, DX, DW, rows, size,
    HAS_RES: tl.constexpr, RES_INDEXED: tl.constexpr, RESIDUAL_NORMED: tl.constexpr, INDEXED: tl.constexpr,
    HAS_DX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Backward of a norm whose input, or output, also is the residual branch."""
    c = tl.arange(0, BLOCK)
    inside = c < size
    w = tl.load(W + c, mask=inside, other=0.0)
    dw = tl.zeros([BLOCK], tl.float32)
    wide = size.to(tl.int64)  # rows times their width may pass 2^31
    for i in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = i * wide + c
        row = tl.load(INDEX + i) if INDEXED else i
        x = tl.load(X + row * wide + c, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(DY + at, mask=inside, other=0.0).to(tl.float32)
        dres = tl.zeros([BLOCK], tl.float32)
        if HAS_RES:
            r = tl.load(DRES_INDEX + i) if RES_INDEXED else i
            dres = tl.load(DRES + r * wide + c, mask=tl.where(r >= 0, c, size) < size, other=0.0).to(tl.float32)
        if RESIDUAL_NORMED:
            dy += dres
        dx, part = _norm_grad(dy, x, tl.load(RSTD + i), w, size)
        dw += part
        if not RESIDUAL_NORMED:
            dx += dres
        if HAS_DX:
            tl.store(DX + at, dx.to(DX.dtype.element_ty), mask=inside)
    tl.store(DW + tl.program_id(0) * wide + c, dw, mask=inside)


@triton.jit
def _swiglu(GU, A, PEAK, width, RAISE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(GU + i * 2 * width + c, mask=c < width, other=0.0).to(tl.float32)
    u = tl.load(GU + i * 2 * width + width + c, mask=c < width, other=0.0).to(tl.float32)
    act = (g * tl.sigmoid(g) * u).to(A.dtype.element_ty)
    tl.store(A + i * width + c, act, mask=c < width)
    if RAISE:
        tl.atomic_max(PEAK, tl.max(tl.abs(act.to(tl.float32)), 0))


@triton.jit
def _swiglu_grad(DA, GU, DGU, A, PEAK, width, RAISE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(GU + i * 2 * width + c, mask=c < width, other=0.0).to(tl.float32)
    u = tl.load(GU + i * 2 * width + width + c, mask=c < width, other=0.0).to(tl.float32)
    da = tl.load(DA + i * width + c, mask=c < width, other=0.0).to(tl.float32)
    gate = tl.sigmoid(g)
    silu = g * gate
    dg = (da * u * (gate + silu * (1.0 - gate))).to(DGU.dtype.element_ty)
    du = (da * silu).to(DGU.dtype.element_ty)
    tl.store(DGU + i * 2 * width + c, dg, mask=c < width)
    tl.store(DGU + i * 2 * width + width + c, du, mask=c < width)
    if RAISE:
        tl.atomic_max(PEAK, tl.max(tl.maximum(tl.abs(dg.to(tl.float32)), tl.abs(du.to(tl.float32))), 0))
    tl.store(A + i * width + c, (silu * u).to(A.dtype.element_ty), mask=c < width)


def rms(
    x: Tensor, weight_H: Tensor, eps: float, dtype: torch.dtype, index: Tensor | None = None, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Norm of the rows of `x`, or of its rows `index`: [R, H] in `dtype` (`out`), and 1 / rms, float32 [R]."""
    rows, size = len(x) if index is None else len(index), x.shape[-1]
    y = torch.empty(rows, size, dtype=dtype, device=x.device) if out is None else out
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    _rms[(rows,)](x, x if index is None else index, weight_H, y, rstd, size, eps, index is not None, block(size))
    return y, rstd


def add_rms(a: Tensor, b_RH: Tensor, weight_H: Tensor, eps: float, index: Tensor | None = None) -> tuple[Tensor, ...]:
    """A + b (the rows `index` of a), its norm, and 1 / rms."""
    rows, size = b_RH.shape
    total, y = torch.empty_like(b_RH), torch.empty_like(b_RH)
    rstd = torch.empty(rows, dtype=torch.float32, device=b_RH.device)
    _add_rms[(rows,)](
        a, a if index is None else index, b_RH, weight_H, total, y, rstd, weight_H, y, rstd, size, eps,
        index is not None, False, False, block(size),
    )  # fmt: skip
    return total, y, rstd


def add_rms_twice(
    a_RH: Tensor, b_RH: Tensor, weight_H: Tensor, next_weight_H: Tensor, eps: float, norm_output: bool, y: Tensor,
    following: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """A step's end: output a + b, its 1 / rms, and the 1 / rms of the next step's feature.

    Fills `y` with the normed output, and `following` with the next step's normed feature (None: there is none).
    """
    rows, size = b_RH.shape
    total = torch.empty_like(b_RH)
    rstd, next_rstd = (torch.empty(rows, dtype=torch.float32, device=b_RH.device) for _ in range(2))
    _add_rms[(rows,)](
        a_RH, a_RH, b_RH, weight_H, total, y, rstd, next_weight_H, y if following is None else following, next_rstd,
        size, eps, False, following is not None, norm_output, block(size),
    )  # fmt: skip
    return total, rstd, next_rstd


def output_grad(
    dy: Tensor, scale: Tensor, x: Tensor, rstd: Tensor, weight: Tensor,
    following: tuple[Tensor, Tensor, Tensor] | None, next_weight: Tensor, norm_output: bool, residual_normed: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Gradient of a step's output, of the final norm's weight and of the hidden norm's.

    Args:
        dy: gradient of the normed output.
        scale: scalar tensor that `dy` is multiplied by.
        x: the output.
        rstd: its 1 / rms.
        weight: of the final norm.
        following: of the step after: gradient of its normed feature, of its residual branch, and its feature's 1 / rms.
        next_weight: of the hidden norm.
        norm_output: the step after was fed the normed output.
        residual_normed: its residual branch was the normed feature.
    """
    rows, size = x.shape
    n = strips(rows, x.device)
    dx = torch.empty_like(x)
    dw = torch.empty(n, size, dtype=torch.float32, device=x.device)
    dw_next = torch.empty_like(dw)
    dn, dres, next_rstd = following or (x, x, rstd)
    _output_grad[(n,)](
        dy, scale, x, rstd, weight, dn, dres, next_rstd, next_weight, dx, dw, dw_next, rows, size,
        following is not None, norm_output, residual_normed, block(size), num_warps=8,
    )  # fmt: skip
    return dx, dw.sum(0), dw_next.sum(0) if following else None


def rms_grad(
    dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, residual: Tensor | None = None,
    residual_index: Tensor | None = None, residual_normed: bool = False, index: Tensor | None = None,
    need_input: bool = True,
) -> tuple[Tensor | None, Tensor]:  # fmt: skip
    """Gradient of a norm's input and of its weight.

    Args:
        dy: gradient of the normed rows.
        x: the input.
        rstd: its 1 / rms, of every row of `dy`.
        weight: of the norm.
        residual: gradient that reaches the input besides.
        residual_index: row of `residual` for every row, negative where there is none.
        residual_normed: `residual` is of the normed rows instead.
        index: the rows of `x` that were normed; None: all.
        need_input: False: the weight's gradient only.
    """
    rows, size = dy.shape
    n = strips(rows, dy.device)
    dx = torch.empty_like(dy) if need_input else None
    dw = torch.empty(n, size, dtype=torch.float32, device=dy.device)
    none = rstd
    _rms_grad[(n,)](
        dy, none if residual is None else residual, none if residual_index is None else residual_index, x,
        none if index is None else index, rstd, weight, none if dx is None else dx, dw, rows, size,
        residual is not None, residual_index is not None, residual_normed, index is not None, need_input,
        block(size), num_warps=8,
    )  # fmt: skip
    return dx, dw.sum(0)


_SWIGLU_BLOCK = 2048


def swiglu(gate_up: Tensor, peak: Tensor | None = None) -> Tensor:
    """silu(gate) * up of [R, 2I] (gate first): [R, I]; raises `peak` to its largest absolute value."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    size = min(_SWIGLU_BLOCK, block(width))
    raised = out if peak is None else peak
    _swiglu[(rows, triton.cdiv(width, size))](gate_up, out, raised, width, peak is not None, size)
    return out


def swiglu_grad(dact: Tensor, gate_up: Tensor, peak: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Gradient of `gate_up`, which raises `peak`, and the activation again, which the forward pass did not keep."""
    rows, width = dact.shape
    grad, act = torch.empty_like(gate_up), torch.empty_like(dact)
    size = min(_SWIGLU_BLOCK, block(width))
    raised = grad if peak is None else peak
    _swiglu_grad[(rows, triton.cdiv(width, size))](dact, gate_up, grad, act, raised, width, peak is not None, size)
    return grad, act
