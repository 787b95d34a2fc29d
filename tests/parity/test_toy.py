"""The alignment on six tokens, written out by hand: prompt x0 x1, reply x2 x3 x4 x5. No helper makes an expectation.

row t            0     1     2     3     4     5
token            x0    x1   [x2]  [x3]  [x4]  [x5]

step 1           -     x3    x4    x5    -     -      what is predicted at which row
step 2           -     x4    x5    -     -     -
step 3           -     x5    -     -     -     -
"""

import pytest
import torch

from draftsmith.core.batch import Batch
from draftsmith.core.losses import LossOptions
from draftsmith.core.objective import Objective, supervised_rows
from draftsmith.core.target_weights import TargetHead
from draftsmith.core.unroll import attend, reply_runs, unroll

# Token ids are the positions, so that x3 is 3.
MASK = [0, 0, 1, 1, 1, 1]


@pytest.fixture
def toy(make_batch):
    batch = make_batch([MASK])
    batch.input_ids_T.copy_(torch.arange(6))
    return batch


def test_rows_supervised_at_each_step(toy, make_objective):
    # Row 1 is where the server drafts first: it has sampled x2 and drafts x3, x4, x5.
    assert reply_runs(toy).tolist() == [0, 4, 3, 2, 1, 0]
    rows = {step.j: step.rows_R.tolist() for step in unroll(make_objective().draft, toy, 4)}
    assert rows == {1: [1, 2, 3], 2: [1, 2], 3: [1], 4: []}
    assert supervised_rows(toy, 4).tolist() == [3, 2, 1, 0]


# (step, row): rows of the auxiliary states, and tokens, that the draft's output there may depend on.
# Step 1 at row 1 sees the keys of rows 0 and 1, made of a0, x1 and a1, x2. Step 2 at row 1 sees these and its own,
# made of step 1's output and x3; the step-1 key of row 2, which is made of a2 and x3 too, is not there.
READS = {
    (1, 1): ([0, 1], [1, 2]),
    (1, 2): ([0, 1, 2], [1, 2, 3]),
    (1, 3): ([0, 1, 2, 3], [1, 2, 3, 4]),
    (2, 1): ([0, 1], [1, 2, 3]),
    (2, 2): ([0, 1, 2], [1, 2, 3, 4]),
    (3, 1): ([0, 1], [1, 2, 3, 4]),
}


@pytest.mark.parametrize(("place", "reads"), READS.items(), ids=str)
def test_what_each_step_reads(toy, make_objective, place, reads):
    """Seen by gradients: what is not read has none."""
    draft = make_objective(own_embedding=True).draft
    toy.aux_TAH.requires_grad_()
    step = next(s for s in unroll(draft, toy, 3) if s.j == place[0])
    step.hidden_RH[step.rows_R.tolist().index(place[1])].square().sum().backward()
    rows = toy.aux_TAH.grad.abs().sum((1, 2)).nonzero().flatten().tolist()
    tokens = draft.embed_tokens.weight.grad.abs().sum(-1).nonzero().flatten().tolist()
    assert (rows, tokens) == reads


# (step, row, window): step-1 keys by row, own keys by step. The query is at position row + step - 1.
KEYS = [
    (1, 1, None, [0, 1], []),
    (1, 3, None, [0, 1, 2, 3], []),
    (2, 2, None, [0, 1, 2], [2]),
    (3, 1, None, [0, 1], [2, 3]),
    (1, 3, 2, [2, 3], []),  # query 3: positions 2 and 3
    (2, 2, 3, [1, 2], [2]),  # query 3: positions 1 to 3, the last its own
    (3, 1, 3, [1], [2, 3]),  # query 3: positions 1 to 3, the last two its own
    (3, 1, 2, [], [2, 3]),  # query 3: positions 2 and 3
    (3, 1, 1, [], [3]),  # itself
    (3, 1, 4, [0, 1], [2, 3]),  # query 3: positions 0 to 3, all there are
]


@pytest.mark.parametrize(("step", "row", "window", "by_row", "by_step"), KEYS)
def test_keys_that_each_step_sees(step, row, window, by_row, by_step):
    """Queries and keys are zero and values one-hot, so the attention's output is the share of each key that is seen."""
    query, zeros, one_hot = torch.zeros(1, 1, 10), torch.zeros(6, 1, 10), torch.eye(10)
    # Values 0 to 5 are those of the step-1 keys, 6 and 7 those of the row's own keys of steps 2 and 3.
    own = [(torch.zeros(1, 1, 10), one_hot[4 + i].expand(1, 1, 10)) for i in range(2, step + 1)]
    shares = attend(query, zeros, one_hot[:6, None], own, torch.tensor([row]), (0, 6), window)[0, 0]
    seen = [*by_row, *(4 + i for i in by_step)]
    assert shares.nonzero().flatten().tolist() == seen
    assert torch.allclose(shares[seen], torch.tensor(1 / len(seen)))


# (step, row): the row of the last state that the label is made of, and the token that a match is.
LABELS = {
    (1, 1): (2, 3),
    (1, 2): (3, 4),
    (1, 3): (4, 5),
    (2, 1): (3, 4),
    (2, 2): (4, 5),
    (3, 1): (4, 5),
}


def test_labels_of_each_step(toy, make_objective):
    """The target gives all its mass to the token whose id is the row's: the loss tells which row was asked."""
    draft = make_objective(draft_vocab_size=40).draft
    head = TargetHead(100 * torch.eye(40, 32), torch.ones(32), "rms", 1e-5)
    batch = Batch(
        toy.sample_ids, toy.offsets, toy.input_ids_T, toy.loss_mask_T, toy.positions_T, toy.aux_TAH,
        last_MH=torch.eye(32)[[1, 2, 3, 4]], last_rows_M=torch.tensor([1, 2, 3, 4]),
    )  # fmt: skip
    found = {}
    for step, loss_R, _ in Objective(draft, head, torch.arange(40)).judge(batch, 3):
        surprise_RV = -draft.lm_head(step.hidden_RH).log_softmax(-1)
        for row, loss, surprise_V in zip(step.rows_R.tolist(), loss_R, surprise_RV, strict=True):
            found[step.j, row] = int((surprise_V - loss).abs().argmin())
            assert torch.allclose(surprise_V[found[step.j, row]], loss, rtol=1e-4)
    assert found == {place: row for place, (row, _) in LABELS.items()}


@pytest.mark.parametrize("name", ["soft_ce", "lk_alpha"])
def test_a_match_is_the_replys_own_token(toy, make_objective, name):
    objective = make_objective(LossOptions(name), draft_vocab_size=40)
    draft = objective.draft
    hits = {}
    for step, _, match_R in objective.judge(toy, 3):
        best_R = draft.lm_head(step.hidden_RH).argmax(-1)
        for row, match, best in zip(step.rows_R.tolist(), match_R, best_R.tolist(), strict=True):
            hits[step.j, row] = (bool(match), best == LABELS[step.j, row][1])
    assert hits.keys() == LABELS.keys() and all(ours == by_hand for ours, by_hand in hits.values())


@pytest.mark.parametrize(
    ("masks", "runs"),
    [
        ([[0, 1, 1, 0, 1, 1, 1]], [2, 1, 0, 3, 2, 1, 0]),  # two replies of one document do not join
        ([[0, 1, 1], [1, 1, 0]], [2, 1, 0, 1, 0, 0]),  # nor do a reply's end and the next document's start
        ([[0, 0, 0]], [0, 0, 0]),
        ([[1]], [0]),
    ],
)
def test_runs_never_cross_a_reply_or_a_document(make_batch, masks, runs):
    assert reply_runs(make_batch(masks)).tolist() == runs
