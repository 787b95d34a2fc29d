"""The sections `draft` and `train` of the config."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from draftsmith.core.config_torchspec import TorchSpecConfig
from draftsmith.core.section import PositiveInt, Section

LossName = Literal["soft_ce", "soft_ce_full", "kl", "lk_alpha", "lk_lambda"]


class DraftConfig(Section):
    """Shape of the EAGLE3 head; null means: as in the target."""

    num_heads: PositiveInt | None = Field(None, description="Attention heads.")
    num_kv_heads: PositiveInt | None = Field(None, description="Key/value heads.")
    head_dim: PositiveInt | None = Field(None, description="Width of one head.")
    intermediate_size: PositiveInt | None = Field(None, description="Width of the MLP.")
    norm_before_residual: bool = Field(False, description="The residual branch takes the normed feature.")
    norm_before_fc: bool = Field(False, description="One RMSNorm over the concatenated auxiliary states.")
    fc_norm: bool = Field(False, description="One RMSNorm per auxiliary state (EAGLE 3.1).")
    norm_output: bool = Field(False, description="The next step is fed the normed output (EAGLE 3.1).")
    rope: dict[str, Any] | None = Field(
        None,
        description="Rotary parameters as transformers spells them, e.g. {rope_type: default, rope_theta: 10000.0}; "
        "rope_type is default, linear, llama3 or yarn.",
    )
    partial_rotary_factor: float | None = Field(
        None,
        gt=0.0,
        le=1.0,
        description="Share of each head that is rotated; null: all of it, whatever the target does.",
    )
    sliding_window: PositiveInt | None = Field(
        None,
        description="Positions that attention looks back over, its own included; null: all, except where every layer "
        "of the target has a window, which vLLM then gives to the draft too.",
    )
    train_embedding: bool = Field(False, description="Train an embedding of the draft's own, starting at the target's.")
    train_lm_head: bool = Field(True, description="false: keep the target's lm_head rows as they are.")
    init: Literal["target", "random"] = Field(
        "target",
        description="target: start from the target's lm_head rows, with fc passing on its last auxiliary state.",
    )

    @model_validator(mode="after")
    def _frozen_head_is_the_targets(self) -> Self:
        if not self.train_lm_head and self.init == "random":
            raise ValueError("draft.train_lm_head: false keeps the initial lm_head; draft.init must be target then")
        return self


class TrainConfig(Section):
    """Training-time test of the EAGLE3 head."""

    engine: Literal["accelerate", "deepspeed", "torchspec"] = Field(
        "accelerate",
        description="accelerate: one GPU or CPU, and on several processes DDP or what `shard` says; deepspeed: ZeRO, "
        "as `deepspeed_config` says. The loss is the same, and a checkpoint of one is gone on from with the other. "
        "torchspec: TorchSpec prefills and trains at once, on one host or many (docs/torchspec.md).",
    )
    shard: Literal["none", "fsdp2"] = Field(
        "none",
        description="Engine accelerate on several processes. none: DDP, every one holds all of the draft; fsdp2: "
        "weights, gradients and optimizer state are shared out.",
    )
    deepspeed_config: str = Field(
        "configs/deepspeed/zero2.json",
        description="Engine deepspeed: its JSON file, yours or one of configs/deepspeed (zero1, zero2, zero3, "
        "zero2_offload, zero3_offload). Optimizer, clipping, accumulation and precision are this config's business.",
    )
    ttt_steps: PositiveInt = Field(7, description="Training-time-test steps J.")
    step_decay: float = Field(0.8, gt=0.0, le=1.0, description="Step j weighs step_decay^(j-1) in the loss.")
    rejected_weight: float = Field(
        1.0,
        ge=0.0,
        le=1.0,
        description="What a step of a chain weighs in the loss where an earlier step's draft was not the reply's own "
        "token, so that the server would have rejected it and never used the step. 1: as much as any other; 0: only "
        "what serving at temperature 0 would use.",
    )
    loss: LossName = Field(
        "soft_ce",
        description="soft_ce: soft cross-entropy against the target renormalised over the draft vocabulary; "
        "soft_ce_full: against its full-vocabulary probabilities; kl: soft_ce less the target's entropy; "
        "lk_alpha, lk_lambda: the acceptance rate itself (arXiv:2602.23881).",
    )
    loss_temperature: float = Field(1.0, gt=0.0, description="The loss divides the logits of draft and target by it.")
    lk_eta: float = Field(
        3.0, ge=0.0, description="lk_lambda: KL weighs exp(-lk_eta * acceptance), total variation the rest."
    )
    hidden_noise: float = Field(
        0.0, ge=0.0, description="Noise on the auxiliary states, as a share of each state's rms; training only."
    )
    hidden_noise_kind: Literal["uniform", "gaussian"] = Field(
        "uniform", description="uniform: within +- hidden_noise; gaussian: of that standard deviation."
    )
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Matrix products; weights stay float32. auto: bfloat16 on a GPU (sm_80 and newer) or a "
        "CPU that has it.",
    )
    kernels: Literal["auto", "fused", "eager"] = Field(
        "auto",
        description="fused: the hand-written GPU pass; eager: plain PyTorch, its reference. auto: fused on a GPU in "
        "bfloat16.",
    )
    matmul: Literal["bf16", "fp8"] = Field(
        "bf16",
        description="Matrix products of the fused pass. fp8: operands in float8 with a scale each, on GPUs that have "
        "it (compute capability 8.9 or higher); sums, weights and norms stay float32.",
    )
    bf16_tail: float = Field(
        0.1,
        ge=0.0,
        le=1.0,
        description="matmul fp8: this share of the optimizer steps, the last, multiplies in bfloat16 all the same, so "
        "that the weights settle for the precision that serves them.",
    )
    attention: Literal["triton", "auto"] = Field(
        "triton",
        description="Attention of the fused pass. triton: our kernels alone, whose bits repeat; auto: in bfloat16, "
        "documents of 4,096 tokens and more that are supervised almost throughout are left to cuDNN, which is faster "
        "on long ones (6 % of a step at 16,384 tokens) and adds up in no fixed order.",
    )
    logits_bytes: int = Field(
        4 * 1024**3, ge=1024, description="The fused pass holds at most about this many bytes of the draft's logits."
    )
    tokens_per_batch: PositiveInt = Field(16384, description="Packed tokens of one batch on one process.")
    grad_accum_steps: PositiveInt = Field(
        1, description="Batches of one process that make one optimizer step; 4 on one process equal 1 on four."
    )
    init_from: str | None = Field(
        None,
        description="Start from these weights, with their vocabulary mapping: a checkpoint `step-N` of draftsmith, or "
        "the folder of any EAGLE3 draft of the same shape; null: as draft.init says.",
    )
    epochs: PositiveInt = Field(10, description="Passes over the training samples.")
    learning_rate: float = Field(1.0e-4, gt=0.0)
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw",
        description="muon: torch's Muon for the matrices between embedding and lm_head, AdamW for all else; one "
        "learning rate fits both.",
    )
    muon_momentum: float = Field(0.95, ge=0.0, lt=1.0, description="Muon's decay of the momentum.")
    betas: list[Annotated[float, Field(ge=0.0, lt=1.0)]] = Field(
        default_factory=lambda: [0.9, 0.95], min_length=2, max_length=2, description="AdamW moments' decay."
    )
    weight_decay: float = Field(0.0, ge=0.0)
    warmup_ratio: float = Field(0.015, ge=0.0, lt=1.0, description="Share of the optimizer steps that warm up.")
    warmup_steps: int | None = Field(
        None, ge=0, description="Optimizer steps that warm up, whatever the number of processes; null: warmup_ratio."
    )
    schedule: Literal["cosine", "linear", "wsd", "constant"] = Field(
        "cosine", description="Of the learning rate after warm-up. wsd: constant, then linear to zero over decay_ratio."
    )
    decay_ratio: float = Field(0.2, gt=0.0, le=1.0, description="Share of the optimizer steps that wsd falls over.")
    ema_decay: float | None = Field(
        None,
        gt=0.0,
        lt=1.0,
        description="Keep a running average of the weights, which is evaluated and exported, e.g. 0.999; null: none.",
    )
    max_grad_norm: float = Field(0.5, gt=0.0, description="Gradients are clipped to this norm.")
    max_skipped_steps: PositiveInt = Field(10, description="Non-finite gradients in a row that stop training.")
    log_interval: PositiveInt = Field(10, description="Optimizer steps between log lines.")
    eval_interval: PositiveInt = Field(200, description="Optimizer steps between evaluations on held-out samples.")
    save_interval: PositiveInt = Field(200, description="Optimizer steps between checkpoints.")
    keep_checkpoints: PositiveInt = Field(2, description="Newest checkpoints that are kept, beside the best.")
    profile_steps: list[PositiveInt] | None = Field(
        None,
        min_length=2,
        max_length=2,
        description="First and last optimizer step (from 1) that PyTorch's profiler records, into the run's "
        "`profile/`; null: none.",
    )
    peak_tflops: float | None = Field(
        None,
        gt=0.0,
        description="Dense bfloat16 TFLOP/s of one GPU, which `mfu` is a share of; null: by the GPU's name, and no "
        "`mfu` where it is not known.",
    )
    trackers: list[Literal["wandb", "tensorboard", "trackio"]] = Field(
        default_factory=list, description="Accelerate trackers; metrics.jsonl is always written."
    )
    torchspec: TorchSpecConfig = TorchSpecConfig()

    @model_validator(mode="after")
    def _whole_matrices_for_muon(self) -> Self:
        if self.optimizer == "muon" and (self.engine == "deepspeed" or self.shard != "none"):
            raise ValueError("train.optimizer: muon needs whole matrices: train.engine accelerate, train.shard none")
        if self.engine == "deepspeed" and self.shard != "none":
            raise ValueError("train.shard belongs to train.engine accelerate; deepspeed's stages do the same")
        if self.profile_steps and self.profile_steps[0] > self.profile_steps[1]:
            raise ValueError("train.profile_steps: the first step comes after the last")
        return self
