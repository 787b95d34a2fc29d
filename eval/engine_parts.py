"""What every part of a draft computes inside a running vLLM engine, for one prompt.

Hooks sit on the modules of vLLM's `llama_eagle3.py`, as 0.24 to 0.33 name them, and keep the first call after the
prompt was asked for. They see what runs in Python, so the engine must run eagerly.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.core.config import Config
from draftsmith.core.engine import generate, in_engine_process, vllm_engine
from draftsmith.core.errors import StageFailed
from draftsmith.core.target import Target

WORKER = "draftsmith.eval.engine_parts.WatchedWorker"
# Part -> module below the drafter's model.
_MODULES = {
    "input_layernorm": "model.layers.0.input_layernorm",
    "hidden_norm": "model.layers.0.hidden_norm",
    "qkv": "model.layers.0.self_attn.qkv_proj",
    "rotary": "model.layers.0.self_attn.rotary_emb",
    "attention": "model.layers.0.self_attn.o_proj",
    "mlp": "model.layers.0.mlp",
    "norm": "model.norm",
    "lm_head": "logits_processor",
}


class WatchedWorker:
    """Methods that vLLM mixes into its workers (`worker_extension_cls=WORKER`), for `LLM.collective_rpc`."""

    def draftsmith_watch(self, tokens: int) -> str | None:
        """Keep what the next prompt of so many tokens makes; why that cannot be done, or None."""
        runner = getattr(self, "model_runner", None)
        drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
        if drafter is None:
            return "no drafter was found in it"
        self._seen = dict[str, Tensor]()
        try:
            _watch(drafter.model, self._seen, tokens)
        except AttributeError as error:
            return f"its draft is built in another way ({error})"
        return None

    def draftsmith_seen(self, file: str) -> None:
        """Write what was kept; only the first worker does."""
        if getattr(self, "rank", 0) == 0:
            save_file({k: v.cpu().contiguous() for k, v in self._seen.items()}, file)


def engine_parts(config: Config, target: Target, draft: Path, ids: list[int], file: Path) -> dict[str, Tensor]:
    """Serve one prompt with a draft, and return what its parts computed.

    Args:
        config: the run's config.
        target: resolved target.
        draft: draft folder.
        ids: the prompt, T tokens.
        file: a scratch file.

    Returns:
        `states` [T, A * H] as the drafter was given them, `fc` [T, H], then each part's output; `d2t` [Vd] as the
        engine holds it (absent: the full vocabulary); `norm_output` [1], whether it feeds the next step the normed
        output; `next_id` [1], the target's token after the prompt.

    Raises:
        StageFailed: the engine did not start, or cannot be watched.
    """
    next_id = in_engine_process(_observe, config, target, draft.resolve(), ids, file)
    parts: dict[str, Tensor] = load_file(file)
    if "lm_head" not in parts:
        raise StageFailed("the engine cannot be diagnosed: its draft ran where no hook sees it.")
    return parts | {"next_id": torch.tensor([next_id])}


def _observe(config: Config, target: Target, draft: Path, ids: list[int], file: Path) -> int:
    from vllm import SamplingParams

    args: dict[str, Any] = {
        "max_model_len": len(ids) + 8,
        "max_num_seqs": 1,
        "max_num_batched_tokens": max(8192, len(ids) + 8),  # the prompt in one step
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "seed": config.run.seed,
        "worker_extension_cls": WORKER,
        "speculative_config": {"method": "eagle3", "model": str(draft), "num_speculative_tokens": 1},
    }
    with vllm_engine(config.target, target, **args) as llm:
        if reason := next((r for r in llm.collective_rpc("draftsmith_watch", args=(len(ids),)) if r), None):
            raise StageFailed(f"the engine cannot be diagnosed: {reason}.")
        params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False)
        [(_, output)] = generate(llm, [ids], [params])
        llm.collective_rpc("draftsmith_seen", args=(str(file),))
        return int(output.outputs[0].token_ids[0])


def _watch(model: Any, seen: dict[str, Tensor], tokens: int) -> None:
    combine = model.combine_hidden_states

    def watched(states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        fused: Tensor = combine(states, *args, **kwargs)
        if "fc" not in seen and len(states) >= tokens:
            seen.update(states=states[:tokens].detach().clone(), fc=fused[:tokens].detach().clone())
        return fused

    def hook(name: str) -> Any:
        def keep(module: Any, args: Any, output: Any) -> None:
            if "fc" not in seen or name in seen:
                return
            parts = output if isinstance(output, tuple) and name == "rotary" else [_first(output)]
            # Of the logits there is one row, whatever the prompt's length.
            seen[name] = torch.cat([p[:tokens].detach() for p in parts], dim=-1).clone()

        return keep

    modules = {name: model.get_submodule(path) for name, path in _MODULES.items()}
    model.combine_hidden_states = watched
    for name, module in modules.items():
        module.register_forward_hook(hook(name))
    offsets = getattr(model, "draft_id_to_target_id", None)
    if offsets is not None:
        seen["d2t"] = offsets.detach().clone()
    seen["norm_output"] = torch.tensor([int(getattr(model.model, "norm_output", False))])


def _first(output: Any) -> Tensor:
    """Modules that may have a bias, and norms that add a residual, return a pair."""
    tensor: Tensor = output[0] if isinstance(output, tuple) else output
    return tensor
