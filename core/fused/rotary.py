"""Between the q/k/v projection and attention: the embedding's half is added, queries and keys are rotated.

The projection of [norm(embed(x)); norm(feature)] is a sum of two, and the embedding's depends on the token alone. So it
is computed once per packed token, and step j at row t reads it at row t + j.

Backward, this is also where a row's own later keys (steps 2..j) get their gradients from the steps that saw them.

Shape suffixes: T packed tokens, R rows, N query heads, G key/value heads, D head width, C = (N + 2G) D, J steps.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from draftsmith.core.fused.attention import LOG2_E
from draftsmith.core.fused.layout import Layout


@triton.jit
def _halves(D: tl.constexpr, ROTATED: tl.constexpr):
    """Columns of the partners of every rotated pair; what is not rotated is paired too, and left alone by cos = 1."""
    i = tl.arange(0, D // 2)
    return tl.where(i < ROTATED // 2, i, i + ROTATED // 2), tl.where(i < ROTATED // 2, i + ROTATED // 2, i + D // 2)


@triton.jit
def _rotate(
    H, E, Q, K, V, COS, SIN, ROWS, ROW_OF, POSITIONS, tokens, step,
    N: tl.constexpr, G: tl.constexpr, D: tl.constexpr, ROTATED: tl.constexpr, FIRST: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    t = i if FIRST else tl.load(ROWS + i)
    r = tl.load(ROW_OF + i) if FIRST else i  # queries exist for computed rows only
    e = tl.minimum(t + step, tokens - 1)
    position = tl.load(POSITIONS + t) + step - 1
    heads = tl.program_id(1) * BH + tl.arange(0, BH)
    left, right = _halves(D, ROTATED)
    C: tl.constexpr = (N + 2 * G) * D
    inside = (heads < N + 2 * G)[:, None] & (left >= 0)[None, :]
    a, b = heads[:, None] * D + left[None, :], heads[:, None] * D + right[None, :]
    h_row, e_row = i.to(tl.int64) * C, e.to(tl.int64) * C
    x = tl.load(H + h_row + a, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(H + h_row + b, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(E + e_row + a, mask=inside, other=0.0).to(tl.float32)
    y += tl.load(E + e_row + b, mask=inside, other=0.0).to(tl.float32)
    half = tl.arange(0, D // 2)
    turned = (heads < N + G)[:, None]
    cos = tl.where(turned, tl.load(COS + position * (D // 2) + half)[None, :], 1.0)
    sin = tl.where(turned, tl.load(SIN + position * (D // 2) + half)[None, :], 0.0)
    x, y = x * cos - y * sin, y * cos + x * sin
    kind = Q.dtype.element_ty
    to_q = (tl.where(heads < N, r, -1) >= 0)[:, None] & inside
    q_row = r.to(tl.int64) * (N * D)
    tl.store(Q + q_row + a, x.to(kind), mask=to_q)
    tl.store(Q + q_row + b, y.to(kind), mask=to_q)
    kv_row = i.to(tl.int64) * (G * D)
    to_k = (heads >= N)[:, None] & turned & inside
    tl.store(K + kv_row + a - N * D, x.to(kind), mask=to_k)
    tl.store(K + kv_row + b - N * D, y.to(kind), mask=to_k)
    to_v = (heads >= N + G)[:, None] & inside
    tl.store(V + kv_row + a - (N + G) * D, x.to(kind), mask=to_v)
    tl.store(V + kv_row + b - (N + G) * D, y.to(kind), mask=to_v)


@triton.jit
def _turn_back(x, y, COS, SIN, positions, inside, D: tl.constexpr):
    half = positions[:, None] * (D // 2) + tl.arange(0, D // 2)[None, :]
    cos = tl.load(COS + half, mask=inside, other=0.0)
    sin = tl.load(SIN + half, mask=inside, other=0.0)
    return x * cos + y * sin, y * cos - x * sin


@triton.jit
def _first_grad(
    DQ, DK, DV, DH, COS, SIN, ROW_OF, POSITIONS, tokens,
    N: tl.constexpr, G: tl.constexpr, D: tl.constexpr, ROTATED: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Step 1, all packed rows: one head of q, k or v a program."""
    t = tl.program_id(0) * BR + tl.arange(0, BR)
    head = tl.program_id(1)
    left, right = _halves(D, ROTATED)
    inside = (t < tokens)[:, None] & (left >= 0)[None, :]
    positions = tl.load(POSITIONS + t, mask=t < tokens, other=0)
    if head < N:
        r = tl.load(ROW_OF + t, mask=t < tokens, other=-1)
        at = r[:, None].to(tl.int64) * (N * D) + head * D
        there = inside & (r >= 0)[:, None]
        x = tl.load(DQ + at + left[None, :], mask=there, other=0.0).to(tl.float32)
        y = tl.load(DQ + at + right[None, :], mask=there, other=0.0).to(tl.float32)
    elif head < N + G:
        at = t[:, None].to(tl.int64) * (G * D) + (head - N) * D
        x = tl.load(DK + at + left[None, :], mask=inside, other=0.0).to(tl.float32)
        y = tl.load(DK + at + right[None, :], mask=inside, other=0.0).to(tl.float32)
    else:
        at = t[:, None].to(tl.int64) * (G * D) + (head - N - G) * D
        x = tl.load(DV + at + left[None, :], mask=inside, other=0.0).to(tl.float32)
        y = tl.load(DV + at + right[None, :], mask=inside, other=0.0).to(tl.float32)
    if head < N + G:
        x, y = _turn_back(x, y, COS, SIN, positions, inside, D)
    to = t[:, None].to(tl.int64) * ((N + 2 * G) * D) + head * D
    tl.store(DH + to + left[None, :], x.to(DH.dtype.element_ty), mask=inside)
    tl.store(DH + to + right[None, :], y.to(DH.dtype.element_ty), mask=inside)


@triton.jit
def _own_grad(
    Q, DO, K, V, LSE, DELTA, DQ, DH, COS, SIN, ROWS, POSITIONS, count, step, last, scale,
    N: tl.constexpr, G: tl.constexpr, D: tl.constexpr, ROTATED: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Step 2 and on: a key/value head of one step a program, and the queries that see it, up to step `last`."""
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    g = tl.program_id(1)
    left, right = _halves(D, ROTATED)
    inside = (r < count)[:, None] & (left >= 0)[None, :]
    rows = tl.load(ROWS + r, mask=r < count, other=0)
    positions = tl.load(POSITIONS + rows, mask=r < count, other=0) + step - 1
    kv = r[:, None].to(tl.int64) * (G * D) + g * D
    ka = tl.load(K + kv + left[None, :], mask=inside, other=0.0).to(tl.float32)
    kb = tl.load(K + kv + right[None, :], mask=inside, other=0.0).to(tl.float32)
    va = tl.load(V + kv + left[None, :], mask=inside, other=0.0).to(tl.float32)
    vb = tl.load(V + kv + right[None, :], mask=inside, other=0.0).to(tl.float32)
    dka, dkb = tl.zeros([BR, D // 2], tl.float32), tl.zeros([BR, D // 2], tl.float32)
    dva, dvb = tl.zeros([BR, D // 2], tl.float32), tl.zeros([BR, D // 2], tl.float32)
    out = r[:, None].to(tl.int64) * ((N + 2 * G) * D)
    kind = DH.dtype.element_ty
    for head in range(g * (N // G), (g + 1) * (N // G)):
        for j in range(step, last + 1):
            at = ((j - 1) * count + r)[:, None].to(tl.int64) * (N * D) + head * D
            qa = tl.load(Q + at + left[None, :], mask=inside, other=0.0).to(tl.float32)
            qb = tl.load(Q + at + right[None, :], mask=inside, other=0.0).to(tl.float32)
            oa = tl.load(DO + at + left[None, :], mask=inside, other=0.0).to(tl.float32)
            ob = tl.load(DO + at + right[None, :], mask=inside, other=0.0).to(tl.float32)
            row = ((j - 1) * N + head) * count + r
            s = (tl.sum(qa * ka, 1) + tl.sum(qb * kb, 1)) * scale
            p = tl.exp2(s - tl.load(LSE + row, mask=r < count, other=0.0))
            dp = tl.sum(oa * va, 1) + tl.sum(ob * vb, 1)
            ds = p * (dp - tl.load(DELTA + row, mask=r < count, other=0.0)) * (scale * 0.6931471805599453)
            dka += ds[:, None] * qa
            dkb += ds[:, None] * qb
            dva += p[:, None] * oa
            dvb += p[:, None] * ob
        at = r[:, None].to(tl.int64) * (N * D) + head * D
        x = tl.load(DQ + at + left[None, :], mask=inside, other=0.0).to(tl.float32)
        y = tl.load(DQ + at + right[None, :], mask=inside, other=0.0).to(tl.float32)
        x, y = _turn_back(x, y, COS, SIN, positions, inside, D)
        tl.store(DH + out + head * D + left[None, :], x.to(kind), mask=inside)
        tl.store(DH + out + head * D + right[None, :], y.to(kind), mask=inside)
    dka, dkb = _turn_back(dka, dkb, COS, SIN, positions, inside, D)
    tl.store(DH + out + (N + g) * D + left[None, :], dka.to(kind), mask=inside)
    tl.store(DH + out + (N + g) * D + right[None, :], dkb.to(kind), mask=inside)
    tl.store(DH + out + (N + G + g) * D + left[None, :], dva.to(kind), mask=inside)
    tl.store(DH + out + (N + G + g) * D + right[None, :], dvb.to(kind), mask=inside)


@triton.jit
def _embed_grad(DH, DE, ROW_OF, tokens, count, steps, C: tl.constexpr, BLOCK: tl.constexpr):
    """Sum over the steps that read packed row u."""
    u = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(DH + (u - 1).to(tl.int64) * C + c, mask=tl.where(u >= 1, c, C) < C, other=0.0).to(tl.float32)
    for j in range(2, steps + 1):
        r = tl.load(ROW_OF + u - j, mask=u >= j, other=-1)
        row = (tokens + (j - 2) * count + r).to(tl.int64)
        total += tl.load(DH + row * C + c, mask=tl.where(r >= 0, c, C) < C, other=0.0).to(tl.float32)
    tl.store(DE + u.to(tl.int64) * C + c, total.to(DE.dtype.element_ty), mask=c < C)


class Rotary:
    """The tables of one batch, and the passes that use them."""

    def __init__(self, layout: Layout, cos: Tensor, sin: Tensor, heads: tuple[int, int, int]) -> None:
        """Keep what all passes share.

        Args:
            layout: of the batch.
            cos: float32 [positions, rotated columns of a head], both halves alike.
            sin: the same.
            heads: N, G, D.
        """
        self.layout, self.rotated = layout, cos.shape[-1]
        self.n, self.g, self.d = heads
        rest = (0, (self.d - self.rotated) // 2)
        self.cos = F.pad(cos[:, : self.rotated // 2], rest, value=1.0).contiguous()
        self.sin = F.pad(sin[:, : self.rotated // 2], rest).contiguous()

    def forward(self, step: int, hidden: Tensor, embed_TC: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Fill q [R, N, D], k and v ([T, G, D] at step 1, else [R, G, D]) from the two projections."""
        lay, block_heads = self.layout, 16
        grid = (len(hidden), triton.cdiv(self.n + 2 * self.g, block_heads))
        _rotate[grid](
            hidden, embed_TC, q, k, v, self.cos, self.sin, lay.rows_R, lay.row_of_T, lay.positions_T,
            len(embed_TC), step, self.n, self.g, self.d, self.rotated, step == 1, block_heads,
        )  # fmt: skip

    def first_grad(self, dq_RND: Tensor, dk_TGD: Tensor, dv_TGD: Tensor, out_TC: Tensor) -> None:
        """Gradient of step 1's projections, into `out_TC`."""
        lay, rows = self.layout, 32
        _first_grad[(triton.cdiv(len(out_TC), rows), self.n + 2 * self.g)](
            dq_RND, dk_TGD, dv_TGD, out_TC, self.cos, self.sin, lay.row_of_T, lay.positions_T, len(out_TC),
            self.n, self.g, self.d, self.rotated, rows,
        )  # fmt: skip

    def own_grad(
        self, step: int, q_JRND: Tensor, do_JRND: Tensor, own: tuple[Tensor, Tensor], lse: Tensor, delta: Tensor,
        dq_RND: Tensor, out_RC: Tensor,
    ) -> None:  # fmt: skip
        """Gradient of a later step's projections, into `out_RC`; `own` are its keys and values."""
        lay, rows = self.layout, 16
        last = min(lay.steps, step + lay.window - 1)
        _own_grad[(triton.cdiv(len(out_RC), rows), self.g)](
            q_JRND, do_JRND, *own, lse, delta, dq_RND, out_RC, self.cos, self.sin, lay.rows_R, lay.positions_T,
            len(out_RC), step, last, self.d**-0.5 * LOG2_E, self.n, self.g, self.d, self.rotated, rows,
        )  # fmt: skip

    def embed_grad(self, grads_XC: Tensor) -> Tensor:
        """Gradient of the embedding's projections [T, C], from those of all steps (T rows, then R of each step)."""
        lay, width, size = self.layout, grads_XC.shape[1], 2048
        tokens = len(lay.row_of_T)
        out = torch.empty(tokens, width, dtype=grads_XC.dtype, device=grads_XC.device)
        size = min(size, triton.next_power_of_2(width))
        _embed_grad[(tokens, triton.cdiv(width, size))](
            grads_XC, out, lay.row_of_T, tokens, lay.num_rows, lay.steps, width, size
        )
        return out
