"""Our config as TorchSpec's YAML: sections and keys of its `Config` (torchspec/config), which refuses any other."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.core.config import Config
from draftsmith.core.draft_shape import DraftShape
from draftsmith.core.target import Target

_MIB, _GIB = 1024**2, 1024**3
_STATE_BYTES, _ID_BYTES = 2, 8  # bfloat16 states, int64 ids
_LOCAL_LEAST, _SEGMENT_LEAST = 512 * _MIB, _GIB
_BEYOND = 1  # vLLM takes no prompt that fills its context
# A template must be named, though rows of token ids use none: the one of the target's family.
_TEMPLATES = {
    "llama": "llama3",
    "minimax_m2": "minimax-m2",
    "deepseek_v3": "deepseek-v3",
    "gpt_oss": "gpt-oss",
    "phi3": "phi3",
}
_SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant", "wsd": "WSD"}
# Transformers' defaults, which TorchSpec has no own of.
_YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
_ENGINES = {"vllm": "vllm", "sglang": "sgl"}


@dataclass(frozen=True)
class Files:
    """Where what TorchSpec is given lies; `eval_rows` and `start` are None where there are none.

    Attributes:
        folder: `runs/NAME/torchspec`, absolute.
        eval_rows: held-out rows.
        start: folder of the checkpoint that training begins from.
        cache: its cache, of one set of rows and settings.
    """

    folder: Path
    cache: Path
    eval_rows: Path | None = None
    start: Path | None = None

    @property
    def rows(self) -> Path:
        """Training rows."""
        return self.folder / "train.jsonl"

    @property
    def draft(self) -> Path:
        """The draft's config.json."""
        return self.folder / "draft.json"

    @property
    def output(self) -> Path:
        """`output_dir`; `checkpoints/` is in it."""
        return self.folder / "output"


def torchspec_config(
    config: Config,
    target: Target,
    shape: DraftShape,
    layer_ids: list[int],
    keys: tuple[str, str, str],
    files: Files,
    steps: int | None = None,
) -> dict[str, Any]:
    """The tree of its YAML.

    Args:
        config: ours.
        target: resolved target; it lies under the same path on every host.
        shape: the draft's.
        layer_ids: auxiliary ones by vLLM's ids; TorchSpec names a layer by its own number, one less.
        keys: names of the target's embedding, final norm and lm_head.
        files: what was written for it.
        steps: optimizer steps in all; None: not known yet, which only train.warmup_steps needs.
    """
    theirs, vllm = config.train.torchspec, config.train.torchspec.backend == "vllm"
    tree: dict[str, Any] = {
        "model": {
            "target_model_path": str(target.local_path),
            "target_model_backend": theirs.backend,
            "draft_model_config": str(files.draft),
            "embedding_key": keys[0],
            "norm_key": keys[1],
            "lm_head_key": keys[2],
            "trust_remote_code": config.target.trust_remote_code,
        },
        "dataset": {
            "train_data_path": str(files.rows),
            "eval_data_path": str(files.eval_rows) if files.eval_rows else None,
            "eval_interval": config.train.eval_interval,
            "prompt_key": "conversations",
            "chat_template": theirs.chat_template or _TEMPLATES.get(target.hf_config.model_type, "qwen"),
            # Token ids and masks are ours; and a reduced vocabulary can be made of ids only.
            "defer_tokenization": False,
            "last_turn_loss_only": False,
            "min_loss_tokens": 0,
            "shuffle_dataset": True,
        },
        "training": _training(config, files, steps),
        "inference": _inference(config, layer_ids, vllm),
        "mooncake": mooncake(config, shape),
        "logging": _logging(config, files),
        "output_dir": str(files.output),
        "cache_dir": str(files.cache),
    }
    for name, value in theirs.overrides.items():
        here = tree
        *sections, key = name.split(".")
        for section in sections:
            here = here.setdefault(section, {})
        here[key] = value
    return tree


def context_length(config: Config) -> int:
    """Tokens that engines and buffers are made for."""
    return config.data.max_length + _BEYOND


def batch_samples(config: Config) -> int:
    """Samples of one optimizer step."""
    theirs = config.train.torchspec
    gpus = theirs.training_nodes * theirs.training_gpus_per_node
    return theirs.micro_batch_size * gpus * config.train.grad_accum_steps


def _training(config: Config, files: Files, steps: int | None) -> dict[str, Any]:
    ours, theirs = config.train, config.train.torchspec
    ratio = ours.warmup_ratio
    if ours.warmup_steps is not None and steps:
        ratio = min(1.0, (ours.warmup_steps + 0.5) / steps)  # it takes int(ratio * steps)
    return {
        "attention_backend": theirs.attention,
        "fsdp_strategy": theirs.fsdp.upper(),
        "gradient_checkpointing": theirs.gradient_checkpointing,
        "training_num_nodes": theirs.training_nodes,
        "training_num_gpus_per_node": theirs.training_gpus_per_node,
        "placement_strategy": theirs.placement,
        "micro_batch_size": theirs.micro_batch_size,
        "draft_accumulation_steps": ours.grad_accum_steps,
        "prefetch_depth": theirs.prefetch,
        "max_seq_length": context_length(config),
        "ttt_length": ours.ttt_steps,
        "num_epochs": ours.epochs,
        "learning_rate": ours.learning_rate,
        "weight_decay": ours.weight_decay,
        "max_grad_norm": ours.max_grad_norm,
        "warmup_ratio": ratio,
        "lr_decay_style": _SCHEDULES[ours.schedule],
        "lr_wsd_decay_ratio": ours.decay_ratio,
        "lr_wsd_decay_style": "linear",
        "seed": config.run.seed,
        "save_interval": ours.save_interval,
        "max_checkpoints": ours.keep_checkpoints,
        "load_path": str(files.start) if files.start else None,
        # From a first checkpoint of ours it takes the weights alone; from one of its own everything.
        "continual_training": files.start is not None,
    }


def _inference(config: Config, layer_ids: list[int], vllm: bool) -> dict[str, Any]:
    theirs, parallel = config.train.torchspec, config.target.tensor_parallel
    args = {**(config.target.engine_args if vllm else {}), **theirs.engine_args}
    share = args.pop("gpu_memory_utilization", None) if vllm else args.pop("mem_fraction_static", None)
    if vllm:
        args = {
            **({} if config.target.dtype == "auto" else {"dtype": config.target.dtype}),
            "max_num_batched_tokens": config.capture.max_batched_tokens,
            "enable_chunked_prefill": True,
            **args,
        }
    engine: dict[str, Any] = {"tp_size": parallel, "extra_args": args}
    if share is not None:
        engine["mem_fraction_static"] = share
    if not vllm:
        args.setdefault("context_length", context_length(config))
        args.setdefault("dtype", config.target.dtype)
    return {
        "inference_engine_type": _ENGINES[theirs.backend],
        "inference_num_gpus": theirs.inference_gpus,
        "inference_num_gpus_per_engine": parallel,
        "inference_num_gpus_per_node": theirs.inference_gpus_per_node,
        "inference_batch_size": theirs.inference_batch_size,
        "max_sample_pool_size": theirs.pool_samples,
        "aux_hidden_states_layers": [i - 1 for i in layer_ids],
        # vLLM gives the state before the final norm, SGLang the one after it.
        "last_hidden_states_prenorm": vllm,
        "store_last_hidden_states": True,
        theirs.backend: engine,
    }


def sample_bytes(config: Config, shape: DraftShape) -> int:
    """What the longest sample takes on its way: auxiliary states, last state, ids."""
    row = (shape.num_aux + 1) * shape.hidden_size * _STATE_BYTES + _ID_BYTES
    return context_length(config) * row


def mooncake(config: Config, shape: DraftShape) -> dict[str, Any]:
    """Its section, sized for samples of full length.

    Every engine lends a segment: its share of the pool, the samples that it is working on and those that it does next.
    A trainer holds the batches that it fetches ahead, the one at work and the one that arrives.
    """
    theirs, each = config.train.torchspec, sample_bytes(config, shape)
    engines = theirs.inference_gpus // config.target.tensor_parallel
    waiting = -(-theirs.pool_samples // engines) + 2 * theirs.inference_batch_size
    local = (theirs.prefetch + 2) * theirs.micro_batch_size * each
    return {
        "protocol": "tcp",
        "master_server_address": None,
        "metadata_server": None,
        "global_segment_size": _whole(max(waiting * each, _SEGMENT_LEAST), _GIB),
        "local_buffer_size": _whole(max(local, _LOCAL_LEAST), _MIB),
        "max_seq_len": context_length(config),
        "hidden_dim": shape.hidden_size,
        **theirs.mooncake,
    }


def _whole(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _logging(config: Config, files: Files) -> dict[str, Any]:
    wandb = "wandb" in config.train.trackers
    return {
        "use_wandb": wandb,
        "use_tensorboard": "tensorboard" in config.train.trackers,
        "wandb_project": f"draftsmith-{config.run.name}",
        "wandb_group": config.run.name,
        "wandb_dir": str(files.folder) if wandb else None,
    }


def draft_json(shape: DraftShape) -> dict[str, Any]:
    """The draft's config.json as `AutoDraftModelConfig.from_file` reads it, rope in the spelling of transformers 4.

    Under transformers 5 TorchSpec reads that spelling back as another; `entry.py` sets it right and proves it.
    """
    scaling = {k: v for k, v in shape.rope.items() if k != "rope_theta"}
    if scaling["rope_type"] == "yarn":
        scaling = {**_YARN, **scaling}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": shape.draft_vocab_size,
        "rms_norm_eps": shape.rms_norm_eps,
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_theta": shape.rope["rope_theta"],
        "rope_scaling": None if shape.rope["rope_type"] == "default" else scaling,
        "attention_bias": False,
        "pretraining_tp": 1,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
