"""Optimizer and learning-rate schedule, counted in optimizer steps."""

import math

import torch

from draftsmith.core.config_train import TrainConfig


def make_optimizer(config: TrainConfig, parameters: list[torch.nn.Parameter]) -> torch.optim.AdamW:
    """Fused AdamW over float32 weights."""
    betas = (config.betas[0], config.betas[1])
    return torch.optim.AdamW(
        parameters, lr=config.learning_rate, betas=betas, weight_decay=config.weight_decay, fused=True
    )


def learning_rate(config: TrainConfig, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (from 0): linear warm-up, then the schedule down to zero."""
    warmup = round(config.warmup_ratio * total_steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(1, total_steps - warmup)
    factor = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}[config.schedule]
    return config.learning_rate * factor
