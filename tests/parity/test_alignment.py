"""The eager path against the float64 reference (`reference.py`): losses, matches and gradients of every variant."""

import pytest
import torch

from draftsmith.core.config_train import TrainConfig
from draftsmith.core.losses import LossOptions
from draftsmith.core.objective import chain_weights, step_weights, supervised_rows
from draftsmith.core.replay import chain_matches
from draftsmith.train.step import TrainingStep

STEPS, DECAY = 4, 0.8
MASKS = [[0, 0, 0, 1, 1, 1, 1, 1, 1], [0, 1, 1, 0, 0, 1, 1, 1], [0, 0, 0], [0, 0, 1], [1, 1, 1, 1, 1, 1]]
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0, "original_max_position_embeddings": 128}

VARIANTS = {
    "plain": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "EAGLE 3.1, normed residual": {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
    "4 auxiliary states": {"num_aux": 4, "fc_norm": True},
    "MHA": {"num_kv_heads": 4},
    "one key/value head": {"num_kv_heads": 1},
    "wide heads": {"head_dim": 16},
    "linear rope": {"rope": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}},
    "llama3 rope": {"rope": LLAMA3},
    "yarn": {"rope": YARN},
    "yarn, all its keys": {
        "rope": {**YARN, "attention_factor": 1.4, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}
    },
    "partial rotary": {"rope": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}},
    "partial yarn": {"rope": {**YARN, "partial_rotary_factor": 0.5}},
    "window of 3": {"sliding_window": 3},
    "window of 1": {"sliding_window": 1},
    "full vocabulary": {"draft_vocab_size": 40},
    "own embedding": {"own_embedding": True},
}
LOSSES = [
    LossOptions("soft_ce", temperature=2.0),
    LossOptions("soft_ce_full"),
    LossOptions("kl"),
    LossOptions("lk_alpha"),
    LossOptions("lk_lambda", lk_eta=1.0),
    LossOptions("lk_lambda", temperature=0.7),
    LossOptions("soft_ce_full", temperature=1.5),
]


@pytest.fixture
def agree(reference):
    """Assert that loss, rows, matches and every gradient of the eager path are the reference's."""

    def check(objective, batch, steps=STEPS):
        sums = objective(batch, steps)
        loss = (step_weights(sums.rows_J, DECAY) * sums.minimised_J).sum()
        loss.backward()
        wanted = reference.reference_gradients(objective, batch, steps, DECAY)
        assert sums.rows_J.tolist() == wanted.rows
        assert sums.hits_J.tolist() == wanted.hits
        assert loss.item() == pytest.approx(wanted.loss, rel=1e-5, abs=1e-6)
        for name, parameter in objective.draft.named_parameters():
            theirs = wanted.gradients[name]
            if not parameter.requires_grad:
                assert parameter.grad is None, name
                continue
            off = float((parameter.grad.double() - theirs).norm())
            assert off <= 2e-4 * float(theirs.norm()) + 1e-9, (name, off, float(theirs.norm()))

    return check


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS)
def test_every_draft_equals_the_reference(agree, make_objective, make_batch, values):
    agree(make_objective(**values), make_batch(MASKS, num_aux=values.get("num_aux", 3)))


@pytest.mark.parametrize("draft_vocab_size", [16, 40])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda o: f"{o.name}, T={o.temperature}")
def test_every_loss_equals_the_reference(agree, make_objective, make_batch, loss, draft_vocab_size):
    agree(make_objective(loss, draft_vocab_size=draft_vocab_size), make_batch(MASKS))


REPLIES = [[0, 0, 0, *[1] * 22], [0, 1, 1, 0, 0, *[1] * 9], [0, 0, 0], [0, 0, 1]]


@pytest.mark.parametrize("weight", [0.0, 0.3])
@pytest.mark.parametrize("name", ["soft_ce", "lk_alpha"])
def test_rejected_steps_equal_the_references(agree, make_objective, make_batch, guessed, name, weight):
    objective = make_objective(LossOptions(name, rejected_weight=weight))
    batch = guessed(objective, make_batch(REPLIES), STEPS)
    leading, _ = chain_matches(objective, batch, STEPS)
    assert (leading == STEPS).any() and set(leading.tolist()) > {0, 1}  # chains that live, and that die early and late
    agree(objective, batch)


@torch.no_grad()
def test_rejected_steps_by_hand(make_objective, make_batch, guessed):
    """The chain of row 0 guesses x2, x3, x4, x5; each time an earlier one of them is made a miss."""
    objective, steps = make_objective(LossOptions(rejected_weight=0.25)), 4
    batch = guessed(objective, make_batch([[0, 1, 1, 1, 1, 1]]), steps)
    outside = int((objective.draft_ids < 0).nonzero()[0])
    for spoiled, weights in ((5, [1.0, 1.0, 1.0, 1.0]), (3, [1.0, 1.0, 0.25, 0.25]), (2, [1.0, 0.25, 0.25, 0.25])):
        batch.input_ids_T[spoiled] = outside
        judged = list(objective.judge(batch, steps))
        assert [step.rows_R.tolist() for step, _, _ in judged] == [[0, 1, 2, 3], [0, 1, 2], [0, 1], [0]]
        hits = [match_R.tolist() for _, _, match_R in judged]  # hits[j - 1][row]
        wanted = [0.0] * steps
        for step, loss_R, _ in judged:
            for row, loss in enumerate(loss_R.tolist()):
                weight = 1.0 if all(hits[i][row] for i in range(step.j - 1)) else 0.25
                assert row or weight == weights[step.j - 1]
                wanted[step.j - 1] += weight * loss
        sums = objective(batch, steps)
        assert sums.weighted_J.tolist() == pytest.approx(wanted)
        assert sums.loss_J.tolist() == pytest.approx([float(loss_R.sum()) for _, loss_R, _ in judged])


def test_chain_weights_by_hand():
    hits = torch.tensor([[1.0, 1, 0, 1], [1, 0, 1, 1], [0, 1, 1, 1], [1, 1, 1, 0]])
    wanted = [[1, 1, 1, 1], [1, 1, 0, 1], [1, 0, 0, 1], [0, 0, 0, 1]]
    assert chain_weights(hits, 0.0).tolist() == wanted
    assert chain_weights(hits, 0.5).tolist() == [[1.0 if x else 0.5 for x in row] for row in wanted]
    assert chain_weights(hits[:1], 0.0).tolist() == [[1.0] * 4]


def test_what_is_reported_has_no_weights_and_a_weight_of_one_changes_no_bit(make_objective, make_batch, guessed):
    batch = guessed(make_objective(), make_batch(REPLIES), STEPS)

    def run(**options):
        objective = make_objective(LossOptions("lk_lambda", **options))
        step = TrainingStep(objective, TrainConfig(ttt_steps=STEPS), None)
        loss, sums = step(step.lay_out(batch), 0.8 ** torch.arange(STEPS))
        loss.backward()
        return objective, sums, [p.grad for p in objective.draft.parameters()]

    plain, sums, grads = run()
    (same, _, ones), (weighted, reported, others) = run(rejected_weight=1.0), run(rejected_weight=0.3)
    assert all(torch.equal(a, b) for a, b in zip(grads, ones, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(grads, others, strict=True))
    assert same(batch, STEPS).weighted_J is None and sums.weighted_J is reported.weighted_J is None
    assert torch.equal(sums.loss_J, reported.loss_J) and torch.equal(sums.hits_J, reported.hits_J)
    (_, mine), (_, theirs) = (chain_matches(o, batch, STEPS) for o in (weighted, plain))
    assert torch.equal(mine.loss_J, theirs.loss_J) and mine.weighted_J is None
    plain.zero_grad()  # as training was before there were weights
    (0.8 ** torch.arange(STEPS) * plain(batch, STEPS).loss_J).sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(grads, plain.draft.parameters(), strict=True))


def test_the_head_of_another_norm_equals_the_reference(agree, make_objective, make_batch):
    objective = make_objective(LossOptions("soft_ce_full"))
    objective.target_head.form = "rms_plus_one"
    agree(objective, make_batch(MASKS))


@pytest.mark.parametrize("part", ["lm_head", "fc", "midlayer"])
def test_a_frozen_part_gets_no_gradient_and_the_others_theirs(agree, make_objective, make_batch, part):
    objective = make_objective()
    getattr(objective.draft, part).requires_grad_(False)
    agree(objective, make_batch(MASKS))


def random_masks(lengths, seed):
    """One document a length, replies of random places and lengths (one token too), a fifth of them without any."""
    g = torch.Generator().manual_seed(seed)

    def draw(below):
        return int(torch.randint(below, (1,), generator=g))

    masks = []
    for length in lengths:
        mask = [0] * length
        at = length if draw(5) == 0 else 1 + draw(length)
        while at < length:
            reply = 1 + draw(min(40, length)) * draw(2)
            mask[at : at + reply] = [1] * len(mask[at : at + reply])
            at += reply + 1 + draw(20)
        masks.append(mask)
    return masks


@pytest.mark.parametrize(
    ("seed", "lengths"),
    [
        (0, [3, 4, 5, 6, 7]),
        (1, [3, 31, 3, 17]),
        (2, [64, 9]),
        (3, [1, 2, 3]),
        (4, [113]),
        (5, [23, 23, 23]),
        (6, [190]),
    ],
    ids=str,
)
def test_random_masks_equal_the_reference(agree, make_objective, make_batch, seed, lengths):
    agree(make_objective(norm_output=True, fc_norm=True), make_batch(random_masks(lengths, seed), seed), steps=7)


def test_a_window_in_longer_documents_equals_the_reference(agree, make_objective, make_batch):
    agree(make_objective(sliding_window=8), make_batch(random_masks([40, 33], 8), 8), steps=5)


@pytest.mark.slow
@pytest.mark.parametrize("values", [{}, {"sliding_window": 50}], ids=["plain", "window"])
def test_a_long_document_equals_the_reference(agree, make_objective, make_batch, values):
    agree(make_objective(rope=YARN, **values), make_batch([[0] * 120 + [1] * 80 + [0] * 20 + [1] * 40], 9), steps=7)


@pytest.mark.parametrize("masks", [[], [[0, 0, 0, 0]], [[0, 1]]], ids=["no documents", "no reply", "one-token reply"])
def test_a_batch_without_supervised_rows_still_reaches_every_parameter(make_objective, make_batch, masks):
    """T1: a rank that has nothing to learn from must still take part in the collective."""
    objective = make_objective(LossOptions("lk_lambda"), own_embedding=True)
    sums = objective(make_batch(masks), STEPS)
    assert sums.rows_J.tolist() == [0] * STEPS
    (step_weights(sums.rows_J, DECAY) * sums.loss_J).sum().backward()
    grads = {n: p.grad for n, p in objective.draft.named_parameters()}
    assert all(g is not None and not g.any() for g in grads.values()), [n for n, g in grads.items() if g is None]


@pytest.mark.parametrize("name", ["soft_ce", "soft_ce_full", "kl", "lk_alpha", "lk_lambda"])
def test_loss_is_finite_for_huge_states_and_tokens_outside_the_draft_vocabulary(make_objective, make_batch, name):
    objective = make_objective(LossOptions(name))
    batch = make_batch([[0, 0, 1, 1, 1, 1]])
    inside = {int(t) for t in range(40) if objective.draft_ids[t] >= 0}
    batch.input_ids_T.fill_(next(t for t in range(40) if t not in inside))
    batch.aux_TAH.mul_(1e4)
    batch.last_MH.mul_(1e4)
    sums = objective(batch, STEPS)
    (step_weights(supervised_rows(batch, STEPS), DECAY) * sums.loss_J).sum().backward()
    assert torch.isfinite(sums.loss_J).all()
    assert all(torch.isfinite(p.grad).all() for p in objective.draft.parameters())
    assert not sums.hits_J.any()  # a token outside the draft vocabulary is a miss
