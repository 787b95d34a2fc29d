"""speculators 0.9: its Eagle3DraftModel, its collator and its Trainer, on random states.

Shape letters: N tokens of one document, H hidden, V target vocabulary, D draft vocabulary.
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import transformers.modeling_utils  # before any placeholder exists
import workload
from placeholders import placeholders

if TYPE_CHECKING:
    from peers import Cell, Shape

with placeholders("openai", "datasets", "loguru", "pydantic_settings") as REPLACED:
    import speculators.train.trainer as trainer_module
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.losses import fused
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig, shift_batch
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from speculators.train.data import CollateFn

LEARNING_RATE = 1e-4


def give_each_kernel_its_own_configs() -> None:
    """Its two loss kernels share one list of autotuner configs, which torch 2.11's compiler changes in place."""
    for kernel in (fused.loss_forward_kernel, fused.loss_backward_kernel):
        if hasattr(kernel, "configs"):
            kernel.configs = copy.deepcopy(kernel.configs)


def build_model(cell: Cell, shape: Shape, device: torch.device) -> Eagle3DraftModel:
    """The draft in float32 as its command line makes it (autocast casts), full attention, embedding frozen."""
    layer = transformers.LlamaConfig(**shape.llama_fields(), layer_types=["full_attention"])
    layer._attn_implementation = "eager" if cell.tiny else "simple_flex_attention"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=cell.draft_vocab,
        norm_before_residual=True,
        eagle_aux_hidden_state_layer_ids=[2, shape.target_layers // 2, shape.target_layers - 3],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=cell.ttt_steps)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
    )
    with torch.device(device):
        model = Eagle3DraftModel(config)
        if model.use_draft_vocab:
            t2d_V = torch.zeros(shape.vocab, dtype=torch.bool)
            t2d_V[: cell.draft_vocab] = True
            model.load_vocab_mappings(t2d_V, torch.zeros(cell.draft_vocab, dtype=torch.long))
        with torch.no_grad():
            head_DH = torch.randn(cell.draft_vocab, shape.hidden) * 0.02
            model.lm_head.weight.copy_(head_DH)
            model.verifier_lm_head.weight.copy_(head_DH)
            model.verifier_norm.weight.fill_(1.0)
            model.embed_tokens.weight.normal_(std=0.02)
    model.lm_head.weight.requires_grad_(cell.head == "trained")
    return model.to(device)


def build_batch(cell: Cell, shape: Shape, documents: list[workload.Document], device: torch.device) -> dict[str, Any]:
    """One packed batch of all the documents, by its own collator."""
    samples = [
        {
            "hidden_states": torch.randn(document.length, 3 * shape.hidden, dtype=torch.bfloat16, device=device),
            "input_ids": torch.randint(shape.vocab, (document.length,), device=device),
            "verifier_last_hidden_states": torch.randn(
                document.length, shape.hidden, dtype=torch.bfloat16, device=device
            ),
            "loss_mask": torch.from_numpy(workload.loss_mask(document)).to(device),
            "lengths": torch.tensor([document.length]),
            "position_ids": torch.arange(document.length, device=device),
        }
        for document in documents
    ]
    batch = CollateFn(cell.tokens, shape.hidden, preprocess=shift_batch)(samples)
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


class Repeated(list):
    """As much of a DataLoader as the Trainer asks for."""

    batch_sampler = None


def build_trainer(cell: Cell, model: Eagle3DraftModel, batch: dict[str, Any], device: torch.device, folder: str):
    """Its Trainer with its AdamW made fused, on the same batch at every step; without its logging."""
    if device.type == "cpu":
        trainer_module.get_local_rank = lambda: device
    call, _ = Eagle3DraftModel.get_trainer_kwargs(
        loss_fn="kl_div",
        loss_implementation="eager" if cell.tiny else "fused",
        ttt_steps=cell.ttt_steps,
        ttt_step_loss_decay=0.8,
    )
    config = trainer_module.TrainerConfig(
        lr=LEARNING_RATE, num_epochs=1, save_path=folder, train_call_kwargs=call, log_freq=10**9
    )
    trainer = trainer_module.Trainer(model, config, Repeated([batch] * (cell.warmup + cell.steps)))
    trainer.global_step = 1  # it logs, and waits for the device, at the multiples of log_freq
    trainer.device_type = device.type
    for group in trainer.optimizers[0].param_groups:
        group.update(fused=True, foreach=False)
    return trainer


def train(cell: Cell, shape: Shape, documents: list[workload.Document], mark: Callable[[], None]) -> dict[str, Any]:
    """Runs the warm-up and the timed steps; `mark` is called before the first and after each."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    give_each_kernel_its_own_configs()
    model = build_model(cell, shape, device)
    batch = build_batch(cell, shape, documents, device)
    losses: list[torch.Tensor] = []
    metrics: dict[str, torch.Tensor] = {}

    def keep(_model: object, _arguments: object, output: Any) -> None:
        losses.append(output[1].detach())
        metrics.update(output[2])

    model.register_forward_hook(keep)
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(cell, model, batch, device, folder)
        mark()
        trainer.train_epoch(0, step_callback=mark)
    values = torch.stack(losses).tolist()
    assert all(math.isfinite(value) for value in values), values
    return {
        "supervised_rows": [int(metrics[f"full_acc_{step}_total"]) for step in range(cell.ttt_steps)],
        "loss_first": round(values[0], 4),
        "loss_last": round(values[-1], 4),
        "trained_parameters": sum(p.numel() for p in model.parameters() if p.grad is not None),
        "replaced_imports": REPLACED,
    }
