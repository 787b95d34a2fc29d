"""lm_head and loss over all (step, row) pairs at once; the gradient is made where the logits are.

The pairs are ordered by label row and cut into chunks, so the target's logits of a row are computed once for all the
steps that need them, and no more than a chunk of logits is ever held.

Shape suffixes: M label rows, P pairs of a chunk, H hidden, V draft vocabulary, J steps, R rows.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftsmith.core.batch import Batch
from draftsmith.core.fused.launch import block
from draftsmith.core.fused.layout import Layout
from draftsmith.core.fused.weights import Weights
from draftsmith.core.losses import LEAST_LOGIT
from draftsmith.core.objective import Objective, StepSums, chain_weights

# Logits that a program works on at once, and its warps.
BLOCK, WARPS = 2048, 4
# Which loss a kernel computes; "soft_ce" and "soft_ce_full" differ only in the probabilities they are given.
_MODES = {"soft_ce": 0, "soft_ce_full": 0, "kl": 1, "lk_alpha": 2, "lk_lambda": 3}
_LEAST = tl.constexpr(LEAST_LOGIT)


@triton.jit
def _logits(row, c, size, inverse_temperature):
    """Kept above the least logit, so that -inf is "never" and no loss is infinite; -inf past the row's end."""
    x = tl.load(row + c, mask=c < size, other=0.0).to(tl.float32) * inverse_temperature
    return tl.where(c < size, tl.maximum(x, _LEAST), float("-inf"))


@triton.jit
def _row_lse(row, size, inverse_temperature, BLOCK: tl.constexpr):
    """Largest logit and log-sum-exp of a row."""
    best, total = float("-inf"), 0.0
    for c0 in range(0, size, BLOCK):
        x = _logits(row, c0 + tl.arange(0, BLOCK), size, inverse_temperature)
        higher = tl.maximum(best, tl.max(x, 0))
        total = total * tl.exp(best - higher) + tl.sum(tl.exp(x - higher), 0)
        best = higher
    return best, best + tl.log(total)


@triton.jit
def _softmax(X, LSE, size, inverse_temperature, GIVEN: tl.constexpr, BLOCK: tl.constexpr):
    """A row of logits a program, overwritten by its probabilities; `LSE` is of more tokens than the row has."""
    row = X + tl.program_id(0).to(tl.int64) * size
    if GIVEN:
        lse = tl.load(LSE + tl.program_id(0))
    else:
        _, lse = _row_lse(row, size, inverse_temperature, BLOCK)
    for c0 in range(0, size, BLOCK):
        c = c0 + tl.arange(0, BLOCK)
        p = tl.exp(_logits(row, c, size, inverse_temperature) - lse)
        tl.store(row + c, p.to(X.dtype.element_ty), mask=c < size)


@triton.jit
def _soft_sums(z_row, p_row, size, inverse_temperature, ENTROPY: tl.constexpr, BLOCK: tl.constexpr):
    """Largest logit, log-sum-exp, sum p, sum p z, sum p log p."""
    best, total, mass, dot, entropy = float("-inf"), 0.0, 0.0, 0.0, 0.0
    for c0 in range(0, size, BLOCK):
        c = c0 + tl.arange(0, BLOCK)
        z = _logits(z_row, c, size, inverse_temperature)
        p = tl.load(p_row + c, mask=c < size, other=0.0).to(tl.float32)
        higher = tl.maximum(best, tl.max(z, 0))
        total = total * tl.exp(best - higher) + tl.sum(tl.exp(z - higher), 0)
        best = higher
        mass += tl.sum(p, 0)
        dot += tl.sum(tl.where(p > 0.0, p * z, 0.0), 0)
        if ENTROPY:
            entropy += tl.sum(tl.where(p > 0.0, p * tl.log(p), 0.0), 0)
    return best, best + tl.log(total), mass, dot, entropy


@triton.jit
def _overlap(z_row, p_row, lse, size, inverse_temperature, BLOCK: tl.constexpr):
    """Alpha = sum min(p, q), and the part of it that is q: the sum over tokens where q < p."""
    alpha, below = 0.0, 0.0
    for c0 in range(0, size, BLOCK):
        c = c0 + tl.arange(0, BLOCK)
        q = tl.exp(_logits(z_row, c, size, inverse_temperature) - lse)
        p = tl.load(p_row + c, mask=c < size, other=0.0).to(tl.float32)
        alpha += tl.sum(tl.minimum(p, q), 0)
        below += tl.sum(tl.where(q < p, q, 0.0), 0)
    return tl.maximum(alpha, 1.0e-30), below


@triton.jit
def _match(Z, TRUTH, PAIRS, HITS, size, inverse_temperature, BLOCK: tl.constexpr):
    """One pair a program: the match that `_judge` finds, for weights that depend on it before the gradient is made."""
    i = tl.program_id(0)
    z_row, truth = Z + i.to(tl.int64) * size, tl.load(TRUTH + i)
    true_logit = tl.load(z_row + tl.maximum(truth, 0)).to(tl.float32) * inverse_temperature
    better = 0
    for c0 in range(0, size, BLOCK):
        c = c0 + tl.arange(0, BLOCK)
        z = _logits(z_row, c, size, inverse_temperature)
        better += tl.sum(((z > true_logit) | ((z == true_logit) & (c < truth))).to(tl.int32), 0)
    hit = (truth >= 0) & (true_logit == true_logit) & (better == 0)  # no NaN is a hit
    tl.store(HITS + tl.load(PAIRS + i), hit.to(tl.float32))


@triton.jit
def _judge(
    Z, P, GRAD, SCALE, LABELS, TRUTH, PAIRS, WEIGHTS, LOSS, HITS, first_label, count, size, grad_width,
    inverse_temperature, eta, MODE: tl.constexpr, SCALED: tl.constexpr, OF_PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One pair a program: loss, match, and the logits overwritten by the loss's weighted gradient (core/losses.py).

    No element of that gradient is more than its weight / temperature: every loss's is a difference of probabilities.
    The weights are of steps, or `OF_PAIRS`.
    """
    i = tl.program_id(0)
    z_row = Z + i.to(tl.int64) * size
    p_row = P + (tl.load(LABELS + i) - first_label).to(tl.int64) * size
    best, lse, mass, dot, entropy = _soft_sums(z_row, p_row, size, inverse_temperature, MODE % 2 == 1, BLOCK)
    alpha, below = 1.0, 0.0
    if MODE >= 2:
        alpha, below = _overlap(z_row, p_row, lse, size, inverse_temperature, BLOCK)
    # Gradient in z: soft (mass q - p) + hard q (below - [q < p]).
    soft, hard, loss = 1.0, 0.0, lse * mass - dot
    if MODE == 1 or MODE == 3:
        soft = 1.0 / mass
        loss = lse - dot / mass + entropy / mass - tl.log(mass)
    if MODE == 2:
        soft, hard, loss = 0.0, 1.0 / alpha, -tl.log(alpha)
    if MODE == 3:
        share = tl.exp(-eta * alpha)
        loss = share * loss + (1.0 - share) * (1.0 - alpha)
        soft, hard = share * soft, 1.0 - share
    pair = tl.load(PAIRS + i)
    truth = tl.load(TRUTH + i)
    if OF_PAIRS:
        weight = tl.load(WEIGHTS + pair) * inverse_temperature
    else:
        weight = tl.load(WEIGHTS + pair // count) * inverse_temperature
    tl.store(LOSS + pair, loss)
    true_logit = tl.load(z_row + tl.maximum(truth, 0)).to(tl.float32) * inverse_temperature
    tl.debug_barrier()  # every thread has read the truth's logit before any overwrites it
    earlier = 0
    for c0 in range(0, size, BLOCK):
        c = c0 + tl.arange(0, BLOCK)
        z = _logits(z_row, c, size, inverse_temperature)
        p = tl.load(p_row + c, mask=c < size, other=0.0).to(tl.float32)
        earlier += tl.sum(((z == best) & (c < truth)).to(tl.int32), 0)  # of equals, argmax takes the first
        q = tl.exp(z - lse)
        grad = soft * (mass * q - p)
        if MODE >= 2:
            grad += hard * q * (below - tl.where(q < p, 1.0, 0.0))
        grad = tl.where(z > _LEAST, grad * weight, 0.0)
        if SCALED:  # narrower than the logits: other threads' may lie where this one writes
            grad /= tl.load(SCALE)
            tl.debug_barrier()
        tl.store(GRAD + i.to(tl.int64) * grad_width + c, grad.to(GRAD.dtype.element_ty), mask=c < size)
    tl.store(HITS + pair, ((truth >= 0) & (true_logit == best) & (earlier == 0)).to(tl.float32))


@dataclass(frozen=True)
class LossPass:
    """What the loss leaves behind.

    Attributes:
        loss_JR, hits_JR: float32; zero where a step has no label.
        sums: of them, per step.
        grad_hidden: [J, R, H] of the weighted loss; zero where a step has no label.
        grad_head: float32 [V, H], None where the head is frozen.
    """

    loss_JR: Tensor
    hits_JR: Tensor
    sums: StepSums
    grad_hidden: Tensor | None
    grad_head: Tensor | None


@torch.no_grad()
def loss_pass(
    objective: Objective, hidden_JRH: Tensor, w: Weights, batch: Batch, layout: Layout, weights_J: Tensor | None
) -> LossPass:
    """Losses and matches of every pair, and gradients of sum_j weights[j] * loss[j], rejected steps by their weight.

    A pair's earlier steps have earlier labels, so they are in its chunk or in one before: once the matches of a chunk
    are known, so are the weights of its pairs.

    Args:
        objective: the loss and the target's head.
        hidden_JRH: normed outputs of all steps.
        w: the draft's weights; its lm_head and products are used.
        batch: on the device.
        layout: of the batch.
        weights_J: float32; None: no gradients are wanted.
    """
    (steps, count, size), vocab, options = hidden_JRH.shape, objective.draft.shape.draft_vocab_size, objective.loss
    flat = hidden_JRH.view(steps * count, size)
    grad = None if weights_J is None else torch.zeros_like(flat)
    loss, hits = (torch.zeros(steps * count, dtype=torch.float32, device=flat.device) for _ in range(2))
    train_head = grad is not None and objective.draft.lm_head.weight.requires_grad
    grad_head: Tensor | None = None
    truth_T = objective.get_buffer("draft_ids")[batch.input_ids_T]
    blocks = min(BLOCK, block(vocab))
    weights = loss.new_zeros(steps) if weights_J is None else weights_J
    peak, hidden_peak = weights.abs().max() / options.temperature, w.products.normed(w.norm)
    by_chain = grad is not None and options.rejected_weight != 1.0
    share_JR: Tensor | None = None  # of a step's weight, that a pair has
    for chunk in layout.chunks:
        own = slice(chunk.p0, chunk.p1)
        pairs = layout.pairs_P[own]
        probs_MV = _target_probs(objective, batch.last_MH[chunk.m0 : chunk.m1], blocks)
        hidden_PH = flat.index_select(0, pairs)
        logits_PV = w.products.forward(hidden_PH, w.head_VH, peak=hidden_peak)
        into_head, into, scale = w.products.overwriting(logits_PV, peak)
        truth = truth_T[layout.truth_P[own]]
        if by_chain:
            _match[(len(pairs),)](
                logits_PV, truth, pairs, hits, vocab, 1.0 / options.temperature, blocks, num_warps=WARPS
            )
            share_JR = chain_weights(hits.view(steps, count), options.rejected_weight)
        given = weights if share_JR is None else weights[:, None] * share_JR
        _judge[(len(pairs),)](
            logits_PV, probs_MV, into, peak if scale is None else scale, layout.labels_P[own], truth, pairs, given,
            loss, hits, chunk.m0, count, vocab, into.stride(0), 1.0 / options.temperature, options.lk_eta,
            _MODES[options.name], scale is not None, by_chain, blocks, num_warps=WARPS,
        )  # fmt: skip
        if grad is not None:
            into_head = w.products.overwritten(into_head, train_head)
            grad.index_copy_(0, pairs, w.products.into_input(into_head, w.head_VH))
            if train_head:
                grad_head = w.products.into_weight(grad_head, into_head, hidden_PH, hidden_peak)
    loss_JR, hits_JR = loss.view(steps, count), hits.view(steps, count)
    rows_J = torch.bincount(layout.pairs_P // count, minlength=steps).float()
    weighted_J = None if share_JR is None else (share_JR * loss_JR).sum(1)
    sums = StepSums(loss_JR.sum(1), rows_J, hits_JR.sum(1), weighted_J)
    return LossPass(loss_JR, hits_JR, sums, None if grad is None else grad.view_as(hidden_JRH), grad_head)


def _target_probs(objective: Objective, last_MH: Tensor, blocks: int) -> Tensor:
    """The target's probabilities [M, V] of the draft's tokens.

    Kept in the logits' dtype: a probability rounded to bfloat16 is closer than one of a rounded logit.
    """
    options, head = objective.loss, objective.target_head
    full_lse = head.full_lse(last_MH, options.temperature) if options.needs_full_vocabulary else None
    probs_MV: Tensor = head(last_MH)
    lse = probs_MV if full_lse is None else full_lse
    _softmax[(len(probs_MV),)](
        probs_MV, lse, probs_MV.shape[1], 1.0 / options.temperature, full_lse is not None, blocks, num_warps=WARPS
    )
    return probs_MV
