"""Every architecture that a draft can have, on a real engine: does vLLM compute what the trainer computes?

    python benchmarks/export/variants.py [--only NAME ...] [--target smollm2-135m-instruct] [--out FILE]

Drafts of random weights (norms too, so that a norm left out shows) are exported, loaded by vLLM and probed: after a few
prompts the logits of three drafted tokens are compared with our model's on the states that the engine gave the drafter.
On an engine in float32 the difference is rounding of float32 (1e-6); a flag that does not reach the server is 0.1 or
more. One engine start for each; prints a row a variant, and JSON with --out.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from draftsmith.core.config import Config
from draftsmith.core.config_train import DraftConfig
from draftsmith.core.draft import DraftModel
from draftsmith.core.draft_folder import read_draft_folder
from draftsmith.core.draft_shape import resolve_shape
from draftsmith.core.manifest import package_versions
from draftsmith.core.target import Target, resolve_target
from draftsmith.core.target_weights import load_target_weights
from draftsmith.export.draft import Draft
from draftsmith.export.layout import draft_tensors, folder_config, write_draft
from draftsmith.export.observe import observe
from draftsmith.export.served_proof import agreement
from draftsmith.export.verify import contract_check, model_of

PROMPTS, LENGTHS, VOCAB = 4, (20, 61), 1024
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 32}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 256.0, "original_max_position_embeddings": 32}
# Name -> options of the draft section; `aux`, `vocab` and `format` are not of it.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "4 aux layers": {"aux": 4},
    "norms, 4 aux, speculators": {
        "norm_before_residual": True, "fc_norm": True, "norm_output": True, "aux": 4, "format": "speculators",
    },
    "norm_before_fc, 4 aux": {"norm_before_fc": True, "aux": 4},
    "norm_before_fc, speculators": {"norm_before_fc": True, "format": "speculators"},
    "full vocabulary": {"vocab": None},
    "own embedding": {"train_embedding": True},
    "own attention": {"num_heads": 12, "num_kv_heads": 12, "head_dim": 32},
    "sliding window": {"sliding_window": 16},
    "llama3 rope": {"rope": LLAMA3},
    "llama3 rope, speculators": {"rope": LLAMA3, "format": "speculators"},
    "yarn rope": {"rope": YARN},
    "partial rotary": {"partial_rotary_factor": 0.5},
}  # fmt: skip


def random_draft(target: Target, options: dict[str, Any]) -> Draft:
    """A draft of random weights, its vocabulary spread over the target's."""
    options = dict(options)
    options.pop("format", None)
    num_aux, vocab = options.pop("aux", 3), options.pop("vocab", VOCAB) or target.vocab_size
    shape = resolve_shape(DraftConfig(**options), target, num_aux, vocab)
    torch.manual_seed(0)
    model = DraftModel(shape, load_target_weights(target).embed_VH.clone())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.02)
    layers = target.num_layers
    layer_ids = [2, layers // 2, layers - 3] if num_aux == 3 else [2, layers // 3, layers // 2, layers - 3]
    ids = torch.linspace(0, target.vocab_size - 1, vocab).long()
    return Draft(shape, model.state_dict(), ids, layer_ids, "random")


def measure(config: Config, target: Target, name: str, prompts: list[list[int]]) -> dict[str, Any]:
    """One engine start."""
    begin = time.monotonic()
    draft, layout = random_draft(target, VARIANTS[name]), VARIANTS[name].get("format", "hf")
    options = config.export.model_copy(update={"format": layout})
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "draft"
        folder.mkdir()
        write_draft(folder, draft_tensors(draft), folder_config(draft, target, options, 3))
        contract = contract_check(folder, draft)
        assert contract.passed, contract.detail
        first, _ = observe(config, target, folder, draft.shape.num_aux, prompts, [])
        read = read_draft_folder(folder, target)
    model = model_of(read.shape, read.tensors, load_target_weights(target).embed_VH)
    found = agreement(model, read.target_ids, prompts, first)
    return {"variant": name, "layout": layout, **found, "seconds": round(time.monotonic() - begin, 1)}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    config = Config.model_validate(
        {
            "target": {"path": args.target, "dtype": args.dtype},
            "data": {"max_length": 128, "sampling": {"max_tokens": 8}},
        }
    )
    target = resolve_target(config.target)
    generator = torch.Generator().manual_seed(1)
    sizes = torch.randint(*LENGTHS, (PROMPTS,), generator=generator).tolist()
    prompts = [torch.randint(target.vocab_size, (n,), generator=generator).tolist() for n in sizes]
    rows = []
    for name in args.only:
        rows.append(measure(config, target, name, prompts))
        r = rows[-1]
        print(
            f"{name:28} {r['layout']:12} logits off by {r['relative_error']:.2e}, {r['equal']} of {r['compared']} "
            f"tokens equal, {r['seconds']:.0f} s",
            flush=True,
        )
        if args.out:
            args.out.write_text(json.dumps({"rows": rows, "versions": package_versions()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
