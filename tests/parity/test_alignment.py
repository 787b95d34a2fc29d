"""Design section 2 on a toy written out by hand, and the unroll against a float64 reference written from the section."""

import math

import pytest
import torch

from draftsmith.core.batch import Batch
from draftsmith.core.draft import DraftModel
from draftsmith.core.draft_shape import DraftShape
from draftsmith.core.objective import Objective, supervised_rows, training_loss
from draftsmith.core.target_weights import TargetHead
from draftsmith.core.unroll import attend, reply_runs, unroll

H, V, VD, A = 32, 40, 16, 3
STEPS = 4


def make_shape(**flags):
    base = dict(
        hidden_size=H, num_aux=A, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=48, vocab_size=V,
        draft_vocab_size=VD, rms_norm_eps=1e-5, max_position_embeddings=64, rope={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    return DraftShape(**{**base, **flags})


def make_objective(seed=0, **flags):
    torch.manual_seed(seed)
    shape = make_shape(**flags)
    draft = DraftModel(shape, torch.randn(V, H))
    with torch.no_grad():
        for p in draft.parameters():
            p.copy_(torch.randn_like(p) * (0.3 if p.dim() > 1 else 0.1) + (p.dim() == 1))
    ids = torch.randperm(V)[: shape.draft_vocab_size].sort().values
    head = TargetHead(torch.randn(len(ids), H), torch.rand(H) + 0.5, "rms", 1e-5)
    return Objective(draft, head, ids), ids


def make_batch(masks, seed=1, num_aux=A):
    """One document per mask, random tokens and states; the store's rule for which last states are kept."""
    g = torch.Generator().manual_seed(seed)
    offsets = [0]
    for mask in masks:
        offsets.append(offsets[-1] + len(mask))
    size = offsets[-1]
    last_rows = [o + t for m, o in zip(masks, offsets[:-1], strict=True) for t in range(len(m) - 1) if m[t + 1]]
    return Batch(
        sample_ids=tuple(f"s{i}" for i in range(len(masks))),
        offsets=tuple(offsets),
        input_ids_T=torch.randint(V, (size,), generator=g),
        loss_mask_T=torch.tensor([bool(x) for m in masks for x in m], dtype=torch.bool),
        positions_T=torch.tensor([t for m in masks for t in range(len(m))], dtype=torch.int64),
        aux_TAH=torch.randn(size, num_aux, H, generator=g),
        last_MH=torch.randn(len(last_rows), H, generator=g),
        last_rows_M=torch.tensor(last_rows, dtype=torch.int64),
    )


# ---- the toy: prompt x0 x1 x2, reply x3 x4 x5 -----------------------------------------------------------------------


def test_toy_rows_supervised_at_each_step():
    batch = make_batch([[0, 0, 0, 1, 1, 1]])
    # Row 2 is where the server drafts first: it has sampled x3 and drafts x4, then x5.
    assert reply_runs(batch).tolist() == [0, 0, 3, 2, 1, 0]
    objective, _ = make_objective()
    rows = {step.j: step.rows_R.tolist() for step in unroll(objective.draft, batch, 3)}
    assert rows == {1: [2, 3], 2: [2], 3: []}
    assert supervised_rows(batch, 3).tolist() == [2, 1, 0]


def test_toy_keys_seen_at_each_step():
    """Values are one-hot by key, queries and keys are zero: the attention output is the mean over the keys seen."""
    rows = torch.tensor([2, 3])
    zeros, eye = torch.zeros(6, 1, 8), torch.eye(8)
    values = eye[:6, None]
    seen = attend(torch.zeros(2, 1, 8), zeros, values, [], rows, (0, 6))
    assert (seen[0, 0] > 0).nonzero().flatten().tolist() == [0, 1, 2]
    assert (seen[1, 0] > 0).nonzero().flatten().tolist() == [0, 1, 2, 3]
    own = [(torch.zeros(1, 1, 8), eye[6].expand(1, 1, 8)), (torch.zeros(1, 1, 8), eye[7].expand(1, 1, 8))]
    deeper = attend(torch.zeros(1, 1, 8), zeros, values, own, torch.tensor([2]), (0, 6))
    assert (deeper[0, 0] > 0).nonzero().flatten().tolist() == [0, 1, 2, 6, 7]
    assert torch.allclose(deeper[0, 0][[0, 1, 2, 6, 7]], torch.full((5,), 0.2))


@pytest.mark.parametrize(
    ("masks", "runs"),
    [
        ([[0, 1, 1, 0, 1, 1, 1]], [2, 1, 0, 3, 2, 1, 0]),  # two replies of one document do not join
        ([[0, 1, 1], [1, 1, 0]], [2, 1, 0, 1, 0, 0]),  # nor do a reply's end and the next document's start
        ([[0, 0, 0]], [0, 0, 0]),
        ([[1]], [0]),
    ],
)
def test_runs_never_cross_a_reply_or_a_document(masks, runs):
    assert reply_runs(make_batch(masks)).tolist() == runs


# ---- float64 reference, written from the section: one row at a time, everything spelled out -------------------------


def reference_loss(objective, ids, batch, decay):
    draft, shape = objective.draft, objective.draft.shape
    p = {k: v.detach().double().requires_grad_(True) for k, v in draft.state_dict().items()}
    embed = draft.embed_VH.double()

    def norm(x, name):
        return x / torch.sqrt((x * x).mean() + shape.rms_norm_eps) * p[name]

    def rotate(x, position):
        d = x.shape[-1]
        angle = position / 1e4 ** (torch.arange(0, d, 2, dtype=torch.float64) / d)
        cos, sin = torch.cos(angle).repeat(2), torch.sin(angle).repeat(2)
        return x * cos + torch.cat([-x[..., d // 2 :], x[..., : d // 2]], -1) * sin

    def layer_input(token, feature):
        normed = norm(feature, "midlayer.hidden_norm.weight")
        x = torch.cat([norm(embed[token], "midlayer.input_layernorm.weight"), normed])
        return x, normed if shape.norm_before_residual else feature

    def project(x, which, heads, position=None):
        y = (p[f"midlayer.self_attn.{which}_proj.weight"] @ x).view(heads, shape.head_dim)
        return y if position is None else rotate(y, position)

    def fuse(aux):
        if shape.fc_norm:
            aux = torch.stack([norm(aux[i], f"fc_norm.{i}.weight") for i in range(shape.num_aux)])
        flat = aux.flatten()
        return p["fc.weight"] @ (norm(flat, "input_norm.weight") if shape.norm_before_fc else flat)

    last = {int(r): m.double() for r, m in zip(batch.last_rows_M, batch.last_MH, strict=True)}
    head = objective.target_head
    sums = [torch.zeros((), dtype=torch.float64) for _ in range(STEPS)]
    counts, hits = [0] * STEPS, [0] * STEPS
    for begin, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        x, r = batch.input_ids_T[begin:end].tolist(), batch.loss_mask_T[begin:end].tolist()
        size = end - begin
        step1 = {}
        for t in range(size - 1):
            inp, residual = layer_input(x[t + 1], fuse(batch.aux_TAH[begin + t].double()))
            step1[t] = (inp, residual, project(inp, "k", shape.num_kv_heads, t), project(inp, "v", shape.num_kv_heads))
        for t in range(size):
            own, feature = [], None
            for j in range(1, STEPS + 1):
                if t + j + 1 >= size or not all(r[t + 1 : t + j + 2]):
                    break
                if j == 1:
                    inp, residual = step1[t][:2]
                else:
                    inp, residual = layer_input(x[t + j], feature)
                    position = t + j - 1
                    own.append((project(inp, "k", shape.num_kv_heads, position), project(inp, "v", shape.num_kv_heads)))
                q = project(inp, "q", shape.num_heads, t + j - 1)
                keys = [step1[s][2] for s in range(t + 1)] + [k for k, _ in own]
                values = [step1[s][3] for s in range(t + 1)] + [v for _, v in own]
                group = shape.num_heads // shape.num_kv_heads
                mixed = []
                for n in range(shape.num_heads):
                    scores = torch.stack([q[n] @ k[n // group] for k in keys]) / math.sqrt(shape.head_dim)
                    mixed.append(sum(w * v[n // group] for w, v in zip(scores.softmax(0), values, strict=True)))
                residual = residual + p["midlayer.self_attn.o_proj.weight"] @ torch.cat(mixed)
                m = norm(residual, "midlayer.post_attention_layernorm.weight")
                gate = p["midlayer.mlp.gate_proj.weight"] @ m
                output = residual + p["midlayer.mlp.down_proj.weight"] @ (
                    gate * torch.sigmoid(gate) * (p["midlayer.mlp.up_proj.weight"] @ m)
                )
                normed = norm(output, "norm.weight")
                feature = normed if shape.norm_output else output
                logits = p["lm_head.weight"] @ normed
                state = last[begin + t + j]
                state = state / torch.sqrt((state * state).mean() + head.eps) * head.norm_H.double()
                target = (head.head_VH.double() @ state).softmax(0)
                sums[j - 1] = sums[j - 1] - (target * logits.log_softmax(0)).sum()
                counts[j - 1] += 1
                hits[j - 1] += int(ids[logits.argmax()] == x[t + j + 1])
    loss = sum(decay**j * s / max(1, c) for j, (s, c) in enumerate(zip(sums, counts, strict=True)))
    return loss, p, counts, hits


FLAGS = [
    {},
    {"norm_before_residual": True},
    {"norm_before_fc": True},
    {"fc_norm": True},
    {"norm_output": True},
    {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
    {"num_aux": 4},
    {"num_kv_heads": 4},
]
MASKS = [[0, 0, 0, 1, 1, 1, 1, 1, 1], [0, 1, 1, 0, 0, 1, 1, 1], [0, 0, 0], [0, 0, 1], [1, 1, 1, 1, 1, 1]]


@pytest.mark.parametrize("flags", FLAGS, ids=lambda f: "+".join(f) or "plain")
def test_loss_and_gradients_equal_the_float64_reference(flags):
    objective, ids = make_objective(**flags)
    batch = make_batch(MASKS, num_aux=flags.get("num_aux", A))
    sums = objective(batch, STEPS)
    loss = training_loss(sums, sums.rows_J, 0.8)
    loss.backward()
    wanted, reference, counts, hits = reference_loss(objective, ids, batch, 0.8)
    wanted.backward()
    assert sums.rows_J.tolist() == counts
    assert sums.hits_J.tolist() == hits
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    for name, parameter in objective.draft.named_parameters():
        ours, theirs = parameter.grad.double(), reference[name].grad
        assert float((ours - theirs).norm() / theirs.norm().clamp_min(1e-9)) < 2e-4, name


def test_packing_changes_nothing():
    objective, _ = make_objective()
    packed = objective(make_batch(MASKS), STEPS)
    whole = make_batch(MASKS)
    parts = []
    for d in range(len(MASKS)):
        begin, end = whole.offsets[d], whole.offsets[d + 1]
        kept = (whole.last_rows_M >= begin) & (whole.last_rows_M < end)
        parts.append(
            Batch(
                (whole.sample_ids[d],), (0, end - begin), whole.input_ids_T[begin:end], whole.loss_mask_T[begin:end],
                whole.positions_T[begin:end], whole.aux_TAH[begin:end], whole.last_MH[kept], whole.last_rows_M[kept] - begin,
            )
        )  # fmt: skip
    alone = [objective(part, STEPS) for part in parts]
    assert torch.allclose(packed.loss_J, sum(a.loss_J for a in alone), rtol=1e-5)
    assert torch.equal(packed.rows_J, sum(a.rows_J for a in alone))
    assert torch.equal(packed.hits_J, sum(a.hits_J for a in alone))


def test_split_of_an_optimizer_step_changes_nothing():
    """T4: the mean is over the rows of the whole step, so two batches sum to one."""
    objective, _ = make_objective()
    one = make_batch(MASKS)
    rows = supervised_rows(one, STEPS)
    whole = training_loss(objective(one, STEPS), rows, 0.8)
    halves = [make_batch(MASKS[:2]), make_batch(MASKS[2:])]
    size = halves[0].num_tokens
    first_kept = len(halves[0].last_rows_M)
    a = Batch(
        halves[0].sample_ids, halves[0].offsets, one.input_ids_T[:size], one.loss_mask_T[:size], one.positions_T[:size],
        one.aux_TAH[:size], one.last_MH[:first_kept], one.last_rows_M[:first_kept],
    )  # fmt: skip
    b = Batch(
        halves[1].sample_ids, halves[1].offsets, one.input_ids_T[size:], one.loss_mask_T[size:], one.positions_T[size:],
        one.aux_TAH[size:], one.last_MH[first_kept:], one.last_rows_M[first_kept:] - size,
    )  # fmt: skip
    parts = training_loss(objective(a, STEPS), rows, 0.8) + training_loss(objective(b, STEPS), rows, 0.8)
    assert parts.item() == pytest.approx(whole.item(), rel=1e-5)


@pytest.mark.parametrize("masks", [[], [[0, 0, 0, 0]], [[0, 1]]], ids=["no documents", "no reply", "one-token reply"])
def test_a_batch_without_supervised_rows_still_reaches_every_parameter(masks):
    """T1: a rank that has nothing to learn from must still take part in the collective."""
    objective, _ = make_objective()
    sums = objective(make_batch(masks), STEPS)
    assert sums.rows_J.tolist() == [0] * STEPS
    training_loss(sums, sums.rows_J, 0.8).backward()
    grads = {n: p.grad for n, p in objective.draft.named_parameters()}
    assert all(g is not None and not g.any() for g in grads.values()), [n for n, g in grads.items() if g is None]


def test_loss_is_finite_for_huge_states_and_tokens_outside_the_draft_vocabulary():
    objective, ids = make_objective()
    batch = make_batch([[0, 0, 1, 1, 1, 1]])
    outside = next(t for t in range(V) if t not in ids.tolist())
    batch.input_ids_T.fill_(outside)
    batch.aux_TAH.mul_(1e4)
    batch.last_MH.mul_(1e4)
    sums = objective(batch, STEPS)
    assert torch.isfinite(sums.loss_J).all()
    assert not sums.hits_J.any()  # a token outside the draft vocabulary is a miss
