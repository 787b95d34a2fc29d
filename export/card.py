"""README.md of an exported draft: what it is, how it was made, what it reaches, how to serve it."""

import json
from typing import Any

from draftsmith.core.checkpoint import Checkpoint
from draftsmith.core.config import Config


def model_card(config: Config, checkpoint: Checkpoint, layer_ids: list[int], report: dict[str, Any] | None) -> str:
    """Markdown; acceptance figures only where an evaluation of this very draft is at hand."""
    shape, target = checkpoint.shape, config.target.path
    spec = json.dumps({"method": "eagle3", "model": "PATH_OF_THIS_FOLDER", "num_speculative_tokens": config.eval.k[0]})
    parameters = sum(t.numel() for t in checkpoint.tensors.values())
    flags = [f for f in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output") if getattr(shape, f)]
    flags += [f"sliding window of {shape.sliding_window}"] if shape.sliding_window else []
    flags += ["an embedding of its own"] if shape.own_embedding else []
    return f"""---
base_model: {target}
library_name: vllm
tags: [eagle3, speculative-decoding]
---
# EAGLE3 draft for {target}

- {parameters / 1e6:.1f} M parameters: one decoder layer
- {shape.num_heads} query and {shape.num_kv_heads} key/value heads of {shape.head_dim}
- reads the target's states after layers {", ".join(map(str, layer_ids))} (vLLM's layer ids)
- proposes {shape.draft_vocab_size:,} of the target's {shape.vocab_size:,} tokens
- architecture flags: {", ".join(flags) or "none"}
- target revision: {config.target.revision or "as found locally"}

## Serve

    vllm serve {target} --speculative-config '{spec}'
{_acceptance(report)}
## Training

{checkpoint.state["total_steps"]:,} optimizer steps of {config.train.tokens_per_batch:,} packed tokens,
{config.train.ttt_steps} steps of training-time test, on the target's own replies at temperature
{config.data.sampling.temperature}.
`manifest.json` has the hashes and versions, `verification.json` what was checked. Made with draftsmith.
"""


def _acceptance(report: dict[str, Any] | None) -> str:
    if not report:
        return ""
    rows = [
        f"| {r['set']} | {r['k']} | {r['temperature']} | {r['concurrency']} | {r['acceptance_length']:.3f} | "
        f"{r['tokens_per_second']:.0f} | {r['baseline_tokens_per_second']:.0f} |"
        for r in report["served"]
    ]
    head = ["| set | K | temperature | concurrency | acceptance length | tokens/s | without draft |", "|---" * 7 + "|"]
    return "\n## Acceptance, served on vLLM\n\n" + "\n".join(head + rows) + "\n"
