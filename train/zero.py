"""DeepSpeed's ZeRO-1, 2 and 3, with weights in float32 and torch's own optimizer.

ZeRO averages gradients, clips them, skips a step whose norm is not finite, and steps. The loop owns the rest: which
batch is a step's last, the learning rate, what the loss is a mean over. Checkpoints are not DeepSpeed's but ours, of
whole tensors, so that another number of processes, stage or engine goes on from them.
"""

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from torch import Tensor

from draftsmith.core.config import Config
from draftsmith.train.engine import Engine, MakeOptimizer, ensure_group, of_parameter
from draftsmith.train.step import TrainingStep
from draftsmith.train.zero_config import deepspeed_config, load_deepspeed, read_deepspeed_config


class ZeroEngine(Engine):
    """The optimizer's state (stage 1), gradients too (2), weights too (3) shared out over the processes."""

    def __init__(self, config: Config, accelerator: Accelerator) -> None:
        """Read DeepSpeed's config, before anything is written.

        Raises:
            UserError: DeepSpeed is not installed, or its config asks for what is not its business.
        """
        super().__init__(config, accelerator)
        self._deepspeed = load_deepspeed(accelerator.device.type)
        self._given = read_deepspeed_config(config.train.deepspeed_config)
        self.stage: int = self._given["zero_optimization"]["stage"]

    def prepare(self, step: TrainingStep, make_optimizer: MakeOptimizer) -> None:
        """Hand draft and optimizer to DeepSpeed."""
        deepspeed = self._deepspeed
        os.environ.setdefault("LOCAL_RANK", "0")  # a process alone has none, and DeepSpeed asks for it at every pass
        ensure_group(self.accelerator)
        self.step = step
        self._torch = make_optimizer(self.trained())
        self.module, self.optimizer, *_ = deepspeed.initialize(
            model=step,
            optimizer=self._torch,
            config=deepspeed_config(self._given, self.config.train.max_grad_norm),
            dist_init_required=False,
        )
        if self.stage == 3:
            # The passes read the draft's parameters directly, not through its modules: all are gathered before a pass.
            for parameter in self.draft.parameters():
                deepspeed.zero.register_external_parameter(step, parameter)

    @contextmanager
    def batch(self, last: bool) -> Iterator[None]:
        """Gradients of all batches of a step are added up, wherever the stage keeps them."""
        self.module.set_gradient_accumulation_boundary(is_boundary=last)  # type: ignore[operator]
        yield

    def backward(self, loss: Tensor) -> None:
        """Add a batch's gradient, averaged over the ranks."""
        self.module.backward(loss)  # type: ignore[operator]

    def take_step(self, max_norm: float) -> float:
        """Clip, step unless a gradient is not finite, and drop the gradients; their norm before it was clipped."""
        self.module.step()  # type: ignore[operator]
        norm = float(self.module.get_global_grad_norm())  # type: ignore[operator]
        return norm if self.module.was_step_applied() else math.inf  # type: ignore[operator]

    def weights(self) -> dict[str, Tensor]:
        """Every parameter, whole, in float32 on the CPU, a copy; all ranks ask, the main process gets them."""
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters(list(self.draft.parameters()), enabled=self.stage == 3):
            return super().weights()

    def optimizer_state(self) -> dict[str, Tensor]:
        """`parameter/kind` -> state, whole, on the CPU, a copy; all ranks ask, the main process gets them."""
        from deepspeed.utils import safe_get_full_optimizer_state

        states = [state for state in self._torch.state.values() if state]
        if not states:  # no step has been taken
            return {}
        kinds = [kind for kind, t in states[0].items() if t.dim()]
        copies: dict[str, Tensor] = {}
        for name, parameter in self.trained():
            for kind in kinds:
                copies |= self._copies({f"{name}/{kind}": safe_get_full_optimizer_state(parameter, kind)})
            copies |= self._copies({f"{name}/{kind}": t for kind, t in states[0].items() if not t.dim()})
        return copies

    def load_optimizer(self, kept: Mapping[str, Tensor]) -> None:
        """Go on from what `optimizer_state` gave, whichever engine it was."""
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        if not kept:
            return
        one = of_parameter(kept, self.trained()[0][0])
        # ZeRO makes the state at its first step; here it has to be there before, for every flat part of the weights.
        for flat in self._flat_parts():
            self._torch.state[flat] = {
                kind: torch.zeros_like(flat) if t.dim() else t.to(flat.device, copy=True) for kind, t in one.items()
            }
        if self.stage < 3:
            self.optimizer._lazy_init_hp_params_optimizer_state()
        for name, parameter in self.trained():
            for kind, tensor in of_parameter(kept, name).items():
                if tensor.dim() and self.stage == 3:
                    safe_set_local_optimizer_state(parameter, self.share(parameter, tensor), kind)
                elif tensor.dim():
                    safe_set_full_optimizer_state(parameter, tensor, kind)

    def _flat_parts(self) -> list[Tensor]:
        zero = self.optimizer
        return list(zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups)

    def local(self, parameter: Tensor) -> Tensor:
        """This process's part of a parameter; writing into it changes the parameter."""
        return parameter.ds_tensor.detach() if self.stage == 3 else parameter.detach()  # type: ignore[attr-defined]

    def share(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """A whole tensor of a parameter's shape, as this process holds that parameter."""
        if self.stage < 3:
            return whole.to(parameter.device)
        held = parameter.ds_tensor  # type: ignore[attr-defined]
        begin = held.ds_numel * self.accelerator.process_index
        own = whole.flatten()[begin : begin + held.ds_numel].to(held.device)
        return torch.nn.functional.pad(own, (0, held.ds_numel - own.numel()))
