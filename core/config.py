"""The one config of a run: strict, documented, free of torch and vLLM.

Every number that a stage uses is a field here. Field descriptions become `configs/schema.json`, which editors use
for completion. Loading (YAML, overrides, error messages) is in `config_io.py`.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from draftsmith.core.config_eval import EvalConfig
from draftsmith.core.config_replies import SamplingConfig, ServerConfig
from draftsmith.core.config_train import DraftConfig, TrainConfig
from draftsmith.core.section import PositiveInt, Section, Share

Role = Literal["system", "developer", "user", "assistant", "tool", "ignore"]
# OpenAI's names and those of ShareGPT exports. Names of models are not among them: who they are, only the user knows.
DEFAULT_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}

# Engine arguments that correctness rests on, and what to set instead.
_SET_BY_US = {
    "model": "target.path",
    "tokenizer": "target.path",
    "revision": "target.revision",
    "dtype": "target.dtype",
    "trust_remote_code": "target.trust_remote_code",
    "tensor_parallel_size": "target.tensor_parallel",
    "max_model_len": "data.max_length",
    "enable_prefix_caching": "off, or states and acceptance would be wrong",
    "speculative_config": "by capture and eval",
    "kv_transfer_config": "by capture",
    "worker_extension_cls": "by capture",
    "disable_log_stats": "by eval",
}


# What the server sets itself when it renders a request.
_NOT_FOR_TEMPLATES = {
    "chat_template",
    "conversation",
    "messages",
    "tokenize",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "return_dict",
    "return_tensors",
    "return_assistant_tokens_mask",
}


class RunConfig(Section):
    """Where a run lives."""

    name: str = Field("quickstart", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Folder name of the run.")
    dir: str = Field("runs", description="Folder that holds the runs; relative to the working directory.")
    seed: int = Field(0, ge=0, le=2**32 - 1, description="Seed of the split, the data order and the initial weights.")


class TargetConfig(Section):
    """The large model that the draft will speculate for."""

    path: str = Field(
        "smollm2-135m-instruct",
        min_length=1,
        description="Local folder, hub id, or the embedded name `smollm2-135m-instruct`.",
    )
    revision: str | None = Field(None, description="Hub revision (commit, tag or branch); null: the default branch.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "bfloat16",
        description="Dtype the engine runs in. auto: bfloat16, and float32 on a CPU or a GPU (before sm_80) that "
        "only emulates bfloat16 (15 times slower on a CPU).",
    )
    chat_template: str | None = Field(None, description="Path of a Jinja chat template; null: the tokenizer's own.")
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="Variables for the chat template, as clients send them or the server has them by default "
        "(`--default-chat-template-kwargs`), e.g. {enable_thinking: false}.",
    )
    reasoning_parser: str | None = Field(
        None,
        description="The server's `--reasoning-parser`, e.g. minimax_m2: earlier replies come back with their "
        "reasoning apart. null: reasoning comes back inside the text, as from a server without one.",
    )
    tensor_parallel: PositiveInt = Field(1, description="GPUs that one engine is spread over.")
    trust_remote_code: bool = Field(False, description="Allow code from the target's repository to run.")
    engine_args: dict[str, Any] = Field(
        default_factory=dict,
        description="Passed to `vllm.LLM` as they are, e.g. {gpu_memory_utilization: 0.9}.",
    )

    @field_validator("engine_args")
    @classmethod
    def _leaves_ours_alone(cls, args: dict[str, Any]) -> dict[str, Any]:
        if taken := [f"{key} ({_SET_BY_US[key]})" for key in args if key in _SET_BY_US]:
            raise ValueError(f"set by draftsmith itself: {', '.join(taken)}")
        return args

    @field_validator("chat_template_kwargs")
    @classmethod
    def _only_the_templates_own(cls, kwargs: dict[str, Any]) -> dict[str, Any]:
        if taken := [key for key in kwargs if key in _NOT_FOR_TEMPLATES]:
            raise ValueError(f"decided by the server for every request: {', '.join(taken)}")
        return kwargs


class SourceConfig(Section):
    """One source of conversations."""

    path: str = Field(
        "demo-prompts",
        min_length=1,
        description="JSONL, JSON or Parquet file, a folder of them, a Hugging Face data set (hf:owner/name), or the "
        "embedded set `demo-prompts` (576 chat prompts).",
    )
    limit: PositiveInt | None = Field(None, description="Use at most this many conversations of the source.")
    weight: float = Field(1.0, gt=0.0, le=1.0, description="Share of the source's conversations to use, drawn by seed.")
    author: str | None = Field(None, description="Who wrote the source's replies, where its rows do not say so.")
    split: str = Field("train", description="Split of a Hugging Face data set.")
    subset: str | None = Field(None, description="Its configuration; null: its only or default one.")
    revision: str | None = Field(None, description="Its commit, tag or branch on the hub; null: the newest.")
    streaming: bool = Field(False, description="Read it over the network row by row instead of downloading it first.")


class DedupConfig(Section):
    """Which conversations count as repeated; the first one is kept."""

    exact: bool = Field(True, description="Drop conversations that are equal up to white space.")
    near: bool = Field(
        True,
        description="Drop conversations whose user turns are nearly equal (MinHash), under the same system text and "
        "tools. Set it to false where the sources hold several replies to one prompt, and all are wanted; those of "
        "data.sampling.replies are not compared.",
    )
    threshold: float = Field(0.8, gt=0.0, le=1.0, description="Jaccard similarity that counts as nearly equal.")
    ngram: PositiveInt = Field(3, description="Words in a row that are compared as one.")
    permutations: int = Field(128, ge=16, le=1024, description="MinHash permutations: more is slower and finer.")


class ContaminationConfig(Section):
    """Prompts of evaluation sets must not be trained on."""

    sets: list[str] = Field(
        default_factory=list, description="Sources that must not be trained on, beside `eval.sets`."
    )
    ngram: PositiveInt = Field(
        13, description="Words in a row that must not be shared; shorter evaluation prompts count from half of it."
    )
    action: Literal["remove", "warn"] = Field(
        "remove", description="remove: such conversations are dropped and listed; warn: they are listed and used."
    )


class DataConfig(Section):
    """Conversations -> samples that are token-exact as served."""

    sources: list[SourceConfig] = Field(default_factory=lambda: [SourceConfig()], min_length=1)
    roles: dict[str, Role] = Field(
        default_factory=dict,
        description="Role names in the sources, over the built-in ones (human, gpt, ...); `ignore` leaves such "
        "messages out. A row with a role that is not named is skipped.",
    )
    replies: Literal["regenerate", "keep"] = Field(
        "regenerate",
        description="regenerate: the target answers, replies in the source are dropped; keep: the source's replies, "
        "which the target must have written.",
    )
    history: Literal["own", "source"] = Field(
        "own",
        description="What stands before a regenerated reply. own: the target's earlier replies, and nothing of the "
        "source's; a conversation ends where a tool would have to answer. source: the source's messages as they are, "
        "a reply wherever it has one, tool turns included.",
    )
    server: ServerConfig | None = Field(None, description="Regenerate on a running server; null: an own engine.")
    sampling: SamplingConfig = SamplingConfig()
    dedup: DedupConfig = DedupConfig()
    contamination: ContaminationConfig = ContaminationConfig()
    max_length: int = Field(2048, ge=8, description="Longest sample in tokens, prompt and replies together.")
    too_long: Literal["reject", "truncate", "cut"] = Field(
        "reject",
        description="Of samples that are longer. reject: skip them; truncate: end them after the last whole reply "
        "that fits; cut: also end a reply at max_length, as a server with that limit would (finish_reason `length`).",
    )
    eval_share: float = Field(0.1, ge=0.0, lt=1.0, description="Share of conversations held out from training.")
    draft_vocab_size: PositiveInt | None = Field(
        8192,
        description="Tokens the draft can propose, the replies' most frequent ones; null: the full vocabulary. "
        "Multiples of 128 are the fastest.",
    )
    max_skip_share: Share = Field(0.05, description="A larger share of unusable rows stops `prepare`.")

    @field_validator("roles")
    @classmethod
    def _with_the_usual_ones(cls, given: dict[str, Role]) -> dict[str, Role]:
        return {**DEFAULT_ROLES, **given}


class ProbeConfig(Section):
    """The check at every capture start that the states are the target's own."""

    samples: PositiveInt = Field(8, description="Samples that are probed.")
    max_tokens: int = Field(256, ge=2, description="Tokens of each that are probed.")
    transformers_max_bytes: int = Field(
        4 * 1024**3,
        ge=0,
        description="Targets whose weights are larger are not also compared with transformers.",
    )
    max_state_error: float = Field(
        0.05,
        gt=0.0,
        description="Bound on the median per-token relative error of each layer against transformers.",
    )
    min_argmax_agreement: Share = Field(
        0.95,
        description="Least share of positions where lm_head(norm(last state)) picks the engine's greedy token.",
    )


class CaptureConfig(Section):
    """Prefill of the samples on vLLM; hidden states to disk."""

    layer_ids: Literal["auto"] | list[int] = Field(
        "auto",
        description="Auxiliary layers by vLLM's ids (k: the residual stream after k layers). auto: 2, n//2, n-3.",
    )
    storage: Literal["bf16", "fp8"] = Field(
        "bf16",
        description="Number format of the states on disk. fp8: e4m3 with a scale for every token and layer, half the "
        "bytes.",
    )
    mode: Literal["store", "spool"] = Field(
        "store",
        description="store: all states are written before training starts; spool: only the held-out samples' are, the "
        "others pass through a bounded folder while training runs, in every epoch anew.",
    )
    spool_bytes: PositiveInt | None = Field(
        None, description="Bytes that spool mode's folder may hold at any time; at least two shards."
    )
    spool_capture: Literal["train", "own"] = Field(
        "train",
        description="In spool mode. train: `draftsmith train` starts and ends the capture; own: it waits for a "
        "`draftsmith capture` of yours, in another terminal or on another host with the same run folder.",
    )
    spool_gpus: list[Annotated[int, Field(ge=0)]] | None = Field(
        None,
        min_length=1,
        description="GPUs that capture has in spool mode, by their place among the visible ones; training has the "
        "others. null: both share all.",
    )
    data_parallel: PositiveInt = Field(
        1, description="Engines side by side: on this host, each with target.tensor_parallel GPUs, or on a Ray cluster."
    )
    launcher: Literal["local", "ray"] = Field(
        "local", description="Where the engines run. ray: an actor each, on the cluster that `ray_address` names."
    )
    ray_address: str | None = Field(
        None, description="Address of the Ray cluster; null: RAY_ADDRESS, one that runs on this host, or a new one."
    )
    server: str | None = Field(
        None,
        pattern=r"^https?://[^\s/]+",
        description="URL of a `vllm serve` that was started with the flags of `draftsmith capture serve-args` and "
        "shares the run's folder; null: own engines.",
    )
    seal_after: float = Field(
        5.0, gt=0.0, description="Seconds without a sample after which such a server closes its shards."
    )
    shard_bytes: int = Field(1024**3, ge=1024, description="Shards are closed when they reach this size.")
    pending_bytes: int = Field(
        2 * 1024**3,
        ge=1024,
        description="States that may wait in host memory for the disk before the engine waits.",
    )
    writer_threads: PositiveInt | None = Field(
        None,
        description="Threads of an engine that hash and write, each into a shard of its own; null: three quarters of "
        "the cores and 16 at most, 1 without a GPU.",
    )
    gather_bytes: int = Field(
        128 * 1024**2, ge=1024, description="GPU memory that the gathering of finished samples may take at once."
    )
    max_batched_tokens: PositiveInt = Field(8192, description="Tokens the engine prefills in one step.")
    max_num_seqs: PositiveInt = Field(256, description="Sequences the engine holds at once.")
    max_rejected_share: Share = Field(
        0.01, description="A larger share of samples with non-finite or all-zero states stops the stage."
    )
    untried_targets: bool = Field(
        False,
        description="Also capture targets with an attention that capture was never run on (sparse latent attention, as "
        "DeepSeek-V3.2's); the probe judges their states as all others'.",
    )
    probe: ProbeConfig = ProbeConfig()

    @model_validator(mode="after")
    def _spool_is_bounded(self) -> Self:
        if self.mode == "spool" and self.spool_bytes is None:
            raise ValueError("capture.mode is spool; set capture.spool_bytes to the bytes that its folder may hold")
        if self.mode == "spool" and (self.data_parallel > 1 or self.launcher != "local" or self.server):
            raise ValueError(
                "capture.mode spool has one engine of its own: leave capture.data_parallel, capture.launcher and "
                "capture.server out"
            )
        return self


class ExportConfig(Section):
    """The checkpoint that a server loads."""

    checkpoint: str = Field(
        "last",
        description="last: of a finished training; best: the one with the highest replayed acceptance; "
        "step-NNNNNNN; or the path of a checkpoint.",
    )
    format: Literal["hf", "speculators"] = Field(
        "hf", description="hf: plain Hugging Face layout as vLLM reads it; speculators: vLLM's self-contained one."
    )
    layer_id_convention: Literal["vllm", "sglang"] = Field(
        "vllm",
        description="vllm: id k is the state after k layers; sglang: k - 1, which vLLM would read as other layers.",
    )
    license: str | None = Field(None, description="Licence in the model card; null: the target's.")
    verify: bool | Literal["offline"] = Field(
        True,
        description="true: complete by vLLM's contract, the trainer's logits after reloading, and where vLLM is "
        "installed the same drafts and acceptance on it; offline: all but the engine; false: nothing.",
    )
    verify_prompts: PositiveInt = Field(16, description="Held-out prompts that the engine is given.")
    verify_k: PositiveInt = Field(3, description="Tokens that it drafts a round.")
    verify_concurrency: PositiveInt = Field(8, description="Requests in flight while acceptance is measured.")
    max_logit_error: float = Field(
        0.02, gt=0.0, description="Bound on the relative error of the exported (bfloat16) draft's logits."
    )
    max_served_logit_error: float = Field(
        0.05,
        gt=0.0,
        description="Bound on the relative error of the engine's draft logits, on the engine's own states.",
    )
    max_tie: float = Field(
        0.5, ge=0.0, description="Logits that two tokens may differ by for either to count as the trainer's choice."
    )
    max_acceptance_gap: float = Field(
        0.02, gt=0.0, description="Bound on the relative difference of served and replayed acceptance length."
    )


class Config(Section):
    """Everything a run needs, from prompts to a served draft."""

    run: RunConfig = RunConfig()
    target: TargetConfig = TargetConfig()
    data: DataConfig = DataConfig()
    capture: CaptureConfig = CaptureConfig()
    draft: DraftConfig = DraftConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    export: ExportConfig = ExportConfig()

    @model_validator(mode="after")
    def _reply_fits(self) -> Self:
        if self.data.sampling.max_tokens >= self.data.max_length:
            raise ValueError(
                f"data.sampling.max_tokens ({self.data.sampling.max_tokens}) must be below "
                f"data.max_length ({self.data.max_length}), which holds the prompt too"
            )
        return self

    @model_validator(mode="after")
    def _spool_has_its_gpus(self) -> Self:
        gpus, parallel = self.capture.spool_gpus, self.target.tensor_parallel
        if gpus is not None and self.capture.mode == "spool" and len(set(gpus)) < parallel:
            raise ValueError(
                f"capture.spool_gpus names {len(set(gpus))} GPUs, and target.tensor_parallel takes {parallel}"
            )
        return self

    @model_validator(mode="after")
    def _replies_can_differ(self) -> Self:
        sampling = self.data.sampling
        if sampling.replies > 1 and self.data.replies == "keep":
            raise ValueError(
                f"data.sampling.replies is {sampling.replies}, and with data.replies=keep the target writes none: set "
                "data.replies to regenerate, or leave data.sampling.replies out"
            )
        if sampling.replies > 1 and sampling.temperature == 0:
            raise ValueError(
                f"data.sampling.replies is {sampling.replies} at temperature 0, where all replies to a prompt are the "
                "same: set data.sampling.temperature above 0, or leave data.sampling.replies out"
            )
        return self
