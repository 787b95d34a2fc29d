"""Design section 2 on a toy written out by hand, and the unroll against a float64 reference of the section."""

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
        draft_vocab_size=VD, rms_norm_eps=1e-5, max_position_embeddings=64,
        rope={"rope_type": "default", "rope_theta": 1e4},
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


class Reference:
    """The section in float64, one row at a time; `p` are leaves that gradients are read from."""

    def __init__(self, objective, ids):
        self.draft, self.shape, self.head, self.ids = objective.draft, objective.draft.shape, objective.target_head, ids
        self.p = {k: v.detach().double().requires_grad_(True) for k, v in self.draft.state_dict().items()}
        self.embed = self.draft.embed_VH.double()

    def norm(self, x, name):
        return x / torch.sqrt((x * x).mean() + self.shape.rms_norm_eps) * self.p[name]

    def rotate(self, x, position):
        d = x.shape[-1]
        angle = position / 1e4 ** (torch.arange(0, d, 2, dtype=torch.float64) / d)
        cos, sin = torch.cos(angle).repeat(2), torch.sin(angle).repeat(2)
        return x * cos + torch.cat([-x[..., d // 2 :], x[..., : d // 2]], -1) * sin

    def layer_input(self, token, feature):
        normed = self.norm(feature, "midlayer.hidden_norm.weight")
        x = torch.cat([self.norm(self.embed[token], "midlayer.input_layernorm.weight"), normed])
        return x, normed if self.shape.norm_before_residual else feature

    def project(self, x, which, heads, position=None):
        y = (self.p[f"midlayer.self_attn.{which}_proj.weight"] @ x).view(heads, self.shape.head_dim)
        return y if position is None else self.rotate(y, position)

    def fuse(self, aux):
        if self.shape.fc_norm:
            aux = torch.stack([self.norm(aux[i], f"fc_norm.{i}.weight") for i in range(self.shape.num_aux)])
        flat = aux.flatten()
        return self.p["fc.weight"] @ (self.norm(flat, "input_norm.weight") if self.shape.norm_before_fc else flat)

    def key_value(self, x, position):
        heads = self.shape.num_kv_heads
        return self.project(x, "k", heads, position), self.project(x, "v", heads)

    def output(self, x, residual, position, keys_values):
        """The layer's output for one row that sees `keys_values`."""
        group, mixed = self.shape.num_heads // self.shape.num_kv_heads, []
        q = self.project(x, "q", self.shape.num_heads, position)
        for n in range(self.shape.num_heads):
            scores = torch.stack([q[n] @ k[n // group] for k, _ in keys_values]) / math.sqrt(self.shape.head_dim)
            mixed.append(sum(w * v[n // group] for w, (_, v) in zip(scores.softmax(0), keys_values, strict=True)))
        residual = residual + self.p["midlayer.self_attn.o_proj.weight"] @ torch.cat(mixed)
        m = self.norm(residual, "midlayer.post_attention_layernorm.weight")
        gate, up = (self.p[f"midlayer.mlp.{which}_proj.weight"] @ m for which in ("gate", "up"))
        return residual + self.p["midlayer.mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)

    def target(self, state):
        state = state / torch.sqrt((state * state).mean() + self.head.eps) * self.head.norm_H.double()
        return (self.head.head_VH.double() @ state).softmax(0)

    def chain(self, x, r, aux, last, t, step1):
        """(j, loss, hit) of every supervised step at row t of one document."""
        own, feature = [], None
        for j in range(1, STEPS + 1):
            if t + j + 1 >= len(x) or not all(r[t + 1 : t + j + 2]):
                return
            position = t + j - 1
            inp, residual = self.layer_input(x[t + j], self.fuse(aux[t]) if j == 1 else feature)
            if j > 1:
                own.append(self.key_value(inp, position))
            output = self.output(inp, residual, position, step1[: t + 1] + own)
            normed = self.norm(output, "norm.weight")
            feature = normed if self.shape.norm_output else output
            logits = self.p["lm_head.weight"] @ normed
            loss = -(self.target(last[t + j]) * logits.log_softmax(0)).sum()
            yield j, loss, int(self.ids[logits.argmax()] == x[t + j + 1])


def reference_loss(objective, ids, batch, decay):
    reference = Reference(objective, ids)
    last_states = {int(r): m.double() for r, m in zip(batch.last_rows_M, batch.last_MH, strict=True)}
    sums = [torch.zeros((), dtype=torch.float64) for _ in range(STEPS)]
    counts, hits = [0] * STEPS, [0] * STEPS
    for begin, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        x, r = batch.input_ids_T[begin:end].tolist(), batch.loss_mask_T[begin:end].tolist()
        aux, last = batch.aux_TAH[begin:end].double(), {k - begin: v for k, v in last_states.items()}
        inputs = [reference.layer_input(x[t + 1], reference.fuse(aux[t]))[0] for t in range(len(x) - 1)]
        step1 = [reference.key_value(inp, t) for t, inp in enumerate(inputs)]
        for t in range(len(x)):
            for j, loss, hit in reference.chain(x, r, aux, last, t, step1):
                sums[j - 1], counts[j - 1], hits[j - 1] = sums[j - 1] + loss, counts[j - 1] + 1, hits[j - 1] + hit
    loss = sum(decay**j * s / max(1, c) for j, (s, c) in enumerate(zip(sums, counts, strict=True)))
    return loss, reference.p, counts, hits


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
                whole.positions_T[begin:end], whole.aux_TAH[begin:end], whole.last_MH[kept],
                whole.last_rows_M[kept] - begin,
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
