"""The section `train.torchspec` of the config: what TorchSpec needs beyond what every engine does."""

from typing import Any, Literal

from pydantic import Field, field_validator

from draftsmith.core.section import PositiveInt, Section

# What TorchSpec reads of its section `mooncake`, which is the one section that it does not check.
MOONCAKE_KEYS = {
    "async_put_pool_size",
    "device_name",
    "enable_gpu_direct",
    "enable_hard_pin",
    "get_batch_size",
    "global_segment_size",
    "gpu_buffer_size",
    "hidden_dim",
    "host_buffer_size",
    "kv_lease_ttl_s",
    "local_buffer_size",
    "local_hostname",
    "master_server_address",
    "max_seq_len",
    "metadata_port",
    "metadata_server",
    "protocol",
}
# Its `vllm.LLM` arguments, which it drops with a warning where they are given.
_SET_BY_TORCHSPEC = {
    "model",
    "tensor_parallel_size",
    "nnodes",
    "node_rank",
    "master_addr",
    "master_port",
    "speculative_config",
    "kv_transfer_config",
}


class TorchSpecConfig(Section):
    """TorchSpec: engines that prefill and GPUs that train at the same time, on one host or on many (docs/torchspec.md).

    A sample is one row of its batches: an optimizer step takes micro_batch_size * training GPUs *
    train.grad_accum_steps samples, whatever their lengths.
    """

    python: str | None = Field(
        None, description="Python that TorchSpec is installed for; null: the one that runs draftsmith."
    )
    backend: Literal["vllm", "sglang"] = Field("vllm", description="Engine that prefills the samples.")
    inference_gpus: PositiveInt = Field(
        1, description="GPUs that prefill, all hosts together: a multiple of target.tensor_parallel."
    )
    inference_gpus_per_node: PositiveInt = Field(8, description="GPUs of one inference host.")
    training_nodes: PositiveInt = Field(1, description="Hosts that train.")
    training_gpus_per_node: PositiveInt = Field(1, description="GPUs of each that train.")
    placement: Literal["training_first", "inference_first"] = Field(
        "training_first", description="Who has the GPUs of the first hosts."
    )
    ray_address: str | None = Field(
        None,
        description="Address of the Ray cluster; local: a new one on this host; null: RAY_ADDRESS, one that runs on "
        "this host, or a new one.",
    )
    micro_batch_size: PositiveInt = Field(1, description="Samples of one forward pass on one training GPU.")
    inference_batch_size: PositiveInt = Field(8, description="Samples that an engine is given at once.")
    pool_samples: PositiveInt = Field(
        64, description="Samples whose states may wait for training; Mooncake's memory is sized by it."
    )
    prefetch: int = Field(2, ge=0, description="Batches that a training GPU fetches ahead.")
    eval_samples: int = Field(
        128, ge=0, description="Held-out samples of TorchSpec's own evaluation, whose states every trainer holds in "
        "host memory; 0: none. `draftsmith eval` uses them all, whatever this says."
    )  # fmt: skip
    attention: Literal["flex_attention", "sdpa", "fa", "fa4"] = Field(
        "flex_attention", description="Attention of the draft; sdpa holds all scores at once, for short samples."
    )
    gradient_checkpointing: bool = Field(False, description="Compute activations twice instead of keeping them.")
    fsdp: Literal["replicate", "full_shard"] = Field(
        "replicate", description="replicate: every training GPU holds the draft; full_shard: a part of it."
    )
    chat_template: str | None = Field(
        None, description="A chat template that TorchSpec knows by name; it must name one, and with token ids as rows "
        "uses none. null: by the target's kind."
    )  # fmt: skip
    engine_args: dict[str, Any] = Field(
        default_factory=dict, description="More arguments of the prefill engine, after target.engine_args (vLLM only)."
    )
    mooncake: dict[str, Any] = Field(
        default_factory=dict,
        description="Over what is computed of Mooncake's section, e.g. {protocol: rdma, device_name: mlx5_0}.",
    )
    overrides: dict[str, Any] = Field(
        default_factory=dict,
        description="Any other key of TorchSpec, e.g. {training.distributed_timeout_minutes: 30}.",
    )
    stall_seconds: float = Field(
        1800.0, gt=0.0, description="Seconds without a step, or before the first one without a log line, that end it."
    )
    stop_seconds: float = Field(
        60.0, gt=0.0, description="Seconds that TorchSpec has to end itself before its processes are killed."
    )

    @field_validator("mooncake")
    @classmethod
    def _known_to_mooncake(cls, given: dict[str, Any]) -> dict[str, Any]:
        if unknown := sorted(given.keys() - MOONCAKE_KEYS):
            raise ValueError(f"TorchSpec reads no {', '.join(unknown)}; it reads {', '.join(sorted(MOONCAKE_KEYS))}")
        return given

    @field_validator("engine_args")
    @classmethod
    def _not_dropped(cls, args: dict[str, Any]) -> dict[str, Any]:
        if dropped := sorted(args.keys() & _SET_BY_TORCHSPEC):
            raise ValueError(f"TorchSpec sets {', '.join(dropped)} itself")
        return args

    @field_validator("overrides")
    @classmethod
    def _dotted(cls, given: dict[str, Any]) -> dict[str, Any]:
        if plain := [key for key in given if "." not in key]:
            raise ValueError(f"write {', '.join(plain)} as section.key, e.g. training.prefetch_depth")
        return given
