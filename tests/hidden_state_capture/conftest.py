"""Samples for the writer, and a writer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.hidden_state_capture.writer import SampleStates, ShardWriter, WriterConfig

GIB = 1024**3


@pytest.fixture
def sample(random_states: Callable[..., torch.Tensor]) -> Callable[..., SampleStates]:
    """`sample("a", tokens=8)`: states [8, 3 + 1, 16] of a sample whose reply is its second half."""

    def make(name: str, tokens: int = 8, spans: Any = None, ready: Any = bool, **values: Any) -> SampleStates:
        states = random_states(tokens, sum(name.encode()), columns=4, hidden=16)
        return SampleStates(name, list(range(tokens)), spans or [[tokens // 2, tokens]], states, ready, **values)

    return make


@pytest.fixture
def writer(tmp_path: Path) -> ShardWriter:
    """Writes into one shard, and never waits."""
    return ShardWriter(tmp_path / "states", WriterConfig(GIB, GIB))
