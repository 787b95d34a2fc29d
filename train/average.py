"""A running average of the draft's weights (EMA): what is evaluated and exported, while training goes on beside it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Average:
    """Averages of the parameters that are trained, in float32 where they lie.

    Args:
        draft: on the device already.
        decay: what the average keeps of itself at each step.
        kept: averages to go on from; None: begin at the weights.
    """

    def __init__(self, draft: nn.Module, decay: float, kept: Mapping[str, Tensor] | None = None) -> None:
        self._decay = decay
        self._weights = {name: p for name, p in draft.named_parameters() if p.requires_grad}
        self._average = {
            name: (p if kept is None else kept[name]).detach().to(p.device, torch.float32, copy=True)
            for name, p in self._weights.items()
        }

    def update(self) -> None:
        """Take in the weights after an optimizer step."""
        for name, weight in self._weights.items():
            self._average[name].lerp_(weight.detach(), 1.0 - self._decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the averages where the weights are for the length of the block."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for name, weight in self._weights.items():
            weight.data, self._average[name] = self._average[name], weight.data
