"""Optimizer and learning-rate schedule, counted in optimizer steps."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from draftsmith.core.config_train import TrainConfig

# Rows of these are tokens: what is orthogonal in them means nothing.
_TOKEN_TABLES = ("lm_head.weight", "embed_tokens.weight")


class MuonWithAdamW(torch.optim.Optimizer):
    """Two optimizers that are stepped, saved and loaded as one."""

    def __init__(self, muon: torch.optim.Optimizer, adamw: torch.optim.Optimizer) -> None:
        self.parts, self.defaults = (muon, adamw), adamw.defaults

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Of both."""
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        """Of both."""
        return {parameter: kept for part in self.parts for parameter, kept in part.state.items()}

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step of each."""
        for part in self.parts:
            part.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients."""
        for part in self.parts:
            part.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Of both, apart."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put both where they were."""
        for part, kept in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(kept)


def make_optimizer(config: TrainConfig, named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Fused AdamW over float32 weights, and Muon for the matrices where the config says so.

    Args:
        config: the optimizer and its settings.
        named: parameters that are trained, by their names in the draft.
    """
    trained = list(named)
    matrices = [p for n, p in trained if config.optimizer == "muon" and p.ndim == 2 and n not in _TOKEN_TABLES]
    chosen = {id(p) for p in matrices}
    adamw = torch.optim.AdamW(
        [p for _, p in trained if id(p) not in chosen],
        lr=config.learning_rate,
        betas=(config.betas[0], config.betas[1]),
        weight_decay=config.weight_decay,
        fused=True,
    )
    if not matrices:
        return adamw
    muon = torch.optim.Muon(
        matrices,
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        momentum=config.muon_momentum,
        adjust_lr_fn="match_rms_adamw",  # an update as large as AdamW's
    )
    return MuonWithAdamW(muon, adamw)


def learning_rate(config: TrainConfig, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (from 0): linear warm-up, then the schedule, down to zero at the end."""
    warmup = round(config.warmup_ratio * total_steps) if config.warmup_steps is None else config.warmup_steps
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(1, total_steps - warmup)
    falls = max(1, round(config.decay_ratio * total_steps))
    factor = {
        "constant": 1.0,
        "linear": 1.0 - done,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * done)),
        "wsd": min(1.0, (total_steps - step) / falls),
    }[config.schedule]
    return config.learning_rate * factor
