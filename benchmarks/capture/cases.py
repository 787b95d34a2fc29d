"""What capture is measured on: targets, prompts, and the engines that are compared. See README.md."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.core.config import Config
from draftsmith.core.samples import Sample
from draftsmith.core.target import resolve_layer_ids, resolve_target
from draftsmith.hidden_state_capture.driver import Job
from draftsmith.hidden_state_capture.driver import engine_args as stage_args

ENGINES = ("bare", "stock", "ours")
# MiniMax-M2.5's config.json, its depth apart.
MINIMAX = {
    "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "hidden_size": 3072,
    "intermediate_size": 1536,
    "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "rotary_dim": 64, "rope_theta": 5000000,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000000, "partial_rotary_factor": 0.5},
    "vocab_size": 200064, "num_local_experts": 256, "num_experts_per_tok": 8, "scoring_func": "sigmoid",
    "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer", "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "max_position_embeddings": 196608, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "bos_token_id": 200019, "eos_token_id": 200020,
    "quantization_config": {
        "quant_method": "fp8", "fmt": "float8_e4m3fn", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
    },
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A target and the prompts that it prefills; the second half of each is the reply.

    Attributes:
        layers: of the target; None: a real checkpoint.
        gpus: that one engine takes.
        memory: share of GPU memory of one engine, free when it starts; where three fit side by side they take turns
            alive.
        tokens: of a round.
        length: tokens of a prompt.
        layer_ids: of the auxiliary states.
    """

    name: str
    layers: int | None
    gpus: int
    memory: float
    tokens: int
    length: int = 1500
    layer_ids: Any = "auto"


# Engines with less than this share of the memory are alive side by side.
TOGETHER = 0.33

CASES = {
    "smollm2": Case("smollm2", None, 1, 0.1, 3_000_000),
    "minimax4": Case("minimax4", 4, 1, 0.2, 1_200_000, layer_ids=[1, 2, 3]),
    "minimax62": Case("minimax62", 62, 2, 0.94, 1_000_000, layer_ids=[2, 31, 59]),
}


def make_job(case: Case, scratch: Path, folder: Path, settings: dict[str, Any], engine_args: dict[str, Any]) -> Job:
    """The job of `case` as the stage would make it, its shards going to `folder`."""
    target: dict[str, Any] = {"tensor_parallel": case.gpus, "engine_args": dict(engine_args)}
    if case.layers:
        path = scratch / case.name
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps({**MINIMAX, "num_hidden_layers": case.layers}))
        target["path"] = str(path)
        target["engine_args"] |= {"load_format": "dummy", "skip_tokenizer_init": True}
    if settings.pop("cpu"):
        target["dtype"] = "auto"
    else:
        if case.memory < TOGETHER:  # engines that start side by side cannot measure what is left for them
            target["engine_args"].setdefault("kv_cache_memory_bytes", 8 * 1024**3)
        target["engine_args"].setdefault("gpu_memory_utilization", case.memory)
    capture = {"layer_ids": case.layer_ids, **settings}
    config = Config.model_validate({"target": target, "capture": capture, "data": {"max_length": 2048}})
    resolved = resolve_target(config.target)
    ids = resolve_layer_ids(config.capture, resolved.num_layers)
    return Job(config, resolved, ids, scratch, folder, 0, 1, max_rejected=10**9)


def prompts(case: Case, job: Job, tokens: int) -> list[Sample]:
    """Random ids, the same in every round and for every engine."""
    draw = np.random.default_rng(0)
    count = max(1, tokens // case.length)
    span = [(case.length // 2, case.length)]
    ids = draw.integers(10, job.target.vocab_size - 200, size=(count, case.length))
    return [Sample(f"s{i:06d}", row.tolist(), span, "random", "stop", "train") for i, row in enumerate(ids)]


def engine_args(engine: str, job: Job) -> dict[str, Any]:
    """Arguments of `vllm.LLM`: the stage's own, and the same without the capture, or with vLLM's connector."""
    args = stage_args(job, 0)
    if engine == "ours":
        return args
    del args["worker_extension_cls"], args["kv_transfer_config"]
    if engine == "bare":
        del args["speculative_config"]
        return args
    extra = {"shared_storage_path": str(job.folder), "use_synchronization_lock": False}
    args["kv_transfer_config"] = {
        "kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer", "kv_connector_extra_config": extra,
    }  # fmt: skip
    return args


def stock_bytes(job: Job, samples: list[Sample]) -> int:
    """What vLLM's connector writes of states: every layer of every row."""
    states = len(job.layer_ids) + 1
    width = 4 if job.config.target.dtype == "auto" else 2
    return sum(len(s.input_ids) for s in samples) * states * job.target.hidden_size * width
