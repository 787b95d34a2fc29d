"""The fused pass: its host side here, its kernels in Triton's interpreter (`fused_cases.py`), and on a GPU."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from draftsmith.core.errors import UserError
from draftsmith.core.losses import LossOptions

pytest.importorskip("triton")


def test_the_kernels_in_tritons_interpreter():
    """In a process of its own: what imported Triton before has its kernels compiled."""
    cases = Path(__file__).with_name("fused_cases.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(cases), "-q", "-p", "no:cacheprovider"],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-1000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize("seed", range(20))
def test_tiles_hold_what_every_row_sees(make_batch, monkeypatch, seed):
    """Every key a row sees is in its tile's range; in the part that is not masked, every row sees every key."""
    from draftsmith.core.fused import tiles
    from draftsmith.core.fused.layout import lay_out

    rng = np.random.default_rng(seed)
    monkeypatch.setattr("draftsmith.core.fused.whole.SHORTEST", 50)
    shares = [rng.random(), 1.0, 0.95]
    masks = [
        (rng.random(n) < shares[rng.integers(3)]).astype(int).tolist()
        for n in rng.integers(1, 400, size=rng.integers(1, 6))
    ]
    window, steps = [None, 1, 5, 90][seed % 4], int(rng.integers(1, 8))
    layout = lay_out(make_batch(masks), steps, 7, window, whole=True)
    rows, documents = layout.rows_R.numpy(), layout.documents_R.numpy()
    assert bool(layout.whole) == bool((documents > rows).any())
    keys = np.arange(len(layout.row_of_T))

    def seen(ahead):
        looked = keys[None] + (window or 10**9) > rows[:, None] + ahead
        return (keys[None] >= documents[:, None]) & (keys[None] <= rows[:, None]) & looked

    sometimes, always = seen(0), seen(steps - 1)
    for tile, ranges in ((tiles.FORWARD, layout.forward_tiles), (tiles.GRAD_Q, layout.grad_q_tiles)):
        assert len(ranges) == -(-len(rows) // tile.rows)
        for i, (first, whole, rest, end) in enumerate(ranges.tolist()):
            mine = slice(i * tile.rows, (i + 1) * tile.rows)
            assert first <= whole <= rest <= end
            assert (rest - whole) % tile.keys == 0
            assert not sometimes[mine, :first].any() and not sometimes[mine, end:].any()
            assert always[mine, whole:rest].all()
    for i, (first, whole, rest, end) in enumerate(layout.grad_kv_tiles.tolist()):
        mine = slice(i * tiles.GRAD_KV.keys, (i + 1) * tiles.GRAD_KV.keys)
        assert first <= whole <= rest <= end
        assert (rest - whole) % tiles.GRAD_KV.rows == 0
        assert not sometimes[:first, mine].any() and not sometimes[end:, mine].any()
        assert always[whole:rest, mine].all()


def test_chunks_hold_every_pair_once(make_batch):
    from draftsmith.core.fused.layout import lay_out

    batch = make_batch([[0, 0, 1, 1, 1, 1], [0, 1, 0, 1, 1, 1], [0, 0]])
    layout = lay_out(batch, 3, 2)
    assert [c.p0 for c in layout.chunks] == [0, *[c.p1 for c in layout.chunks][:-1]]
    assert layout.chunks[-1].p1 == len(layout.pairs_P)
    pairs = []
    for chunk in layout.chunks:
        for p in range(chunk.p0, chunk.p1):
            step, row = divmod(int(layout.pairs_P[p]), layout.num_rows)
            label = int(batch.last_rows_M[layout.labels_P[p]])
            assert chunk.m0 <= layout.labels_P[p] < chunk.m1
            assert label == int(layout.rows_R[row]) + step + 1
            assert int(layout.truth_P[p]) == label + 1
            pairs.append((step, int(layout.rows_R[row])))
    # By hand: replies x2..x5 and x7, x9..x11; step j needs j + 1 reply tokens after the row.
    assert sorted(pairs) == [(0, 1), (0, 2), (0, 3), (0, 8), (0, 9), (1, 1), (1, 2), (1, 8), (2, 1)]


@pytest.mark.parametrize("row", [6, 7, 3, 2], ids=lambda r: f"row {r}")
def test_a_label_whose_state_is_missing_is_named_by_both_passes(make_objective, make_batch, row):
    """A damaged store must not be trained on its neighbours' states; which sample it is, is said."""
    from draftsmith.core.fused.layout import lay_out

    batch = make_batch([[0, 0, 1, 1, 1, 1], [0, 1, 1, 1], [0, 0]])
    rows = batch.last_rows_M.tolist()
    sample, token = (batch.sample_ids[0], row) if row < 6 else (batch.sample_ids[1], row - 6)
    kept = torch.tensor([i for i, at in enumerate(rows) if at != row])
    spoiled = replace(batch, last_MH=batch.last_MH[kept], last_rows_M=batch.last_rows_M[kept])
    if row == 6:  # it foretells the reply's first token, which no draft is asked for
        assert lay_out(spoiled, 3, 4).num_rows == lay_out(batch, 3, 4).num_rows
        return
    said = f"sample {sample}: its token {token} is supervised.*capture --fresh"
    with pytest.raises(UserError, match=said):
        lay_out(spoiled, 3, 4)
    with pytest.raises(UserError, match=said):
        make_objective()(spoiled, 3)


def test_the_last_steps_do_without_float8(make_objective, make_batch):
    from draftsmith.core.config_train import TrainConfig
    from draftsmith.train.step import TrainingStep

    def used(done, **values):
        step = TrainingStep(make_objective(), TrainConfig.model_validate(values), torch.bfloat16)
        return step.lay_out(make_batch([[0, 1, 1]]), done).fp8

    assert [used(done, matmul="fp8") for done in (0.0, 0.89, 0.9, 0.99)] == [True, True, False, False]
    assert used(0.99, matmul="fp8", bf16_tail=0.0) and not used(0.0, matmul="fp8", bf16_tail=1.0)
    assert not used(0.0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"head_dim": 128, "num_kv_heads": 4},
        {"norm_output": True, "norm_before_residual": True, "fc_norm": True, "sliding_window": 100},
        {"norm_before_fc": True, "num_aux": 4, "draft_vocab_size": 40, "own_embedding": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", [0, 1])
def test_on_a_gpu(make_objective, make_batch, values, seed):
    """Float32 agrees with eager float32; bfloat16 is no further from it than eager bfloat16 is; bits repeat."""
    from draftsmith.core.fused.layout import lay_out
    from draftsmith.core.fused.objective import fused_loss

    rng, steps, cuda = np.random.default_rng(seed), 5, torch.device("cuda")
    lengths = [3, 5000, 9, 700, 1, int(rng.integers(50, 3000))]
    masks = [(rng.random(n) < 0.95).astype(int).tolist() for n in lengths] + [[0] * 40, [0] * 20 + [1]]
    objective = make_objective(**{"head_dim": 64, "seed": seed, **values}).to(cuda)
    batch = make_batch(masks, num_aux=values.get("num_aux", 3))
    layout = lay_out(batch, steps, 900, values.get("sliding_window")).to(cuda)
    batch = batch.to(cuda)
    torch.backends.cuda.matmul.allow_tf32 = False

    def run(fused, dtype):
        objective.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            weights = 0.8 ** torch.arange(steps, device=cuda) / layout.num_rows
            if fused:
                loss, _ = fused_loss(objective, batch, layout, weights, dtype)
            else:
                loss = (weights * objective(batch, steps).loss_J).sum()
        loss.backward()
        return {n: p.grad.clone() for n, p in objective.draft.named_parameters()}

    def error(mine, wanted):
        return {n: float((mine[n] - wanted[n]).norm() / wanted[n].norm()) for n in wanted}

    wanted = run(False, torch.float32)
    assert max(error(run(True, torch.float32), wanted).values()) < 1e-3
    half, eager = run(True, torch.bfloat16), error(run(False, torch.bfloat16), wanted)
    for name, off in error(half, wanted).items():
        assert off < 1.2 * eager[name] + 2e-3, (name, off, eager[name])
    again = run(True, torch.bfloat16)
    assert all(torch.equal(half[n], again[n]) for n in half)


@pytest.mark.gpu
@pytest.mark.parametrize("weight", [0.0, 0.3])
def test_rejected_steps_on_a_gpu(make_objective, make_batch, weight):
    """Float32 against eager float32; bfloat16 and float8 find the same weights twice, so their bits repeat."""
    from draftsmith.core.fused.layout import lay_out
    from draftsmith.core.fused.objective import fused_loss

    cuda, steps = torch.device("cuda"), 5
    objective = make_objective(LossOptions("lk_alpha", rejected_weight=weight), head_dim=64).to(cuda)
    host = make_batch([[0] * 30 + [1] * 700, [0, *[1] * 1500]])
    host.input_ids_T[:] = (objective.draft_ids >= 0).nonzero()[:2, 0].cpu()[host.input_ids_T % 2]
    layout, batch = lay_out(host, steps, 300).to(cuda), host.to(cuda)
    torch.backends.cuda.matmul.allow_tf32 = False
    weights = 0.8 ** torch.arange(steps, device=cuda) / layout.num_rows

    def run(dtype, fp8=False):
        objective.zero_grad()
        loss, sums = fused_loss(objective, batch, layout, weights, dtype, fp8)
        loss.backward()
        return sums, [p.grad.clone() for p in objective.draft.parameters()]

    wanted = objective(batch, steps)
    assert wanted.hits_J[0] > 20 and float(wanted.weighted_J[1]) < float(wanted.loss_J[1])
    sums, ours = run(torch.float32)
    assert sums.hits_J.tolist() == wanted.hits_J.tolist()
    objective.zero_grad()
    (weights * wanted.minimised_J).sum().backward()
    for mine, p in zip(ours, objective.draft.parameters(), strict=True):
        assert float((mine - p.grad).norm() / p.grad.norm()) < 1e-3
    for kind in ((torch.bfloat16, False), (torch.bfloat16, True)):
        first, again = run(*kind)[1], run(*kind)[1]
        assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(first, again, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(8, 8, 128), (8, 2, 64)], ids=str)
def test_whole_documents_on_a_gpu(make_objective, make_batch, heads):
    """CuDNN's passes against eager float32 and against our own kernels in bfloat16."""
    from draftsmith.core.fused.layout import lay_out
    from draftsmith.core.fused.objective import fused_loss

    cuda, steps, (n, g, d) = torch.device("cuda"), 5, heads
    masks = [[0, *[1] * 4999], [0] * 300 + [1] * 200, [0] * 40 + ([1] * 300 + [0] * 9) * 14, [0, *[1] * 4351]]
    objective = make_objective(num_heads=n, num_kv_heads=g, head_dim=d).to(cuda)
    host = make_batch(masks)
    layouts = {whole: lay_out(host, steps, 900, None, whole).to(cuda) for whole in (False, True)}
    assert [w.length for w in layouts[True].whole] == [5000, 4366, 4352]
    batch, weights = host.to(cuda), 0.8 ** torch.arange(steps, device=cuda) / layouts[True].num_rows
    torch.backends.cuda.matmul.allow_tf32 = False

    def run(layout=None):
        objective.zero_grad()
        if layout is None:
            loss = (weights * objective(batch, steps).loss_J).sum()
        else:
            loss, _ = fused_loss(objective, batch, layout, weights, torch.bfloat16)
        loss.backward()
        return float(loss.detach()), {n: p.grad.clone() for n, p in objective.draft.named_parameters()}

    def error(mine, wanted):
        return {n: float((mine[n] - wanted[n]).norm() / wanted[n].norm()) for n in wanted}

    (exact, wanted), (ours, kernels), (theirs, whole) = run(), run(layouts[False]), run(layouts[True])
    assert theirs == pytest.approx(exact, rel=3 * abs(ours / exact - 1) + 1e-4)
    by_kernels = error(kernels, wanted)
    for name, off in error(whole, wanted).items():
        assert off < 1.2 * by_kernels[name] + 2e-3, (name, off, by_kernels[name])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4096, 3072), (777, 576), (1, 64)], ids=str)
def test_float8_casts_on_a_gpu_are_the_eager_ones(shape):
    from draftsmith.core.fused.fp8 import E4M3, E5M2, scaled, scaled_eagerly

    x = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        * torch.logspace(-3, 3, shape[0], device="cuda")[:, None]
    )
    x = x.to(torch.bfloat16)
    amax = x.abs().max().float()
    for dtype in (E4M3, E5M2):
        ours, eager = scaled(x, dtype, True, True), scaled_eagerly(x, amax, dtype, True, True)
        assert ours.plain is not None and ours.turned is not None
        assert torch.equal(ours.scale, eager.scale)
        # One division in a thousand rounds to the other neighbour.
        for mine, theirs in ((ours.plain, eager.plain), (ours.turned, eager.turned)):
            assert (mine.float() != theirs.float()).float().mean() < 1e-3
            torch.testing.assert_close(mine.float(), theirs.float(), rtol=torch.finfo(dtype).eps, atol=1e-3)


@pytest.mark.gpu
def test_float8_products_on_a_gpu(make_objective, make_batch):
    """Gradients point where bfloat16's do, as far as three bits of mantissa allow."""
    from draftsmith.core.fused.layout import lay_out
    from draftsmith.core.fused.objective import fused_loss

    cuda = torch.device("cuda")
    objective = make_objective(head_dim=64, draft_vocab_size=32).to(cuda)
    with torch.no_grad():  # smaller weights than that fixture's magnify roundings less
        for p in objective.draft.parameters():
            p.mul_(0.4 if p.dim() > 1 else 1.0)
    batch = make_batch([[0] * 30 + [1] * 300, [0] * 5 + [1] * 600])
    layout, batch = lay_out(batch, 5, 900, None).to(cuda), batch.to(cuda)

    def run(fp8):
        objective.zero_grad()
        weights = 0.8 ** torch.arange(5, device=cuda) / layout.num_rows
        loss, _ = fused_loss(objective, batch, layout, weights, torch.bfloat16, fp8)
        loss.backward()
        return float(loss.detach()), torch.cat([p.grad.flatten() for p in objective.draft.parameters()])

    (loss, wanted), (loss8, half) = run(False), run(True)
    assert loss8 == pytest.approx(loss, rel=0.02)
    assert 0.98 < float(torch.nn.functional.cosine_similarity(half, wanted, dim=0)) < 1.0
