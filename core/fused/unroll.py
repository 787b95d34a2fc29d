"""Forward and backward of the unroll by hand: what core/unroll.py and autograd compute, at a fraction of the traffic.

core/unroll.py has the alignment drawn. tests/parity/fused_cases.py compares with the float64 reference.

What is saved per (step, row), and nothing else: normed feature, q, k, v, attention's output and log-sum, the two
residual sums, the normed MLP input and gate/up. The SwiGLU's activation is made again in the backward pass.

Shape suffixes: T packed tokens, R rows, J steps, A auxiliary states, H hidden, C = (N + 2G) D, I intermediate,
N query heads, G key/value heads, D head width.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from draftsmith.core.batch import Batch
from draftsmith.core.draft import DraftModel
from draftsmith.core.fused import pointwise
from draftsmith.core.fused.attention import Attention
from draftsmith.core.fused.layout import Layout
from draftsmith.core.fused.products import Products
from draftsmith.core.fused.rotary import Rotary
from draftsmith.core.fused.weights import Gradients, Weights

# Sums the rows of equal tokens in a fixed order, unlike index_add.
embedding_grad = partial(torch.ops.aten.embedding_dense_backward, padding_idx=-1, scale_grad_by_freq=False)
# fc's products are of the plain dtype, whatever the others are.
_PLAIN = Products()


@dataclass
class StepState:
    """One step's saved tensors, [R, ...]."""

    middle: Tensor
    middle_normed: Tensor
    middle_rstd: Tensor
    gate_up: Tensor
    output: Tensor
    output_rstd: Tensor
    feature_rstd: Tensor  # of the step after
    mixed_peak: Tensor | None  # of attention's output, for products that scale their operands
    act_peak: Tensor | None  # of the SwiGLU's activation


class FusedUnroll:
    """One batch, forward then backward."""

    def __init__(self, draft: DraftModel, weights: Weights, batch: Batch, layout: Layout) -> None:
        """Allocate what all steps share.

        Args:
            draft: for its shape, embedding and rotary tables.
            weights: as `gather_weights` made them.
            batch: on the device.
            layout: of the batch, on the device.
        """
        shape = draft.shape
        self.w, self.batch, self.layout, self.shape = weights, batch, layout, shape
        self.products = weights.products
        self.embed_peak, self.feature_peak, self.middle_peak = map(
            self.products.normed, (weights.embed_norm, weights.hidden_norm, weights.post_norm)
        )
        self.dtype, self.eps = weights.fc.dtype, shape.rms_norm_eps
        self.embedding_VH = draft.embedding_VH.detach()
        heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
        cos, sin = draft.rope(torch.arange(layout.positions, device=batch.input_ids_T.device))
        self.rotary = Rotary(layout, cos[:, 0], sin[:, 0], heads)
        self.attention = Attention(layout, heads, weights.fc)
        t, r, j, (n, _, d) = batch.num_tokens, layout.num_rows, layout.steps, heads
        self.q = self._new(j, r, n, d)
        self.mixed = self._new(j, r, n, d)
        self.lse = torch.empty(j, n, r, dtype=torch.float32, device=self.q.device)
        self.hidden = self._new(j, r, shape.hidden_size)
        self.normed = self._new(t + (j - 1) * r, shape.hidden_size)
        self.steps: list[StepState] = []
        self.dqkv_peaks: list[Tensor] = []

    def _new(self, *size: int) -> Tensor:
        return torch.empty(*size, dtype=self.dtype, device=self.w.fc.device)

    def forward(self) -> Tensor:
        """Normed outputs of all steps, [J, R, H]."""
        w, batch = self.w, self.batch
        self.embed_normed, self.embed_rstd = pointwise.rms(
            self.embedding_VH, w.embed_norm, self.eps, self.dtype, batch.input_ids_T
        )
        embed_TC = self.products.forward(self.embed_normed, w.qkv_embed_CH, peak=self.embed_peak)
        self._fuse()
        _, self.first_rstd = pointwise.rms(self.first_feature, w.hidden_norm, self.eps, self.dtype, out=self._normed(1))
        residual = self._normed(1) if self.shape.norm_before_residual else self.first_feature
        for j in range(1, self.layout.steps + 1):
            projected = self.products.forward(self._normed(j), w.qkv_hidden_CH, peak=self.feature_peak)
            self.rotary.forward(j, projected, embed_TC, self.q[j - 1], *self.attention.keys_of(j))
            residual = self._after_projection(j, residual)
        return self.hidden

    def _rows_of(self, j: int) -> slice:
        """Step j's rows in what is kept for all steps: T of step 1, then R of each."""
        t, r = self.batch.num_tokens, self.layout.num_rows
        return slice(0, t) if j == 1 else slice(t + (j - 2) * r, t + (j - 1) * r)

    def _normed(self, j: int) -> Tensor:
        return self.normed[self._rows_of(j)]

    def _fuse(self) -> None:
        """Step 1's feature, fc over the auxiliary states, and what its backward needs."""
        aux_XH = self.batch.aux_TAH.flatten(1)
        if self.shape.fc_norm:
            parts = [self.batch.aux_TAH[:, i].contiguous() for i in range(self.shape.num_aux)]
            done = [pointwise.rms(x, n, self.eps, self.dtype) for x, n in zip(parts, self.w.aux_norms, strict=True)]
            self.aux = torch.cat([y for y, _ in done], dim=1)
            self.aux_inputs, self.aux_rstd = parts, [rstd for _, rstd in done]
        elif self.shape.norm_before_fc:
            self.aux, rstd = pointwise.rms(aux_XH, self.w.aux_norms[0], self.eps, self.dtype)
            self.aux_inputs, self.aux_rstd = [aux_XH], [rstd]
        else:
            self.aux, self.aux_inputs, self.aux_rstd = aux_XH.to(self.dtype), [], []
        self.first_feature = _PLAIN.forward(self.aux, self.w.fc)

    def _after_projection(self, j: int, residual: Tensor) -> Tensor:
        """Attention, MLP and norms of step j; the next step's residual branch."""
        w, shape, products = self.w, self.shape, self.products
        self.attention.forward(j, self.q[j - 1], self.mixed[j - 1], self.lse[j - 1])
        mixed_RC = self.mixed[j - 1].flatten(1)
        mixed_peak, act_peak = products.measured(mixed_RC), products.raised(mixed_RC)
        mixed = products.forward(mixed_RC, w.o, peak=mixed_peak)
        rows = self.layout.rows_R if j == 1 else None
        middle, middle_normed, middle_rstd = pointwise.add_rms(residual, mixed, w.post_norm, self.eps, rows)
        gate_up = products.forward(middle_normed, w.gate_up, peak=self.middle_peak)
        down = products.forward(pointwise.swiglu(gate_up, act_peak), w.down, peak=act_peak)
        following = self._normed(j + 1) if j < self.layout.steps else None
        output, rstd, feature_rstd = pointwise.add_rms_twice(
            middle, down, w.norm, w.hidden_norm, self.eps, shape.norm_output, self.hidden[j - 1], following
        )
        self.steps.append(
            StepState(middle, middle_normed, middle_rstd, gate_up, output, rstd, feature_rstd, mixed_peak, act_peak)
        )
        if shape.norm_before_residual and following is not None:
            return following
        return self.hidden[j - 1] if shape.norm_output else output

    def backward(self, grad_hidden_JRH: Tensor, scale: Tensor) -> Gradients:
        """Weight gradients (all but lm_head's).

        Args:
            grad_hidden_JRH: of the normed outputs.
            scale: scalar that they are multiplied by.
        """
        self.grads = Gradients(self.products)
        lay = self.layout
        self.dmixed = torch.empty_like(self.mixed)
        self.delta = torch.empty_like(self.lse)
        n, g, d = self.shape.num_heads, self.shape.num_kv_heads, self.shape.head_dim
        dqkv = self._new(len(self.normed), (n + 2 * g) * d)
        following: tuple[Tensor, Tensor, Tensor] | None = None
        for j in range(lay.steps, 1, -1):
            mine = dqkv[self._rows_of(j)]
            dq, dres = self._into_attention(j, grad_hidden_JRH[j - 1], scale, following)
            own = self.attention.keys_of(j)
            self.rotary.own_grad(j, self.q, self.dmixed, own, self.lse, self.delta, dq, mine)
            following = (self._into_feature(mine), dres, self.steps[j - 2].feature_rstd)
        dq, dres = self._into_attention(1, grad_hidden_JRH[0], scale, following)
        dk, dv = self.attention.grad_kv(self.q, self.dmixed, self.lse, self.delta)
        self.rotary.first_grad(dq, dk, dv, dqkv[self._rows_of(1)])
        self._first_layer(dqkv, dres)
        return self.grads

    def _into_attention(
        self, j: int, grad_RH: Tensor, scale: Tensor, following: tuple[Tensor, Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """From a step's normed output down to its queries; gradients of the queries and of the residual branch."""
        w, s, grads, shape, products = self.w, self.steps[j - 1], self.grads, self.shape, self.products
        dout, dnorm, dhidden_norm = pointwise.output_grad(
            grad_RH, scale, s.output, s.output_rstd, w.norm, following, w.hidden_norm,
            shape.norm_output, shape.norm_before_residual,
        )  # fmt: skip
        grads.add("norm", dnorm)
        if dhidden_norm is not None:
            grads.add("hidden_norm", dhidden_norm)
        into_down = products.gradient(dout)
        peak = products.raised(dout)
        dgate_up, act = pointwise.swiglu_grad(products.into_input(into_down, w.down), s.gate_up, peak)
        grads.add_product("down", into_down, act, s.act_peak)
        into_gate_up = products.gradient(dgate_up, peak=peak)
        grads.add_product("gate_up", into_gate_up, s.middle_normed, self.middle_peak)
        dres, dpost = pointwise.rms_grad(
            products.into_input(into_gate_up, w.gate_up), s.middle, s.middle_rstd, w.post_norm, residual=dout
        )
        assert dres is not None
        grads.add("post_norm", dpost)
        into_o = products.gradient(dres)
        grads.add_product("o", into_o, self.mixed[j - 1].flatten(1), s.mixed_peak)
        products.into_input(into_o, w.o, out=self.dmixed[j - 1].flatten(1))
        dq = self.attention.grad_q(
            j, self.q[j - 1], self.mixed[j - 1], self.dmixed[j - 1], self.lse[j - 1], self.delta[j - 1]
        )
        return dq, dres

    def _into_feature(self, dqkv_RC: Tensor) -> Tensor:
        """Gradient of a step's normed feature."""
        peak = self.products.measured(dqkv_RC)
        self.dqkv_peaks += [] if peak is None else [peak]
        into_qkv = self.products.gradient(dqkv_RC, into_weight=False, peak=peak)
        return self.products.into_input(into_qkv, self.w.qkv_hidden_CH)

    def _first_layer(self, dqkv: Tensor, dres: Tensor) -> None:
        """Below step 1's projections: q/k/v of all steps at once, the norms, fc."""
        w, grads, products = self.w, self.grads, self.products
        dnormed = self._into_feature(dqkv[self._rows_of(1)])
        peak = torch.stack(self.dqkv_peaks).max() if self.dqkv_peaks else None
        into_qkv = products.gradient(dqkv, into_input=False, peak=peak)
        grads.add_product("qkv_hidden_CH", into_qkv, self.normed, self.feature_peak)
        dembed = self.rotary.embed_grad(dqkv)
        into_embed = products.gradient(dembed)
        grads.add_product("qkv_embed_CH", into_embed, self.embed_normed, self.embed_peak)
        ids_T, own = self.batch.input_ids_T, self.shape.own_embedding
        drows, dembed_norm = pointwise.rms_grad(
            products.into_input(into_embed, w.qkv_embed_CH), self.embedding_VH, self.embed_rstd, w.embed_norm,
            index=ids_T, need_input=own,
        )  # fmt: skip
        grads.add("embed_norm", dembed_norm)
        if drows is not None:
            grads.embedding = embedding_grad(drows.float(), ids_T, len(self.embedding_VH))
        dfeature, dhidden_norm = pointwise.rms_grad(
            dnormed, self.first_feature, self.first_rstd, w.hidden_norm,
            residual=dres, residual_index=self.layout.row_of_T, residual_normed=self.shape.norm_before_residual,
        )  # fmt: skip
        assert dfeature is not None
        grads.add("hidden_norm", dhidden_norm)
        grads.of["fc"] = _PLAIN.into_weight(None, dfeature, self.aux)
        if self.aux_rstd:
            daux = _PLAIN.into_input(dfeature, w.fc).chunk(len(self.aux_rstd), dim=1)
            self.grads.aux_norms = [
                pointwise.rms_grad(d.contiguous(), x, rstd, n, need_input=False)[1]
                for d, x, rstd, n in zip(daux, self.aux_inputs, self.aux_rstd, w.aux_norms, strict=True)
            ]
