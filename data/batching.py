"""Packs stored samples into batches; public: training and evaluation share it.

Which samples share a batch is decided by seed and epoch alone, so any step of any epoch can be made again.
"""

import itertools
import random
from typing import Any

import torch

from draftsmith.core.batch import Batch
from draftsmith.core.config import Config
from draftsmith.core.fp8_states import FP8
from draftsmith.core.samples import TrainSamples
from draftsmith.core.spool import SpoolPlan, sample_nbytes
from draftsmith.core.store import bytes_per_row
from draftsmith.hidden_state_capture.reader import HiddenStateStore


def plan_batches(lengths: list[int], tokens_per_batch: int, order: list[int] | None = None) -> list[list[int]]:
    """Fill batches in the given order up to a token budget.

    Args:
        lengths: tokens of every sample.
        tokens_per_batch: budget; a longer sample makes a batch of its own.
        order: positions into `lengths`; None: as they stand.

    Returns:
        Positions into `lengths`, every one exactly once.
    """
    batches: list[list[int]] = []
    room = 0
    for i in order if order is not None else range(len(lengths)):
        if not batches or lengths[i] > room:
            batches.append([])
            room = tokens_per_batch
        batches[-1].append(i)
        room -= lengths[i]
    return batches


def epoch_order(count: int, seed: int, epoch: int) -> list[int]:
    """A shuffle of 0..count-1 that only seed and epoch decide."""
    order = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def plan_steps(lengths: list[int], config: Config, world_size: int) -> list[list[list[int]]]:
    """The whole training, as every rank and the capture of a spool see it.

    Args:
        lengths: tokens of every training sample, in order of sample ids.
        config: `run.seed`, `train.epochs`, `train.tokens_per_batch` and `train.grad_accum_steps` decide.
        world_size: processes that train.

    Returns:
        plan[batch][rank]: positions into `lengths`; each exactly once an epoch. `train.grad_accum_steps` batches in a
        row make an optimizer step, the same one however they are spread over processes.
    """
    plan: list[list[list[int]]] = []
    for epoch in range(config.train.epochs):
        order = epoch_order(len(lengths), config.run.seed, epoch)
        batches = plan_batches(lengths, config.train.tokens_per_batch, order)
        batches += [[] for _ in range(-len(batches) % (world_size * config.train.grad_accum_steps))]
        shares = [rank_share(batches, rank, world_size) for rank in range(world_size)]
        plan += [list(step) for step in zip(*shares, strict=True)]
    return plan


def spool_plan(samples: TrainSamples, config: Config, states: dict[str, Any], world_size: int) -> SpoolPlan:
    """`plan_steps`, cut into the shards of a spool.

    Args:
        samples: of the run.
        config: of the run.
        states: manifest of `hidden_states/`, for the size of a state.
        world_size: processes that train.
    """
    size = bytes_per_row(states["storage"], len(states["layer_ids"]), states["target"]["hidden_size"])
    each = zip(samples.ids, samples.lengths, samples.labels, strict=True)
    nbytes = [sample_nbytes(*sample, *size) for sample in each]
    steps = plan_steps(samples.lengths, config, world_size)
    return SpoolPlan(steps, nbytes, config.capture, config.train.grad_accum_steps)


def rank_share(batches: list[list[int]], rank: int, world_size: int) -> list[list[int]]:
    """One rank's batches; every rank gets the same number, with empty ones at the end where they run out."""
    steps = -(-len(batches) // world_size)
    padded = batches + [[] for _ in range(steps * world_size - len(batches))]
    return padded[rank::world_size]


def collate(store: HiddenStateStore, numbers: list[int]) -> Batch:
    """Read samples and lay them one after another; an empty list gives a batch of no tokens.

    Every state is copied once, from the mapped shard to where the batch is: where there is a GPU into pinned memory,
    which torch's allocator keeps for the batches to come. States in fp8 stay in fp8 until `Batch.to`.
    """
    pin = torch.cuda.is_available()
    rows = [store.index[n] for n in numbers]
    offsets = list(itertools.accumulate((row["length"] for row in rows), initial=0))
    labels = list(itertools.accumulate((row["last_length"] for row in rows), initial=0))
    num_aux, hidden = len(store.manifest["layer_ids"]), store.manifest["target"]["hidden_size"]
    fp8 = store.manifest["storage"] == "fp8"

    def new(dtype: torch.dtype, *size: int) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, pin_memory=pin)

    t, m, states = offsets[-1], labels[-1], FP8 if fp8 else torch.bfloat16
    batch = Batch(
        sample_ids=tuple(row["sample_id"] for row in rows),
        offsets=tuple(offsets),
        input_ids_T=new(torch.int64, t),
        loss_mask_T=new(torch.bool, t),
        positions_T=new(torch.int64, t),
        aux_TAH=new(states, t, num_aux, hidden),
        last_MH=new(states, m, hidden),
        last_rows_M=new(torch.int64, m),
        aux_scales_TA=new(torch.float32, t, num_aux) if fp8 else None,
        last_scales_M=new(torch.float32, m) if fp8 else None,
    )
    for i, number in enumerate(numbers):
        _fill(batch, store.stored(number), slice(*offsets[i : i + 2]), slice(*labels[i : i + 2]))
    return batch


def _fill(batch: Batch, sample: dict[str, torch.Tensor], rows: slice, labels: slice) -> None:
    """Copy one sample to its place; ids, mask and rows change their dtype on the way."""
    batch.input_ids_T[rows] = sample["input_ids"]
    batch.loss_mask_T[rows] = sample["loss_mask"]
    torch.arange(rows.stop - rows.start, out=batch.positions_T[rows])
    batch.aux_TAH[rows] = sample["aux_states"]
    batch.last_MH[labels] = sample["last_states"]
    batch.last_rows_M[labels] = sample["last_rows"]
    batch.last_rows_M[labels] += rows.start
    if batch.aux_scales_TA is not None and batch.last_scales_M is not None:
        batch.aux_scales_TA[rows] = sample["aux_scales"]
        batch.last_scales_M[labels] = sample["last_scales"]
