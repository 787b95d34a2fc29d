"""FSDP2: weights, gradients and optimizer state shared out over the processes, in float32.

The passes read the draft's parameters directly, not through its modules' forwards, so the whole training step is one
unit: its parameters are gathered before it and let go of after its backward pass.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from draftsmith.train.engine import Engine, MakeOptimizer, ensure_group
from draftsmith.train.step import TrainingStep


class ShardedEngine(Engine):
    """Every process holds a share of each parameter."""

    def prepare(self, step: TrainingStep, make_optimizer: MakeOptimizer) -> None:
        """Share the draft out, and make an optimizer of the shares."""
        ensure_group(self.accelerator)
        device = self.accelerator.device
        mesh = init_device_mesh(device.type, (self.accelerator.num_processes,))
        fully_shard(step.to(device), mesh=mesh)
        self.step = self.module = step
        self.optimizer = self._torch = make_optimizer(self.trained())

    @property
    def _fsdp(self) -> FSDPModule:
        return cast(FSDPModule, self.module)

    @contextmanager
    def batch(self, last: bool) -> Iterator[None]:
        """Gradients stay whole and unshared up to the last batch of a step."""
        self._fsdp.set_requires_gradient_sync(last)
        yield

    def backward(self, loss: Tensor) -> None:
        """Add a batch's gradient, averaged over the ranks."""
        loss.backward()  # type: ignore[no-untyped-call]

    def clip(self, max_norm: float) -> float:
        """Scale the gradients down to a norm of `max_norm`; their norm before."""
        norm: Any = torch.nn.utils.clip_grad_norm_(self.draft.parameters(), max_norm)
        return float(self.whole_of(norm))

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Around passes that no backward pass follows, which would let go of the gathered parameters."""
        with torch.no_grad():
            yield
        self._fsdp.reshard()

    def local(self, parameter: Tensor) -> Tensor:
        """This process's share, without what it is padded with."""
        return cast(DTensor, parameter.detach()).to_local()

    def share(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """The whole tensor, shared out like the parameter."""
        held = cast(DTensor, parameter)
        return distribute_tensor(whole.to(held.device), held.device_mesh, held.placements, src_data_rank=None)

    def local_of(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """This process's part of a whole tensor of a parameter's shape."""
        return cast(DTensor, self.share(parameter, whole)).to_local()

    def whole_of(self, tensor: Tensor) -> Tensor:
        """Gathered from all ranks, where it is shared out."""
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
