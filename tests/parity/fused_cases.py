"""The fused pass against the float64 reference, its kernels run by Triton's interpreter in float32.

Not collected by name: `test_fused.py` runs this file in a process of its own, for Triton reads TRITON_INTERPRET when it
is imported. Small on purpose: the interpreter takes milliseconds for every program of a kernel.
"""

import json
import shutil

import pytest
import torch

from draftsmith.core.chains import judge_chains
from draftsmith.core.fused import attention, pointwise, whole
from draftsmith.core.fused import loss as loss_kernels
from draftsmith.core.fused.chains import fused_chains
from draftsmith.core.fused.fp8 import Fp8Products, cast_into, scaled
from draftsmith.core.fused.layout import lay_out
from draftsmith.core.fused.objective import fused_loss, fused_matches
from draftsmith.core.losses import LossOptions
from draftsmith.core.objective import step_weights
from draftsmith.core.replay import chain_matches

STEPS, DECAY = 3, 0.8
MASKS = [[0, 0, 0, 1, 1, 1, 1, 1], [0, 1, 1, 0, 0, 1, 1, 1], [0, 0, 0], [0, 0, 1], [1, 1, 1, 1, 1]]
YARN = {
    "rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0, "original_max_position_embeddings": 128,
    "partial_rotary_factor": 0.5,
}  # fmt: skip


@pytest.fixture
def agree(reference):
    """Assert that loss, rows, matches and gradients (of 3 times the loss) are the reference's."""

    def check(objective, batch, steps=STEPS, label_rows=4, whole=()):
        wanted = reference.reference_gradients(objective, batch, steps, DECAY)
        layout = lay_out(batch, steps, label_rows, objective.draft.shape.sliding_window, whole=True)
        assert tuple((w.start, w.length) for w in layout.whole) == whole
        weights = DECAY ** torch.arange(steps) / torch.tensor(wanted.rows).clamp_min(1)
        loss, sums = fused_loss(objective, batch, layout, weights, torch.float32)
        (3.0 * loss).backward()
        assert sums.rows_J.tolist() == wanted.rows
        assert sums.hits_J.tolist() == wanted.hits
        assert float(loss.detach()) == pytest.approx(wanted.loss, rel=1e-5, abs=1e-6)
        total = float(sum(g.norm() ** 2 for g in wanted.gradients.values()) ** 0.5)
        for name, parameter in objective.draft.named_parameters():
            theirs = 3.0 * wanted.gradients[name]
            if not parameter.requires_grad:
                assert parameter.grad is None, name
                continue
            off = float((parameter.grad.double() - theirs).norm())
            assert off <= 2e-4 * float(theirs.norm()) + 1e-6 * total, (name, off, float(theirs.norm()))

    return check


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"norm_before_residual": True, "norm_output": True, "fc_norm": True, "num_aux": 4},
        {"norm_before_fc": True, "num_kv_heads": 4, "draft_vocab_size": 40},
        {"norm_output": True, "rope": YARN, "sliding_window": 3, "num_kv_heads": 1},
        {"norm_before_residual": True, "own_embedding": True, "sliding_window": 1},
    ],
    ids=str,
)
def test_every_option_equals_the_reference(agree, make_objective, make_batch, values):
    agree(make_objective(head_dim=16, **values), make_batch(MASKS, num_aux=values.get("num_aux", 3)))


@pytest.mark.parametrize(
    "loss",
    [LossOptions("soft_ce_full", 1.5), LossOptions("kl"), LossOptions("lk_alpha"), LossOptions("lk_lambda", 0.7)],
    ids=lambda o: o.name,
)
def test_every_loss_equals_the_reference(agree, make_objective, make_batch, loss):
    agree(make_objective(loss, head_dim=16), make_batch(MASKS[:2]), steps=2)


@pytest.fixture
def chains(make_objective, make_batch, guessed):
    """`chains(loss)`: an objective, and a batch on which some of its chains of four steps live and others die."""

    def make(loss):
        objective = make_objective(loss, head_dim=16)
        batch = guessed(objective, make_batch([[0, 0, *[1] * 14], [0, 1, 1, 0, 0, *[1] * 7], [0, 0, 0]]), 4)
        leading, _ = chain_matches(objective, batch, 4)
        assert (leading == 4).any() and set(leading.tolist()) > {0, 1}
        return objective, batch

    return make


@pytest.mark.parametrize("weight", [0.0, 0.3])
@pytest.mark.parametrize("name", ["soft_ce", "lk_alpha"])
def test_rejected_steps_weigh_less_as_in_the_eager_pass(agree, chains, name, weight):
    """Chunks of three label rows, so that a chain of four crosses into another."""
    objective, batch = chains(LossOptions(name, rejected_weight=weight))
    agree(objective, batch, steps=4, label_rows=3)
    ours = {n: p.grad / 3.0 for n, p in objective.draft.named_parameters()}
    objective.zero_grad()
    eager = objective(batch, 4)
    (step_weights(eager.rows_J, DECAY) * eager.minimised_J).sum().backward()
    for n, p in objective.draft.named_parameters():
        assert float((ours[n] - p.grad).norm() / p.grad.norm()) < 2e-4, n
    layout = lay_out(batch, 4, 3)
    chunk_of = {int(p): i for i, c in enumerate(layout.chunks) for p in layout.pairs_P[c.p0 : c.p1]}
    of_step_4 = range(3 * layout.num_rows, 4 * layout.num_rows)
    assert any(chunk_of[p] != chunk_of[p - 3 * layout.num_rows] for p in of_step_4 if p in chunk_of)
    _, sums = fused_loss(objective, batch, layout, torch.ones(4), torch.float32)
    torch.testing.assert_close(sums.loss_J, eager.loss_J.detach())  # what is reported is without weights
    assert sums.hits_J.tolist() == eager.hits_J.tolist() and sums.weighted_J is None
    evaluated = fused_matches(objective, batch, layout, torch.float32)[1]
    assert torch.equal(evaluated.loss_J, sums.loss_J) and evaluated.weighted_J is None


def test_a_rejected_weight_of_one_is_the_pass_without_it(chains, monkeypatch):
    """Bit for bit, nothing more launched; and weights of pairs that are all 1 give the same bits too."""
    launched = []

    class Counting:
        def __getitem__(self, grid):
            launched.append(grid)
            return match[grid]

    match = loss_kernels._match
    monkeypatch.setattr(loss_kernels, "_match", Counting())

    def run(weight):
        objective, batch = chains(LossOptions("lk_lambda", rejected_weight=weight))
        weights = DECAY ** torch.arange(4)
        found, sums = fused_loss(objective, batch, lay_out(batch, 4, 3), weights, torch.float32)
        found.backward()
        return [found.detach(), sums.loss_J, sums.hits_J, *[p.grad for p in objective.draft.parameters()]]

    one = run(1.0)
    assert not launched
    assert torch.equal(one[0], (DECAY ** torch.arange(4) * one[1]).sum())
    assert not torch.equal(run(0.5)[-1], one[-1])
    assert launched
    monkeypatch.setattr(loss_kernels, "chain_weights", lambda hits_JR, weight: torch.ones_like(hits_JR))
    assert all(torch.equal(a, b) for a, b in zip(run(0.5), one, strict=True))


@pytest.mark.parametrize("bad", [0.0, float("nan"), -2e4, float("-inf")], ids=str)
def test_matches_beforehand_are_those_of_the_loss(bad):
    """Of equals the first, whatever the logits are."""
    size, rows = 11, 40
    z = torch.randint(-2, 3, (rows, size), generator=torch.Generator().manual_seed(0)).float()
    z[::3] = bad
    z[1::6, 4] = bad
    truth = torch.arange(rows) % (size + 1) - 1
    pairs, labels = torch.arange(rows).flip(0), torch.zeros(rows, dtype=torch.int32)
    early, late, grad = torch.full((rows,), 7.0), torch.full((rows,), 7.0), z.clone()
    loss_kernels._match[(rows,)](z, truth, pairs, early, size, 0.7, 8)
    loss_kernels._judge[(rows,)](
        grad, torch.full((1, size), 1 / size), grad, grad, labels, truth, pairs, torch.ones(1), torch.empty(rows), late,
        0, rows, size, size, 0.7, 3.0, 0, False, False, 8,
    )  # fmt: skip
    assert early.tolist() == late.tolist()
    assert set(early.tolist()) == {0.0, 1.0}


def test_tiles_that_cross_documents_and_are_not_full(agree, make_objective, make_batch):
    """More rows than a tile has, documents that begin inside one, a reply of one token, one chunk of labels a row."""
    masks = [[0] * 70 + [1] * 75, [0, 0, 1], [0] * 9 + [1] * 11 + [0] * 3 + [1] + [0] + [1] * 5]
    agree(make_objective(head_dim=16, num_heads=2, num_kv_heads=1), make_batch(masks), steps=2, label_rows=50)


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_whole_documents(agree, make_objective, make_batch, monkeypatch, num_kv_heads):
    """First, last and between others; a tile with rows of both kinds; a gap; lengths that are rounded up or are not."""
    monkeypatch.setattr(whole, "SHORTEST", 10)
    monkeypatch.setattr(whole, "ROUND", 4)
    monkeypatch.setattr(attention, "ROUND", 4)
    objective = make_objective(head_dim=16, num_heads=2, num_kv_heads=num_kv_heads, norm_output=True)
    dense, gap = [0] + [1] * 12, [0, 1, 1, 0, 0, *[1] * 11]
    short, sparse = [0, 0, 1, 1, 1], [*[0] * 9, 1, 1, 1]
    agree(objective, make_batch([dense, short, gap, sparse, dense]), whole=((0, 13), (18, 16), (46, 13)))
    objective.zero_grad()
    agree(objective, make_batch([sparse, [0] + [1] * 90, short]), whole=((12, 91),))
    objective.zero_grad()
    agree(objective, make_batch([[0, 0, 0], dense, gap]), whole=((3, 13), (16, 16)))  # nothing is left to our kernels


def test_a_frozen_head_gets_no_gradient(agree, make_objective, make_batch):
    objective = make_objective(head_dim=16)
    objective.draft.lm_head.requires_grad_(False)
    agree(objective, make_batch(MASKS[:1]))


@pytest.mark.parametrize("masks", [[], [[0, 0, 0]], [[0, 1]]], ids=["no documents", "no reply", "one-token reply"])
def test_a_batch_without_supervised_rows_still_reaches_every_parameter(make_objective, make_batch, masks):
    objective, batch = make_objective(head_dim=16), make_batch(masks)
    loss, sums = fused_loss(objective, batch, lay_out(batch, STEPS, 4), torch.ones(STEPS), torch.float32)
    loss.backward()
    assert sums.rows_J.tolist() == [0] * STEPS
    assert all(p.grad is not None and not p.grad.any() for p in objective.draft.parameters())


def test_losses_stay_finite_for_huge_states(make_objective, make_batch):
    objective, batch = make_objective(LossOptions("lk_lambda"), head_dim=16), make_batch(MASKS[:2])
    batch.aux_TAH.mul_(1e4)
    batch.last_MH.mul_(1e4)
    loss, _ = fused_loss(objective, batch, lay_out(batch, STEPS, 4), torch.ones(STEPS), torch.float32)
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad.isfinite().all() for p in objective.draft.parameters())


def test_replay_finds_the_same_matches(make_objective, make_batch):
    objective, batch = make_objective(head_dim=16), make_batch(MASKS)
    leading, sums = fused_matches(objective, batch, lay_out(batch, STEPS, 4), torch.float32)
    wanted, wanted_sums = chain_matches(objective, batch, STEPS)
    assert leading.tolist() == wanted.tolist()
    assert sums.hits_J.tolist() == wanted_sums.hits_J.tolist()
    torch.testing.assert_close(sums.loss_J, wanted_sums.loss_J)


def test_rows_past_two_to_the_31_elements_are_where_they_belong():
    """87 thousand rows of the states that norm_before_fc norms, at H = 8192. Here: few columns of five very wide rows.

    Memory that nobody touches costs nothing, so the tensors are as large as they say and take a few pages.
    """
    rows, width, columns = 5, 2**29, 16
    assert rows * width > 2**31
    generator = torch.Generator().manual_seed(0)

    def wide():
        tensor = torch.empty(rows * width, dtype=torch.int8)
        for i in range(rows):
            seen(tensor)[i][:] = torch.randint(-9, 9, (columns,), generator=generator)
        return tensor

    def seen(tensor):
        return [tensor[i * width : i * width + columns] for i in range(rows)]

    def total(a, b):
        return sum(x.float() * y.float() for x, y in zip(seen(a), seen(b), strict=True))

    def close(tensor, *parts):  # the gradient in the input is less the row's mean, next to nothing, and truncated
        wanted = [sum(row.float() for row in of_row) for of_row in zip(*map(seen, parts), strict=True)]
        return all((a - b).abs().max() <= 1 for a, b in zip(seen(tensor), wanted, strict=True))

    x, dy, dn, dres, dx = (wide() for _ in range(5))
    ones, weight = torch.ones(rows), torch.ones(columns)
    dw, dw_next = torch.empty(width), torch.empty(width)
    pointwise._rms_grad[(1,)](
        dy, dres, ones, x, ones, ones, weight, dx, dw, rows, width, True, False, False, False, True, columns
    )
    assert torch.equal(dw[:columns], total(dy, x)) and close(dx, dy, dres)
    pointwise._output_grad[(1,)](
        dy, ones, x, ones, weight, dn, dres, ones, weight, dx, dw, dw_next, rows, width, True, False, False, columns
    )
    assert torch.equal(dw[:columns], total(dy, x)) and torch.equal(dw_next[:columns], total(dn, x))
    assert close(dx, dy, dn, dres)


@pytest.mark.parametrize("drafting", ["greedy", "probabilistic"])
def test_chains_are_judged_alike(make_objective, make_batch, drafting):
    objective, batch = make_objective(LossOptions("soft_ce_full"), head_dim=16, norm_output=True), make_batch(MASKS)
    found = fused_chains(objective, batch, lay_out(batch, STEPS, 2), torch.float32, [0.7, 1.0], drafting)
    wanted = judge_chains(objective, batch, STEPS, [0.7, 1.0], drafting)
    assert found.leading_T.tolist() == wanted.leading_T.tolist()
    torch.testing.assert_close(found.accept_NTJ, wanted.accept_NTJ)
    empty = make_batch([[0, 0, 0]])
    assert not fused_chains(objective, empty, lay_out(empty, STEPS, 2), torch.float32).leading_T.any()


def test_the_training_loop_runs_on_it(synthetic_run, changed, monkeypatch):
    """The stage itself, with this pass for the eager one: the same losses and the same replay on the way."""
    from draftsmith.core.run import RunFolder
    from draftsmith.train import stage

    def metrics():
        train = {"epochs": 1, "precision": "float32", "log_interval": 1, "eval_interval": 2, "ttt_steps": 2}
        config = changed(synthetic_run, train=train)
        stage.train(config)
        lines = RunFolder.of(config).metrics.read_text().splitlines()
        shutil.rmtree(RunFolder.of(config).checkpoints)
        return [json.loads(line) for line in lines]

    eager = metrics()
    monkeypatch.setattr(stage, "fused_dtype", lambda *args: torch.float32)
    fused = metrics()
    assert len(fused) == len(eager) >= 3
    for mine, theirs in zip(fused, eager, strict=True):
        for key in {"loss", "grad_norm", "eval_acceptance_length"} & set(theirs):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-3), (theirs["step"], key)


# ---- float8 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(16, 16), (50, 80), (130, 48), (1, 64)], ids=str)
def test_the_cast_scales_and_transposes(shape):
    """Into float32, for the interpreter rounds float8 wrongly; the rounding is compared on a GPU (test_fused.py)."""
    x, (rows, columns) = torch.randn(shape), shape
    plain, turned = torch.empty(shape), torch.full((columns, -(-rows // 16) * 16), 7.0)
    scale = cast_into(x, x.abs().max(), plain, turned, 448.0)
    assert float(scale) == pytest.approx(float(x.abs().max()) / 448.0)
    torch.testing.assert_close(plain, x / scale)
    assert torch.equal(turned, torch.nn.functional.pad(plain.T, (0, -rows % 16)))


def test_a_matrix_of_zeros_and_one_that_is_not_finite():
    zeros = scaled(torch.zeros(16, 16), torch.float8_e4m3fn, plain=True, turned=False)
    assert float(zeros.scale) == 1.0 and not zeros.plain.float().any()
    products = Fp8Products()
    for bad in (float("nan"), float("inf")):
        x = torch.ones(3, 16)
        x[1, 2] = bad
        assert not products.forward(x, products.weight(torch.ones(16, 16))).isfinite().all()


def test_float8_products_are_those_of_the_cast_operands():
    """Against float64 on what the casts hold; against what was cast, within three bits (two for a gradient)."""
    products, g = Fp8Products(), torch.Generator().manual_seed(0)
    x, w, dy = (torch.randn(size, generator=g) for size in ((50, 64), (32, 64), (50, 32)))
    weight, grad = products.weight(w), products.gradient(dy)

    def held(cast, size):
        return (cast.plain if cast.plain is not None else cast.turned[:, : size[0]].T).double() * cast.scale.double()

    w8, dy8 = held(weight, w.shape), held(grad, dy.shape)
    x8 = held(scaled(x, torch.float8_e4m3fn, plain=True, turned=False), x.shape)
    made = {
        "forward": (products.forward(x, weight), x8 @ w8.T, x @ w.T),
        "input": (products.into_input(grad, weight), dy8 @ w8, dy @ w),
        "weight": (products.into_weight(torch.ones(32, 64), grad, x), 1.0 + dy8.T @ x8, 1.0 + dy.T @ x),
    }
    for name, (ours, exact, given) in made.items():
        assert float((ours - exact).norm() / exact.norm()) < 1e-5, name
        assert 0.01 < float((ours - given).norm() / given.norm()) < 0.08, name


@pytest.mark.parametrize("values", [{}, {"norm_output": True, "fc_norm": True, "num_kv_heads": 4}], ids=str)
def test_float8_gradients_point_where_the_references_do(reference, make_objective, make_batch, values):
    """With smaller weights than the fixture's: those magnify every rounding (bfloat16 is 2 % off)."""
    objective = make_objective(head_dim=16, draft_vocab_size=32, **values)
    with torch.no_grad():
        for p in objective.draft.parameters():
            p.mul_(0.4 if p.dim() > 1 else 1.0)
    batch = make_batch(MASKS)
    wanted = reference.reference_gradients(objective, batch, STEPS, DECAY)
    weights = DECAY ** torch.arange(STEPS) / torch.tensor(wanted.rows).clamp_min(1)
    loss, sums = fused_loss(objective, batch, lay_out(batch, STEPS, 4), weights, torch.float32, fp8=True)
    loss.backward()
    assert sums.rows_J.tolist() == wanted.rows
    assert float(loss.detach()) == pytest.approx(wanted.loss, rel=0.02)
    ours = torch.cat([p.grad.flatten().double() for p in objective.draft.parameters()])
    theirs = torch.cat([wanted.gradients[name].flatten() for name, _ in objective.draft.named_parameters()])
    assert float(torch.nn.functional.cosine_similarity(ours, theirs, dim=0)) > 0.98
