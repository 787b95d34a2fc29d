"""Long documents that are supervised almost throughout: cuDNN attends to their step-1 keys, document by document.

On an H200 cuDNN's kernels are 1.7 times as fast as ours, but they know neither rows that are left out nor a row's own
keys of later steps. So a document's rows are spread over all of its positions (zeros between), and what comes back is
joined with what our kernels made of the own keys. For those our kernels see no step-1 key of the document: layout.py
lets its rows' documents begin behind the rows. Backward, a pass that is given the joined output and log-sum yields the
step-1 keys' part of every gradient, as in any flash attention.

cuDNN adds up the queries' gradients in no fixed order: bits may differ from run to run.

Shape suffixes: S positions of one document, rounded up; R rows, N query heads, G key/value heads, D head width.
"""

import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

LN_2 = math.log(2.0)
_LOG2_E = tl.constexpr(1.4426950408889634)
# cuDNN plans anew for every length (0.1 s), and what is moved for it costs what it saves at 2,048 tokens.
ROUND, SHORTEST = 256, 4096
# Of the pairs of rows and keys in a document, those that are needed.
LEAST_SHARE = 0.7
# The natural log-sum of a position without a row: its probabilities become zero.
_NO_ROW = 1.0e4
_BLOCK = 32


@dataclass(frozen=True)
class Whole:
    """A document that cuDNN takes.

    Attributes:
        start, length: its packed rows.
        r0, r1: its computed rows.
    """

    start: int
    length: int
    r0: int
    r1: int

    @property
    def size(self) -> int:
        """S."""
        return -(-self.length // ROUND) * ROUND


def choose(offsets: tuple[int, ...], rows: np.ndarray) -> tuple[Whole, ...]:
    """Documents of a batch that are long, and supervised almost throughout.

    Args:
        offsets: first packed row of every document, and the end.
        rows: packed rows that are computed, ascending.
    """
    chosen = []
    for start, end in itertools.pairwise(offsets):
        length, (r0, r1) = end - start, np.searchsorted(rows, (start, end)).tolist()
        needed = int((rows[r0:r1] - start + 1).sum())
        if length >= SHORTEST and needed >= LEAST_SHARE * length * (length + 1) / 2:
            chosen.append(Whole(start, length, r0, r1))
    return tuple(chosen)


@triton.jit
def _spread(X, TO, ROW_OF, length, size, N: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of X to their positions, zeros where there is no row."""
    s, n, c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1), tl.arange(0, D)
    r = tl.load(ROW_OF + s, mask=s < length, other=-1)
    x = tl.load(X + r[:, None].to(tl.int64) * (N * D) + n * D + c[None, :], mask=(r >= 0)[:, None], other=0.0)
    tl.store(TO + s[:, None] * (N * D) + n * D + c[None, :], x, mask=(s < size)[:, None])


@triton.jit
def _join(
    OUT, LSE, THEIRS, THEIR_LSE, AT, r0, rows, count, size, head_stride, row_stride,
    N: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """OUT and LSE, of the own keys, become those of both."""
    i, n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    here, c = i < rows, tl.arange(0, D)
    at = tl.load(AT + i, mask=here, other=0)
    own = tl.load(LSE + n * count + r0 + i, mask=here, other=0.0)
    theirs = tl.load(THEIR_LSE + n * size + at, mask=here, other=0.0) * _LOG2_E
    higher = tl.maximum(own, theirs)
    lse = higher + tl.log2(tl.exp2(own - higher) + tl.exp2(theirs - higher))
    to = OUT + (r0 + i)[:, None].to(tl.int64) * (N * D) + n * D + c[None, :]
    there = THEIRS + at[:, None] * row_stride + n * head_stride + c[None, :]
    a = tl.load(to, mask=here[:, None], other=0.0).to(tl.float32) * tl.exp2(own - lse)[:, None]
    b = tl.load(there, mask=here[:, None], other=0.0).to(tl.float32) * tl.exp2(theirs - lse)[:, None]
    tl.store(to, (a + b).to(OUT.dtype.element_ty), mask=here[:, None])
    tl.store(LSE + n * count + r0 + i, lse, mask=here)


@triton.jit
def _add(
    DQ, THEIRS, AT, r0, rows, head_stride, row_stride, N: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    i, n, c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1), tl.arange(0, D)
    here = (i < rows)[:, None]
    at = tl.load(AT + i, mask=i < rows, other=0)
    to = DQ + (r0 + i)[:, None].to(tl.int64) * (N * D) + n * D + c[None, :]
    there = THEIRS + at[:, None] * row_stride + n * head_stride + c[None, :]
    both = tl.load(to, mask=here, other=0.0).to(tl.float32) + tl.load(there, mask=here, other=0.0).to(tl.float32)
    tl.store(to, both.to(DQ.dtype.element_ty), mask=here)


class WholePasses:
    """cuDNN's passes over the whole documents of one batch."""

    def __init__(
        self, whole: tuple[Whole, ...], rows_R: Tensor, row_of_T: Tensor, k_TGD: Tensor, v_TGD: Tensor
    ) -> None:
        """Keep where every row lies in its document.

        Args:
            whole: the documents.
            rows_R: packed row of every computed row.
            row_of_T: the reverse, -1 where there is none.
            k_TGD: storage of the step-1 keys, with at least ROUND finite rows behind the last document.
            v_TGD: of their values.
        """
        self.whole, self.row_of_T, self.k_TGD, self.v_TGD = whole, row_of_T, k_TGD, v_TGD
        self.at = [rows_R[w.r0 : w.r1].long() - w.start for w in whole]
        self.sums: list[tuple[Tensor, Tensor]] = []

    def forward(self, q_RND: Tensor, out_RND: Tensor, lse_NR: Tensor) -> None:
        """Add the step-1 keys of whole documents to outputs and log2-sums of the own keys."""
        count, n, d = q_RND.shape
        for w, at in zip(self.whole, self.at, strict=True):
            out, lse = _attend(self._spread(q_RND, w), *self._keys(w))
            _join[(triton.cdiv(len(at), _BLOCK), n)](
                out_RND, lse_NR, out, lse, at, w.r0, len(at), count, w.size, out.stride(1), out.stride(2), n, d, _BLOCK
            )

    def backward(self, q_RND: Tensor, out_RND: Tensor, grad_RND: Tensor, lse_NR: Tensor, dq_RND: Tensor) -> None:
        """Add the step-1 keys' part to the queries' gradient, and to `sums` this step's to theirs and their values'."""
        _, n, d = q_RND.shape
        for i, (w, at) in enumerate(zip(self.whole, self.at, strict=True)):
            lse = lse_NR.new_full((1, n, w.size, 1), _NO_ROW)
            lse[0, :, :, 0].index_copy_(1, at, lse_NR[:, w.r0 : w.r1] * LN_2)
            q, out, grad = (self._spread(x, w) for x in (q_RND, out_RND, grad_RND))
            dq, dk, dv = _attend_backward(grad, q, *self._keys(w), out, lse)
            _add[(triton.cdiv(len(at), _BLOCK), n)](
                dq_RND, dq, at, w.r0, len(at), dq.stride(1), dq.stride(2), n, d, _BLOCK
            )
            if len(self.sums) == i:
                self.sums.append((dk.float(), dv.float()))
            else:
                for total, new in zip(self.sums[i], (dk, dv), strict=True):
                    total.add_(new)

    def store(self, dk_TGD: Tensor, dv_TGD: Tensor) -> None:
        """Write the sums over all steps."""
        for w, sums in zip(self.whole, self.sums, strict=True):
            for to, total in zip((dk_TGD, dv_TGD), sums, strict=True):
                to[w.start : w.start + w.length] = total[0, :, : w.length].transpose(0, 1)

    def _spread(self, x_RND: Tensor, w: Whole) -> Tensor:
        """A document's rows at its positions, [1, N, S, D]."""
        _, n, d = x_RND.shape
        spread = x_RND.new_empty(1, w.size, n, d)
        _spread[(triton.cdiv(w.size, _BLOCK), n)](
            x_RND, spread, self.row_of_T[w.start :], w.length, w.size, n, d, _BLOCK
        )
        return spread.transpose(1, 2)

    def _keys(self, w: Whole) -> tuple[Tensor, Tensor]:
        """[1, G, S, D] each; what follows the document comes after all of its rows, so none of them sees it."""
        k, v = (x[None, w.start : w.start + w.size].transpose(1, 2) for x in (self.k_TGD, self.v_TGD))
        return k, v


def _attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Causal attention and its natural log-sums [1, N, S, 1]."""
    if not q.is_cuda:
        return _attend_eagerly(q, k, v)
    done = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False)
    return done[0], done[1]


def _attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    if not q.is_cuda:
        return _attend_backward_eagerly(grad, q, k, v, out, lse)
    size, unused = q.shape[2], torch.zeros((), dtype=torch.int64, device=q.device)  # no dropout, no seeds
    dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, lse, unused, unused, None, None, None, size, size, 0.0, True
    )
    return dq, dk, dv


def _scores(q: Tensor, k: Tensor) -> Tensor:
    size, d = q.shape[2:]
    s: Tensor = q.float() @ k.float().repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(2, 3) * d**-0.5
    return s.masked_fill(torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1), -torch.inf)


def _attend_eagerly(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """`_attend` in PyTorch: what CPUs run, and cuDNN is compared with."""
    s, group = _scores(q, k), q.shape[1] // k.shape[1]
    return (s.softmax(-1) @ v.float().repeat_interleave(group, 1)).to(q.dtype), s.logsumexp(-1, keepdim=True)


def _attend_backward_eagerly(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    group, scale = q.shape[1] // k.shape[1], q.shape[3] ** -0.5
    p = (_scores(q, k) - lse).exp()
    delta = (grad.float() * out.float()).sum(-1, keepdim=True)
    ds = p * (grad.float() @ v.float().repeat_interleave(group, 1).transpose(2, 3) - delta) * scale
    dq = ds @ k.float().repeat_interleave(group, 1)
    dk, dv = ds.transpose(2, 3) @ q.float(), p.transpose(2, 3) @ grad.float()
    dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)
