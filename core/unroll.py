"""Training-time test: the draft unrolled J steps at every row, exactly as the server will run it.

THE ALIGNMENT, drawn for a reply x4 x5 x6 after the prompt x0 .. x3 (r = 1 on the reply):

    row t                 0     1     2     3     4     5     6
    token x[t]            x0    x1    x2    x3   [x4]  [x5]  [x6]
    target has seen       ..t   auxiliary states a[t], last state l[t], P[t] = distribution of x[t+1]

    step 1 at row t:  token embed(x[t+1])   feature fc(a[t])            position t      label P[t+1]: x[t+2]
    step 2 at row t:  token embed(x[t+2])   feature output of step 1    position t+1    label P[t+2]: x[t+3]
    step j at row t:  token embed(x[t+j])   feature output of step j-1  position t+j-1  label P[t+j]: x[t+j+1]

    keys of step j at row t: the step-1 keys of rows 0..t, and its own keys of steps 2..j.
        (The server's draft cache holds just these: verified tokens went through step 1 with the target's features,
        and the tokens drafted since are this row's own.)
        With a sliding window of W, those of the last W positions: the query is at t+j-1, the step-1 key of row s at s,
        the own key of step i at t+i-1; a key is seen where query - key < W. So the window moves on with the step, and
        takes in the own keys first: the step-1 keys of rows t+j-W .. t, and the own ones of steps j-W+1 .. j.

    supervised at step j: x[t+1] .. x[t+j+1] are all reply tokens of one reply.
        step 1: rows 3, 4      step 2: row 3      step 3: none
        Row 3, the last of the prompt, is where the server's first draft happens: it has just sampled x4.

Rows supervised at step j are among those of step j - 1, and deeper steps look at no other row's deeper steps. So
step 1 needs keys for all rows but outputs only for supervised ones, and step j > 1 is computed for its own rows only.
This is the eager reference, fast enough for a CPU; every faster path is compared with it.

Shape suffixes: see draft.py; R rows of the step at hand, K step-1 keys of one document.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.core.batch import Batch
from draftsmith.core.draft import DraftModel


@dataclass(frozen=True)
class Step:
    """One step of the unroll.

    Attributes:
        j: step number, from 1.
        rows_R: int64, the rows supervised at this step, ascending.
        hidden_RH: the draft's normed output there; `draft.lm_head(hidden_RH)` are its logits for x[t+j+1].
    """

    j: int
    rows_R: Tensor
    hidden_RH: Tensor


def reply_runs(batch: Batch) -> Tensor:
    """int64 [T]: how many reply tokens of one reply follow row t without a gap, in its document: x[t+1], x[t+2], ...

    Row t is supervised at step j iff its run is j + 1 or more.
    """
    size = batch.num_tokens
    index = torch.arange(size, device=batch.input_ids_T.device)
    # The first row at or after t that is no reply token or opens another document ends the run of row t - 1.
    breaks = (~batch.loss_mask_T) | (batch.positions_T == 0)
    stop = torch.where(breaks, index, size).flip(0).cummin(0).values.flip(0) if size else index
    following = torch.cat([stop[1:], index.new_full((min(size, 1),), size)])
    return (following - index - 1).clamp_min(0)


def unroll(draft: DraftModel, batch: Batch, steps: int) -> Iterator[Step]:
    """Run the draft for `steps` steps; a step without rows is run all the same, so that every rank does alike.

    Args:
        draft: the draft.
        batch: packed documents on the draft's device.
        steps: J.
    """
    layer, attention = draft.midlayer, draft.midlayer.self_attn
    runs_T = reply_runs(batch)
    rows_R = (runs_T >= 2).nonzero().squeeze(1)

    embed_TH = layer.input_layernorm(draft.embed(batch.input_ids_T))
    embed_q_TO, embed_k_TO, embed_v_TO = attention.embedding_half(embed_TH)
    # Step 1: keys and values of every row, the rest only where it is needed. The last row of a document gets a stranger
    # for its next token; no supervised row sees its key.
    normed_TH, residual_TH = layer.before_attention(draft.fuse(batch.aux_TAH))
    k_TGD, v_TGD = attention.key_value(
        embed_k_TO.roll(-1, 0), embed_v_TO.roll(-1, 0), normed_TH, draft.rope(batch.positions_T)
    )
    q_RND = attention.query(_rows(embed_q_TO, rows_R + 1), normed_TH[rows_R], draft.rope(batch.positions_T[rows_R]))
    residual_RH = residual_TH[rows_R]
    feature_RH = residual_RH  # step 1 has no earlier output; from step 2 on, the step before's
    own: list[tuple[Tensor, Tensor]] = []  # keys and values [R, G, D] of steps 2..j

    for j in range(1, steps + 1):
        if j > 1:
            keep = runs_T[rows_R] >= j + 1
            rows_R, feature_RH = rows_R[keep], feature_RH[keep]
            own = [(k[keep], v[keep]) for k, v in own]
            rope = draft.rope(batch.positions_T[rows_R] + j - 1)
            normed_RH, residual_RH = layer.before_attention(feature_RH)
            q_RND = attention.query(_rows(embed_q_TO, rows_R + j), normed_RH, rope)
            own.append(
                attention.key_value(_rows(embed_k_TO, rows_R + j), _rows(embed_v_TO, rows_R + j), normed_RH, rope)
            )
        mixed_RND = attend(q_RND, k_TGD, v_TGD, own, rows_R, batch.offsets, draft.shape.sliding_window)
        output_RH = layer.after_attention(mixed_RND, residual_RH)
        hidden_RH = draft.norm(output_RH)
        yield Step(j, rows_R, hidden_RH)
        feature_RH = hidden_RH if draft.shape.norm_output else output_RH


def _rows(x_TO: Tensor, rows_R: Tensor) -> Tensor:
    """`x_TO[rows_R]`, whose backward pass on a CPU is several times faster."""
    return x_TO.index_select(0, rows_R)


def attend(
    q_RND: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    own: list[tuple[Tensor, Tensor]],
    rows_R: Tensor,
    offsets: tuple[int, ...],
    window: int | None = None,
) -> Tensor:
    """Each row's attention over the step-1 keys of its document up to itself, and over its own later keys.

    Args:
        q_RND: queries of the rows.
        k_TGD: step-1 keys of all rows.
        v_TGD: step-1 values of all rows.
        own: keys and values [R, G, D] of steps 2..j.
        rows_R: the queries' rows, ascending.
        offsets: document boundaries.
        window: positions that a query looks back over, its own included; None: all.

    Returns:
        [R, N, D].
    """
    ahead = len(own)  # the query of step j is j - 1 positions after its row
    own = own if window is None else own[-window:]
    _, heads, width = q_RND.shape
    groups = k_TGD.shape[1]
    q_RGSD = q_RND.view(-1, groups, heads // groups, width) * width**-0.5
    bounds = torch.searchsorted(rows_R, torch.tensor(offsets, device=rows_R.device)).tolist()
    parts = []
    for d in range(len(offsets) - 1):
        here, keys = slice(bounds[d], bounds[d + 1]), slice(offsets[d], offsets[d + 1])
        if here.start == here.stop:
            continue
        q = q_RGSD[here]
        scores = torch.einsum("rgsd,kgd->rgsk", q, k_TGD[keys]).float()
        back = rows_R[here, None] - torch.arange(offsets[d], offsets[d + 1], device=rows_R.device)
        unseen = back < 0 if window is None else (back < 0) | (back + ahead >= window)
        scores = scores.masked_fill(unseen[:, None, None], float("-inf"))
        own_scores = [(q * k[here].unsqueeze(2)).sum(-1, keepdim=True).float() for k, _ in own]
        weights = torch.cat([scores, *own_scores], dim=-1).softmax(-1).to(q.dtype)
        size = scores.shape[-1]
        mixed = torch.einsum("rgsk,kgd->rgsd", weights[..., :size], v_TGD[keys])
        for i, (_, v) in enumerate(own):
            mixed = mixed + weights[..., size + i, None] * v[here].unsqueeze(2)
        parts.append(mixed.flatten(1, 2))
    if not parts:
        # No rows, but still part of the graph: a rank without supervised rows must reach every parameter's gradient.
        return q_RND + 0.0 * (k_TGD.sum() + v_TGD.sum())
    return torch.cat(parts)
