"""A MiniMax-M2.5 of random weights as a checkpoint on disk: the real one's tensors, names, float8 blocks and tokens.

Its width, heads, experts and vocabulary are the real ones, its depth is not; `TINY` is the same at a size for a CPU,
where vLLM's router knows only softmax. Output rows shrink with the token's id, as words of a language do, so that
replies repeat themselves and a draft has something to learn.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

CONFIG = Path(__file__).parents[2] / "configs" / "targets" / "minimax_m2_5" / "config.json"
TINY: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "rotary_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 4096, "scoring_func": "softmax",
    "max_position_embeddings": 4096,
}  # fmt: skip
# Ids of the real tokenizer; in a smaller vocabulary they stand at its end.
SPECIAL = {"[e~[": 200020, "]~!b[": 200034, "]~b]": 200019, "<think>": 200050, "</think>": 200051}
TEMPLATE = (
    "{{ ']~!b[]~b]system\\nYou are a helpful assistant.[e~[\\n' }}"
    "{% for m in messages %}{{ ']~b]' + ('ai' if m.role == 'assistant' else m.role) + '\\n' + m.content + '[e~[\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ ']~b]ai\\n<think>\\n' }}{% endif %}"
)


def write_checkpoint(folder: Path, layers: int, fp8: bool, tiny: bool, template: str | None = None) -> dict[str, Any]:
    """Write weights, config.json, tokenizer and template; returns the config.

    Args:
        folder: is made.
        layers: depth.
        fp8: linear layers in float8 with a scale for every 128 x 128 block, as in the real checkpoint.
        tiny: `TINY` instead of the real width.
        template: the chat template; None: a short one with M2.5's markers.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads(CONFIG.read_text(encoding="utf-8")) | {"num_hidden_layers": layers} | (TINY if tiny else {})
    if not fp8:
        del config["quantization_config"]
    ids = _special_ids(config["vocab_size"])
    config |= {"eos_token_id": ids["[e~["], "bos_token_id": ids["]~!b["]}
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": config["rope_theta"],
                                 "partial_rotary_factor": config["rotary_dim"] / config["head_dim"]}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    torch.manual_seed(0)
    files: dict[str, str] = {}
    parts = [("model-head.safetensors", _outer(config))]
    parts += [(f"model-{i:05d}.safetensors", _layer(config, i, fp8)) for i in range(layers)]
    for name, tensors in parts:
        held = {key: tensor.cpu().contiguous() for key, tensor in tensors}
        save_file(held, folder / name, metadata={"format": "pt"})
        files |= dict.fromkeys(held, name)
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    _tokenizer(config["vocab_size"], ids, template or TEMPLATE).save_pretrained(folder)
    return dict(config)


def _outer(config: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    yield "model.embed_tokens.weight", _random(vocab, hidden)
    yield "model.norm.weight", 1 + _random(hidden) * 5
    falling = (1 + torch.arange(vocab, device=_device(), dtype=torch.float32)).pow(-0.25)[:, None]
    yield "lm_head.weight", (_random(vocab, hidden).float() * falling * 10).to(torch.bfloat16)


def _layer(config: dict[str, Any], i: int, fp8: bool) -> Iterator[tuple[str, Tensor]]:
    hidden, inner, width = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, groups = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    at = f"model.layers.{i}"
    sizes = {"q": (heads, hidden), "k": (groups, hidden), "v": (groups, hidden), "o": (hidden, heads)}
    linear = {f"{at}.self_attn.{kind}_proj": size for kind, size in sizes.items()}
    for expert in range(config["num_local_experts"]):
        name = f"{at}.block_sparse_moe.experts.{expert}"
        linear |= {f"{name}.w1": (inner, hidden), f"{name}.w2": (hidden, inner), f"{name}.w3": (inner, hidden)}
    for name, size in linear.items():
        weight = _random(*size)
        if fp8:
            weight, scale = _blocks(weight)
            yield f"{name}.weight_scale_inv", scale
        yield f"{name}.weight", weight
    # Near zero, softmax over the chosen experts and the real checkpoint's normed sigmoid are nearly the same weights.
    yield f"{at}.block_sparse_moe.gate.weight", _random(config["num_local_experts"], hidden) * 0.1
    yield f"{at}.block_sparse_moe.e_score_correction_bias", torch.zeros(config["num_local_experts"])
    for name, size in {"self_attn.q_norm": heads, "self_attn.k_norm": groups, "input_layernorm": hidden,
                       "post_attention_layernorm": hidden}.items():  # fmt: skip
        yield f"{at}.{name}.weight", 1 + _random(size)


def _blocks(weight: Tensor, block: int = 128) -> tuple[Tensor, Tensor]:
    """float8 e4m3 and the scale of every block, by which it is to be multiplied."""
    rows, columns = weight.shape
    tiles = weight.float().reshape(rows // block, block, columns // block, block)
    scale = tiles.abs().amax(dim=(1, 3)) / torch.finfo(torch.float8_e4m3fn).max
    quantized = (tiles / scale[:, None, :, None]).reshape(rows, columns).to(torch.float8_e4m3fn)
    return quantized, scale


def _random(*size: int) -> Tensor:
    return torch.randn(size, device=_device(), dtype=torch.bfloat16) * 0.02


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _special_ids(vocab: int) -> dict[str, int]:
    largest = max(SPECIAL.values())
    return {token: i if i < vocab else vocab - 1 - (largest - i) for token, i in SPECIAL.items()}


def _tokenizer(vocab: int, ids: dict[str, int], template: str) -> Any:
    """Bytes, fillers up to the whole vocabulary, and the markers at their own ids."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = {i: f"filler{i}" for i in range(vocab)} | dict(enumerate(alphabet)) | {i: t for t, i in ids.items()}
    bpe = Tokenizer(models.BPE(vocab={name: i for i, name in names.items()}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    markers = [t for t in ids if "think" not in t]
    bpe.add_special_tokens([AddedToken(token, special=True) for token in markers])
    bpe.add_tokens([AddedToken(token, special=False, normalized=False) for token in ids if token not in markers])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="]~!b[", eos_token="[e~[", chat_template=template, model_max_length=10**6
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--template", type=Path)
    args = parser.parse_args()
    template = args.template.read_text(encoding="utf-8") if args.template else None
    write_checkpoint(args.folder, args.layers, args.fp8, args.tiny, template)


if __name__ == "__main__":
    main()
