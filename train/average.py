"""A running average of the draft's weights (EMA): what is evaluated and exported, while training goes on beside it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from draftsmith.train.engine import Engine


class Average:
    """Averages of the parameters that are trained, in float32, of what this process holds of each.

    Args:
        engine: holds the draft.
        decay: what the average keeps of itself at each step.
        kept: whole averages to go on from; None: begin at the weights.
    """

    def __init__(self, engine: Engine, decay: float, kept: Mapping[str, Tensor] | None = None) -> None:
        self._engine, self._decay = engine, decay
        self._average = {
            name: (engine.local(p) if kept is None else engine.local_of(p, kept[name])).to(torch.float32, copy=True)
            for name, p in engine.trained()
        }

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights after an optimizer step."""
        for name, weight in self._engine.trained():
            self._average[name].lerp_(self._engine.local(weight), 1.0 - self._decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the averages where the weights are for the length of the block."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, weight in self._engine.trained():
            own = self._engine.local(weight)
            held = own.clone()
            own.copy_(self._average[name])
            self._average[name] = held
