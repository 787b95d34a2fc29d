"""SpecForge 0.2: its LlamaForCausalLMEagle3 under OnlineEagle3Model, TrainerCore and BF16Optimizer, on random states.

Shape letters: N tokens of one document, H hidden, V target vocabulary, D draft vocabulary.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers.modeling_utils  # before any placeholder exists
import workload
from placeholders import placeholders

if TYPE_CHECKING:
    from peers import Cell, Shape

with placeholders("datasets", "sglang", "yunchang", "pydantic", "openai", "openai_harmony", "wandb") as REPLACED:
    from specforge.algorithms.eagle3.data import build_offline_collator, normalize_offline_sample
    from specforge.algorithms.eagle3.model import OnlineEagle3Model
    from specforge.modeling.auto import AutoDraftModel
    from specforge.modeling.target.target_head import TargetHead
    from specforge.optimizer import BF16Optimizer
    from specforge.runtime.contracts import TrainBatch
    from specforge.training.backend import FSDPTrainingBackend, ParallelConfig
    from specforge.training.controller import TrainerCore
    from specforge.training.strategies.base import Eagle3TrainStrategy

    COLLATE = build_offline_collator()

LEARNING_RATE = 1e-4
OUTSIDE_SCALE = 0.25  # makes the target's likeliest token one of the draft vocabulary: it skips the other rows


def build_model(cell: Cell, shape: Shape, device: torch.device) -> OnlineEagle3Model:
    """The draft in bfloat16, embedding frozen, lm_head trained: `build_eagle3_draft` and `build_eagle3_model`."""
    config = transformers.LlamaConfig(
        **shape.llama_fields(),
        architectures=["LlamaForCausalLMEagle3"],
        draft_vocab_size=cell.draft_vocab,
        pretraining_tp=1,
    )
    backend = "sdpa" if cell.tiny else "flex_attention"
    with torch.device(device):
        draft = AutoDraftModel.from_config(config, attention_backend=backend, torch_dtype=torch.bfloat16)
        draft.t2d.zero_()
        draft.t2d[: cell.draft_vocab] = True
        draft.d2t.zero_()
    draft.freeze_embedding()
    model = OnlineEagle3Model(draft_model=draft, length=cell.ttt_steps, attention_backend=backend)
    return model.to(device=device, dtype=torch.bfloat16)


def build_target_head(cell: Cell, shape: Shape, device: torch.device) -> TargetHead:
    """Its frozen full-vocabulary head with random rows."""
    with tempfile.TemporaryDirectory() as folder:
        target = {"model_type": "llama", "hidden_size": shape.hidden, "vocab_size": shape.vocab}
        (Path(folder) / "config.json").write_text(json.dumps(target))
        with torch.device(device):
            head = TargetHead(folder)
    with torch.no_grad():
        head.fc.weight.normal_(std=0.02)
        head.fc.weight[cell.draft_vocab :] *= OUTSIDE_SCALE
    head.freeze_weights()
    return head.eval().to(device=device, dtype=torch.bfloat16)


def build_batches(
    cell: Cell, shape: Shape, documents: list[workload.Document], device: torch.device
) -> list[TrainBatch]:
    """Its micro-batches of one optimizer step: the documents in groups, each padded to its longest by its collator."""
    samples = [
        normalize_offline_sample(
            {
                "aux_hidden_state": torch.randn(document.length, 3 * shape.hidden, dtype=torch.bfloat16, device=device),
                "hidden_state": torch.randn(document.length, shape.hidden, dtype=torch.bfloat16, device=device),
                "input_ids": torch.randint(shape.vocab, (document.length,), device=device),
                "loss_mask": torch.from_numpy(workload.loss_mask(document)).to(device).long(),
            },
            max_len=document.length,
        )
        for document in documents
    ]
    size = cell.documents_per_batch
    return [
        TrainBatch(
            sample_ids=[str(at)],
            strategy="eagle3",
            tensors=COLLATE(samples[at : at + size]),
            metadata={"target_repr": "hidden_state"},
        )
        for at in range(0, len(samples), size)
    ]


def build_optimizer(draft: torch.nn.Module, steps: int) -> BF16Optimizer:
    """Its optimizer with float32 masters, its AdamW made fused."""
    optimizer = BF16Optimizer(draft, lr=LEARNING_RATE, total_steps=steps)
    for group in optimizer.optimizer.param_groups:
        group.update(fused=True, foreach=False)
    return optimizer


def train(cell: Cell, shape: Shape, documents: list[workload.Document], mark: Callable[[], None]) -> dict[str, Any]:
    """Runs the warm-up and the timed steps; `mark` is called before the first and after each optimizer step."""
    if cell.head != "trained":
        raise ValueError("SpecForge trains its lm_head: leave --frozen-head out")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    model = build_model(cell, shape, device)
    head = build_target_head(cell, shape, device)
    batches = build_batches(cell, shape, documents, device)
    steps = cell.warmup + cell.steps
    # Its backend without the FSDP wrapper: on one GPU that only adds work.
    backend = FSDPTrainingBackend(
        ParallelConfig(world_size=1), optimizer_factory=lambda draft: build_optimizer(draft, steps)
    )
    backend.prepare_model(model, wrap=False, optimizer_target=model.draft_model)
    strategy = Eagle3TrainStrategy(model, target_head=head)
    core = TrainerCore(strategy, backend, accumulation_steps=len(batches))

    rows = torch.zeros(cell.ttt_steps, device=device)
    forward_loss = strategy.forward_loss

    def counted(batch: TrainBatch, context: object = None) -> Any:
        output = forward_loss(batch, context)
        rows.add_(torch.stack(output.metrics["acc_denoms"]))
        return output

    strategy.forward_loss = counted
    losses = []
    mark()
    for _ in range(steps):
        losses.append(sum(core.train_step(batch).loss for batch in batches) / len(batches))
        mark()
    assert all(math.isfinite(loss) for loss in losses), losses
    return {
        "supervised_rows": [round(count / steps) for count in rows.tolist()],
        "loss_first": round(losses[0], 4),
        "loss_last": round(losses[-1], 4),
        "trained_parameters": sum(p.numel() for p in backend.optimizer.model_params),
        "micro_batches": [list(batch.tensors["input_ids"].shape) for batch in batches],
        "replaced_imports": REPLACED,
    }
