"""Noise on the auxiliary states, in training only: the server's features differ from the stored ones too.

EAGLE adds uniform noise of a fixed width to its one state. Here several layers are fused whose sizes differ (on
SmolLM2-135M, an rms of 3 for the first and 80 for the others), so the noise is a share of each state's own rms.
"""

import random
from dataclasses import replace

import torch

from draftsmith.core.batch import Batch
from draftsmith.core.config_train import TrainConfig


def add_noise(batch: Batch, config: TrainConfig, seed: int, number: int) -> Batch:
    """The batch with noise on `aux_TAH`; the same for the same seed and number, so that a resumed run repeats it.

    Args:
        batch: on any device; not changed.
        config: `hidden_noise`, a share of the rms of every token's state in every layer, and its kind.
        seed: of the run.
        number: of the batch, counted over all steps and ranks.
    """
    if not config.hidden_noise:
        return batch
    aux_TAH = batch.aux_TAH
    drawn = random.Random(f"{seed}/{number}").getrandbits(63)
    generator = torch.Generator(aux_TAH.device).manual_seed(drawn)
    make = torch.randn if config.hidden_noise_kind == "gaussian" else torch.rand
    noise_TAH = make(aux_TAH.shape, generator=generator, device=aux_TAH.device)
    if config.hidden_noise_kind == "uniform":
        noise_TAH = 2.0 * noise_TAH - 1.0
    rms_TA1 = aux_TAH.float().pow(2).mean(-1, keepdim=True).sqrt()
    noisy_TAH = aux_TAH.float() + config.hidden_noise * rms_TA1 * noise_TAH
    return replace(batch, aux_TAH=noisy_TAH.to(aux_TAH.dtype))
