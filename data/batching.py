"""Packs stored samples into batches; public: training and evaluation share it.

Which samples share a batch is decided by seed and epoch alone, so any step of any epoch can be made again.
"""

import random
from collections.abc import Callable
from typing import Any

import torch

from draftsmith.core.batch import Batch
from draftsmith.core.config import Config
from draftsmith.core.samples import TrainSamples
from draftsmith.core.spool import SpoolPlan, sample_nbytes
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
    size = (len(states["layer_ids"]), states["target"]["hidden_size"])
    each = zip(samples.ids, samples.lengths, samples.labels, strict=True)
    nbytes = [sample_nbytes(*sample, *size) for sample in each]
    return SpoolPlan(plan_steps(samples.lengths, config, world_size), nbytes, config.capture)


def rank_share(batches: list[list[int]], rank: int, world_size: int) -> list[list[int]]:
    """One rank's batches; every rank gets the same number, with empty ones at the end where they run out."""
    steps = -(-len(batches) // world_size)
    padded = batches + [[] for _ in range(steps * world_size - len(batches))]
    return padded[rank::world_size]


def collate(store: HiddenStateStore, numbers: list[int]) -> Batch:
    """Read samples and lay them one after another; an empty list gives a batch of no tokens."""
    samples = [store[n] for n in numbers]
    offsets = [0]
    for sample in samples:
        offsets.append(offsets[-1] + len(sample.input_ids_T))
    target = store.manifest["target"]

    def join(get: Callable[[int], torch.Tensor], *empty: int) -> torch.Tensor:
        return torch.cat([get(i) for i in range(len(samples))]) if samples else torch.empty(empty)

    hidden, num_aux = target["hidden_size"], len(store.manifest["layer_ids"])
    return Batch(
        sample_ids=tuple(s.sample_id for s in samples),
        offsets=tuple(offsets),
        input_ids_T=join(lambda i: samples[i].input_ids_T, 0).long(),
        loss_mask_T=join(lambda i: samples[i].loss_mask_T, 0).bool(),
        positions_T=join(lambda i: torch.arange(len(samples[i].input_ids_T)), 0).long(),
        aux_TAH=join(lambda i: samples[i].aux_states_TAH, 0, num_aux, hidden),
        last_MH=join(lambda i: samples[i].last_states_MH, 0, hidden),
        last_rows_M=join(lambda i: samples[i].last_rows_M + offsets[i], 0).long(),
    )
