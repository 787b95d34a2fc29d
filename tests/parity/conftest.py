"""What the parity tests share: small objectives, random packed batches."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from draftsmith.core.batch import Batch
from draftsmith.core.draft import DraftModel
from draftsmith.core.draft_shape import DraftShape
from draftsmith.core.losses import LossOptions
from draftsmith.core.objective import Objective
from draftsmith.core.target_weights import TargetHead
from draftsmith.core.unroll import unroll

HIDDEN, VOCAB, DRAFT_VOCAB, NUM_AUX = 32, 40, 16, 3


@pytest.fixture(scope="session")
def make_objective() -> Callable[..., Objective]:
    """`make_objective(loss=LossOptions("kl"), fc_norm=True)`: random weights, 16 of 40 tokens, a head over all 40."""

    def make(loss: LossOptions | None = None, seed: int = 0, **values: Any) -> Objective:
        sizes = {
            "hidden_size": HIDDEN, "num_aux": NUM_AUX, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
            "intermediate_size": 48, "vocab_size": VOCAB, "draft_vocab_size": DRAFT_VOCAB, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 1024, "rope": {"rope_type": "default", "rope_theta": 1e4},
        }  # fmt: skip
        shape = DraftShape(**{**sizes, **values})
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            draft = DraftModel(shape, torch.randn(VOCAB, HIDDEN))
            with torch.no_grad():
                for name, p in draft.named_parameters():
                    if name != "embed_tokens.weight":
                        p.copy_(torch.randn_like(p) * (0.3 if p.dim() > 1 else 0.1) + (p.dim() == 1))
            ids = torch.randperm(VOCAB)[: shape.draft_vocab_size].sort().values
            full, norm = torch.randn(VOCAB, HIDDEN), torch.rand(HIDDEN) + 0.5
        loss = loss or LossOptions()
        reduced = loss.needs_full_vocabulary and len(ids) < VOCAB
        return Objective(draft, TargetHead(full[ids], norm, "rms", 1e-5, full if reduced else None), ids, loss)

    return make


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., Batch]:
    """`make_batch([[0, 1, 1], [0, 1]])`: a document a mask, random tokens and states, the last states that are kept."""

    def make(masks: Sequence[Sequence[int]], seed: int = 1, num_aux: int = NUM_AUX) -> Batch:
        g = torch.Generator().manual_seed(seed)
        offsets = [0]
        for mask in masks:
            offsets.append(offsets[-1] + len(mask))
        size = offsets[-1]
        last_rows = [o + t for m, o in zip(masks, offsets[:-1], strict=True) for t in range(len(m) - 1) if m[t + 1]]
        return Batch(
            sample_ids=tuple(f"s{i}" for i in range(len(masks))),
            offsets=tuple(offsets),
            input_ids_T=torch.randint(VOCAB, (size,), generator=g),
            loss_mask_T=torch.tensor([bool(x) for m in masks for x in m], dtype=torch.bool),
            positions_T=torch.tensor([t for m in masks for t in range(len(m))], dtype=torch.int64),
            aux_TAH=torch.randn(size, num_aux, HIDDEN, generator=g),
            last_MH=torch.randn(len(last_rows), HIDDEN, generator=g),
            last_rows_M=torch.tensor(last_rows, dtype=torch.int64),
        )

    return make


@pytest.fixture(scope="session")
def guessed() -> Callable[[Objective, Batch, int], Batch]:
    """`guessed(objective, batch, steps)`: reply tokens that the draft's chains at every `steps`-th row guess right.

    Every seventh token stays as it is, so some of these chains break off; those at the rows between mostly do at once.
    """

    def write(objective: Objective, batch: Batch, steps: int) -> Batch:
        ids = objective.get_buffer("draft_ids")
        target_ids_V = ids.argsort()[-int((ids >= 0).sum()) :]
        batch = replace(batch, input_ids_T=batch.input_ids_T.clone())
        for at in range(2, batch.num_tokens):  # a chain sees the tokens before the one it guesses
            row, j = at - 2 - (at - 2) % steps, 1 + (at - 2) % steps
            with torch.no_grad():
                step = next(s for s in unroll(objective.draft, batch, steps) if s.j == j)
                mine = (step.rows_R == row).nonzero()[:, 0]
                if len(mine) and at % 7:
                    batch.input_ids_T[at] = target_ids_V[objective.draft.lm_head(step.hidden_RH[mine]).argmax()]
        return batch

    return write


@pytest.fixture(scope="session")
def cut() -> Callable[[Batch, int, int], Batch]:
    """`cut(batch, first, end)`: documents first .. end - 1 of a batch, as a batch of their own."""

    def take(batch: Batch, first: int, end: int) -> Batch:
        begin, stop = batch.offsets[first], batch.offsets[end]
        kept = (batch.last_rows_M >= begin) & (batch.last_rows_M < stop)
        return Batch(
            batch.sample_ids[first:end],
            tuple(o - begin for o in batch.offsets[first : end + 1]),
            batch.input_ids_T[begin:stop],
            batch.loss_mask_T[begin:stop],
            batch.positions_T[begin:stop],
            batch.aux_TAH[begin:stop],
            batch.last_MH[kept],
            batch.last_rows_M[kept] - begin,
        )

    return take
