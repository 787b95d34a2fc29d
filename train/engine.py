"""The draft on the processes that train it. Here every process holds all of it: one process, or several by DDP.

`sharded.py` (FSDP2) and `zero.py` (DeepSpeed) share it out. The loop is one for all: it asks for a loss, a backward
pass, an optimizer step; and what is saved is the same whole tensors under the same names, whichever engine held them.
"""

import atexit
import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn

from draftsmith.core.config import Config
from draftsmith.core.engine import has_bfloat16
from draftsmith.core.run import RunFolder
from draftsmith.train.step import TrainingStep

_GLOO_REST = 0.1  # seconds

MakeOptimizer = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


class Engine:
    """Whole copies, their gradients averaged.

    Attributes:
        accelerator: processes and device.
        half: whether matrix products are in bfloat16.
        module: what is called for a loss; `step` is the training step inside.
        optimizer: its groups' learning rate is the loop's to set.
    """

    module: nn.Module
    step: TrainingStep
    optimizer: Any

    def __init__(self, config: Config, accelerator: Accelerator) -> None:
        self.config, self.accelerator = config, accelerator
        wanted = config.train.precision
        self.half = wanted == "bfloat16" or (wanted == "auto" and has_bfloat16())

    def prepare(self, step: TrainingStep, make_optimizer: MakeOptimizer) -> None:
        """Put the draft on the device, beside its optimizer."""
        self.step = step
        self._torch = make_optimizer(self.trained())
        self.module, self.optimizer = self.accelerator.prepare(step, self._torch)

    @property
    def draft(self) -> nn.Module:
        """The draft, its parameters as this process holds them."""
        return self.step.objective.draft

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters that are trained, by their names in the draft."""
        return [(name, p) for name, p in self.draft.named_parameters() if p.requires_grad]

    # ---- one optimizer step ------------------------------------------------------------------------------------------

    def batch(self, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of a batch: only the last one's gradients of a step meet the other ranks'."""
        context: AbstractContextManager[Any] = nullcontext() if last else self.accelerator.no_sync(self.module)
        return context

    def autocast(self) -> torch.autocast:
        """Around a pass: the precision of its products."""
        return torch.autocast(self.accelerator.device.type, torch.bfloat16, enabled=self.half)

    def backward(self, loss: Tensor) -> None:
        """Add a batch's gradient, averaged over the ranks."""
        self.accelerator.backward(loss)

    def take_step(self, max_norm: float) -> float:
        """Clip, step unless a gradient is not finite, and drop the gradients; their norm before it was clipped."""
        norm = self.clip(max_norm)
        if math.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def clip(self, max_norm: float) -> float:
        """Scale the gradients down to a norm of `max_norm`; their norm before."""
        return float(self.accelerator.clip_grad_norm_(self.draft.parameters(), max_norm))

    # ---- the draft, whole --------------------------------------------------------------------------------------------

    def evaluating(self) -> AbstractContextManager[Any]:
        """Around passes that no backward pass follows."""
        return torch.no_grad()

    def weights(self) -> dict[str, Tensor]:
        """Every parameter, whole, in float32 on the CPU, a copy; all ranks ask, the main process gets them."""
        return self._copies(self.draft.state_dict())

    def optimizer_state(self) -> dict[str, Tensor]:
        """`parameter/kind` -> state, whole, on the CPU, a copy; all ranks ask, the main process gets them."""
        state = self._torch.state
        named = {f"{name}/{kind}": t for name, p in self.trained() for kind, t in state.get(p, {}).items()}
        return self._copies(named)

    def load_optimizer(self, kept: Mapping[str, Tensor]) -> None:
        """Go on from what `optimizer_state` gave, whichever engine it was."""
        names = {id(p): name for name, p in self.trained()}
        for part in getattr(self._torch, "parts", [self._torch]):
            saved = part.state_dict()
            held = [p for group in part.param_groups for p in group["params"]]
            states = (of_parameter(kept, names[id(p)]) for p in held)
            saved["state"] = {
                i: {kind: self.share(p, t) if t.shape == p.shape else t for kind, t in state.items()}
                for i, (p, state) in enumerate(zip(held, states, strict=True))
                if state
            }
            part.load_state_dict(saved)

    # ---- what this process holds of a parameter ----------------------------------------------------------------------

    def local(self, parameter: Tensor) -> Tensor:
        """This process's part of a parameter; writing into it changes the parameter."""
        return parameter.detach()

    def share(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """A whole tensor of a parameter's shape, as this process holds that parameter."""
        return whole.to(parameter.device)

    def local_of(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """This process's part of a whole tensor of a parameter's shape."""
        return self.share(parameter, whole)

    def whole_of(self, tensor: Tensor) -> Tensor:
        """Of a parameter or its state; all ranks ask."""
        return tensor

    def _copies(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        copies = {}
        for name, tensor in named.items():
            whole = self.whole_of(tensor.detach())
            if self.accelerator.is_main_process:  # a copy on a CPU too, where training writes on
                copies[name] = whole.to("cpu", torch.float32, copy=True)
        return copies


def of_parameter(kept: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """A parameter's state by kind."""
    return {key.rpartition("/")[2]: t for key, t in kept.items() if key.rpartition("/")[0] == name}


def make_accelerator(run: RunFolder) -> Accelerator:
    """Processes and device, as the launcher's environment says."""
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        # The frozen embedding and heads are buffers: alike on every rank, and far too large to send at every step.
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],
        mixed_precision="no",  # weights are float32; the products' precision is `Engine.autocast`
        project_dir=str(run.root),
    )
    atexit.register(_leave)  # not sooner: another training may follow in this process
    return accelerator


def _leave() -> None:
    if torch.distributed.is_initialized():
        backend = torch.distributed.get_backend()
        torch.distributed.destroy_process_group()
        if backend == "gloo":
            # Its threads give back the last tensors a moment later; one that does so while Python ends aborts the
            # process (seen in a fifth of the exits that kept a reference to a group, as DDP and DeepSpeed do).
            time.sleep(_GLOO_REST)


def open_engine(config: Config, accelerator: Accelerator) -> Engine:
    """The engine that `train.engine` and `train.shard` ask for."""
    if config.train.engine == "deepspeed":
        from draftsmith.train.zero import ZeroEngine

        return ZeroEngine(config, accelerator)
    if config.train.shard == "fsdp2":
        from draftsmith.train.sharded import ShardedEngine

        return ShardedEngine(config, accelerator)
    return Engine(config, accelerator)


def ensure_group(accelerator: Accelerator) -> None:
    """A process group where there is none: a process alone makes its own."""
    if not torch.distributed.is_initialized():
        backend = "nccl" if accelerator.device.type == "cuda" else "gloo"
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
