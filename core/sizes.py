"""How large and how much work: the draft, its training step, the target. Torch-free, so that a plan takes no time.

Checked against every measured step of benchmarks/training (tests/core/test_plan.py): memory and speed within 9 % where
products are in bfloat16, memory within 14 % at a draft vocabulary of 200,064; with float8 products within 12 and 22 %.

Legend: H hidden size, C = (N + 2G) D the width of q, k and v together, I intermediate size, A auxiliary states,
V target and Vd draft vocabulary, J steps, T tokens of a batch, R of them supervised.
"""

from dataclasses import dataclass
from typing import Any

from draftsmith.core.draft_shape import DraftShape

# By `training_flops`, what the fused pass reached on H200s in benchmarks/training: 499 to 567 TFLOP/s with products in
# bfloat16, 581 to 851 in float8, whose operands and casts take an eighth more memory.
H200_TRAINING_FLOPS = {"bf16": 520e12, "fp8": 700e12}
_FLOAT8_MEMORY = 1.12
# Prefill-only capture on H200s, seconds a token = fixed + per_parameter * active parameters on one GPU: through
# 431,000 tokens/s of SmolLM2-135M on one GPU and 34,800 of MiniMax-M2.5's shape (fp8, 10.4e9 active) on two.
H200_CAPTURE_FIXED, H200_CAPTURE_PER_PARAMETER = 1.62e-6, 5.23e-15
# Dense bfloat16 FLOP/s by their data sheets, by what a GPU's name holds; the first that fits counts.
_PEAK_FLOPS = {"B300": 2500e12, "B200": 2250e12, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "H800": 989e12,
               "A100": 312e12, "A800": 312e12, "L40S": 362e12, "RTX 4090": 165e12}  # fmt: skip


def gpu_peak_flops(name: str) -> float | None:
    """Dense bfloat16 FLOP/s of a GPU by its name; None: not known."""
    return next((peak for part, peak in _PEAK_FLOPS.items() if part in name), None)


# Replies, of which nothing larger than SmolLM2-135M was measured: a token takes the host 30 us (31,800 and 33,100
# tokens/s, benchmarks/data), and each step reads weights and cache at the share of the bandwidth that kernels reach.
REPLY_FIXED, REPLY_BANDWIDTH, REPLY_SEQUENCES = 3.0e-5, 0.6, 256


def draft_parameters(shape: DraftShape) -> dict[str, int]:
    """Parameters of a draft by part."""
    hidden, heads, groups = shape.hidden_size, shape.num_heads, shape.num_kv_heads
    aux_norms = hidden * shape.num_aux if shape.fc_norm or shape.norm_before_fc else 0
    return {
        "fc": hidden * hidden * shape.num_aux,
        "attention": hidden * shape.head_dim * (2 * (heads + 2 * groups) + heads),
        "mlp": 3 * hidden * shape.intermediate_size,
        "lm_head": hidden * shape.draft_vocab_size,
        "norms": 4 * hidden + aux_norms,
        "embedding": hidden * shape.vocab_size if shape.own_embedding else 0,
    }


@dataclass(frozen=True)
class Workload:
    """What a training step works on.

    Attributes:
        tokens: T, packed tokens of a batch.
        supervised: share of them that are reply tokens.
        length: mean tokens of a document.
        steps: J.
        full_vocabulary: the loss needs the target's full distribution.
        logits_bytes: `train.logits_bytes`.
        matmul: `train.matmul`.
    """

    tokens: int
    supervised: float
    length: float
    steps: int
    full_vocabulary: bool = False
    logits_bytes: int = 4 * 1024**3
    matmul: str = "bf16"


def training_flops(shape: DraftShape, work: Workload) -> float:
    """Floating-point operations of training on one token, forward and backward, as the fused pass computes them."""
    parts, hidden, share = draft_parameters(shape), shape.hidden_size, work.supervised
    heads, width = shape.num_heads * shape.head_dim, (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    # The projections' embedding half, step 1's keys and fc are computed once, of every token.
    once = 6 * (parts["fc"] + hidden * width) + 6 * (1 - share) * hidden * width
    each = 6 * (hidden * (width + heads) + parts["mlp"] + parts["lm_head"])
    label = 2 * hidden * (shape.vocab_size if work.full_vocabulary else shape.draft_vocab_size)
    keys = work.length * (1 - share / 2)  # replies stand at the end: what a mean supervised row looks back over
    if shape.sliding_window:
        keys = min(keys, shape.sliding_window)
    attention = 3.5 * 4 * keys * heads  # the backward pass does 2.5 times the forward's products
    return once + share * (work.steps * (each + attention) + label)


def training_memory(shape: DraftShape, work: Workload) -> dict[str, float]:
    """Bytes of GPU memory that the fused pass's tensors hold at its peak, by what they are (core/fused/unroll.py)."""
    parts, hidden, j = draft_parameters(shape), shape.hidden_size, work.steps
    heads, keys = shape.num_heads * shape.head_dim, 2 * shape.num_kv_heads * shape.head_dim
    width, inner, t, r = heads + keys, shape.intermediate_size, work.tokens, work.tokens * work.supervised
    # Kept for the backward pass: q, attention's output, keys and values, two residual sums, normed inputs, gate and up.
    saved = 2 * r * j * (2 * heads + keys + 5 * hidden + 2 * inner) + 2 * t * (
        2 * hidden + keys + shape.num_aux * hidden
    )
    if shape.fc_norm or shape.norm_before_fc:
        saved += 2 * t * shape.num_aux * hidden * (2 if shape.fc_norm else 1)
    gradients = 2 * r * j * (heads + hidden) + 2 * width * (
        t + (j - 1) * r
    )  # of attention's output, of outputs, of qkv
    passing = 2 * r * (3 * inner + 2 * hidden + heads) + 2 * t * width
    logits = min(work.logits_bytes, 2 * r * j * shape.draft_vocab_size)
    # While the loss is computed there is a chunk of logits, its inputs and gradients, the target's probabilities.
    loss = logits * (1 + 1 / j + 2 * hidden / shape.draft_vocab_size) + 2 * r * j * hidden
    parameters = sum(parts.values())
    frozen = 0 if shape.own_embedding else 2 * shape.vocab_size * hidden
    frozen += 2 * hidden * (shape.draft_vocab_size + (shape.vocab_size if work.full_vocabulary else 0))
    activations = saved + max(gradients + passing, loss)
    return {
        "weights and optimizer": 18.0 * parameters,  # float32: weights, gradients, two moments; bfloat16: weights
        "target's embedding and head": float(frozen),
        "activations": activations * (_FLOAT8_MEMORY if work.matmul == "fp8" else 1.0),
    }


def batch_bytes(shape: DraftShape, work: Workload, fp8_states: bool) -> float:
    """GPU memory of a batch that travels while another one is worked on (train/ahead.py), to be added to the above.

    Args:
        shape: of the draft.
        work: its tokens, and the share of them that have a last state.
        fp8_states: they travel in float8, and are decoded beside it.
    """
    states = 2.0 * work.tokens * shape.hidden_size * (shape.num_aux + work.supervised)
    return states * (1.5 if fp8_states else 1.0) + 17 * work.tokens  # ids, mask and positions; indices are less


def target_parameters(hf: Any) -> tuple[int, int]:
    """Parameters of a decoder by its Hugging Face config: all of them, and those that one token uses.

    An estimate within a few per cent for dense and mixture-of-experts decoders; grouped, latent or linear attention.
    """
    hidden, layers = hf.hidden_size, hf.num_hidden_layers
    inner = _first(hf, "intermediate_size") or 4 * hidden
    experts, moe, per_expert = _experts(hf)
    used = (_first(hf, "num_experts_per_tok", "moe_top_k") or 1) * per_expert if experts else 0
    shared = _first(hf, "n_shared_experts") * per_expert
    shared += 3 * hidden * _first(hf, "shared_expert_intermediate_size")
    common = _attention(hf) + (layers - moe) * 3 * hidden * inner + moe * shared
    head = hf.vocab_size * hidden
    return common + moe * experts * per_expert + _heads_parameters(hf), common + moe * used + head


def target_bytes(hf: Any, method: str | None) -> int:
    """Bytes of the weights under a quantization method; None: two a parameter."""
    every, (experts, moe, per_expert) = target_parameters(hf)[0], _experts(hf)
    if method == "mxfp4":  # the experts alone: four bits, and eight more for every 32 of them
        return round(2 * every - (2 - 4.25 / 8) * moe * experts * per_expert)
    # Embedding and lm_head stay in bfloat16.
    return every + _heads_parameters(hf) if method else 2 * every


def cache_bytes(hf: Any) -> int:
    """Bytes of a token in the target's key/value cache, in bfloat16; linear attention keeps none."""
    if rank := _first(hf, "kv_lora_rank"):
        return 2 * int(hf.num_hidden_layers) * (rank + _first(hf, "qk_rope_head_dim"))
    _, groups, head_dim = _heads(hf)
    return 2 * 2 * _full_layers(hf) * groups * head_dim


def _heads_parameters(hf: Any) -> int:
    """Of embedding and lm_head, which may be one."""
    return int(hf.vocab_size * hf.hidden_size * (1 if getattr(hf, "tie_word_embeddings", False) else 2))


def _experts(hf: Any) -> tuple[int, int, int]:
    """Routed experts of a layer, layers that have them, parameters of one."""
    count = _first(hf, "num_local_experts", "n_routed_experts", "num_experts")
    inner = _first(hf, "moe_intermediate_size", "intermediate_size") or 4 * hf.hidden_size
    layers = hf.num_hidden_layers - _first(hf, "first_k_dense_replace") if count else 0
    return count, layers, 3 * hf.hidden_size * inner


def _attention(hf: Any) -> int:
    """Of all layers."""
    hidden, layers, (heads, groups, head_dim) = hf.hidden_size, hf.num_hidden_layers, _heads(hf)
    if rank := _first(hf, "kv_lora_rank"):
        nope, rope, value = (_first(hf, f"{key}_head_dim") for key in ("qk_nope", "qk_rope", "v"))
        queries = _first(hf, "q_lora_rank")
        asked = queries * (hidden + heads * (nope + rope)) if queries else hidden * heads * (nope + rope)
        return int(layers * (asked + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden))
    full = _full_layers(hf)
    gate = heads if full < layers else 0  # Qwen3-Next and 3.5 gate attention's output
    keys, values = (_first(hf, f"linear_num_{k}_heads") * _first(hf, f"linear_{k}_head_dim") for k in ("key", "value"))
    linear = hidden * (2 * keys + 3 * values)
    return int(full * hidden * head_dim * (2 * heads + 2 * groups + gate) + (layers - full) * linear)


def _heads(hf: Any) -> tuple[int, int, int]:
    """Attention heads, key/value heads, width of one."""
    heads = _first(hf, "num_attention_heads") or 1
    return heads, _first(hf, "num_key_value_heads") or heads, _first(hf, "head_dim") or hf.hidden_size // heads


def _full_layers(hf: Any) -> int:
    """Layers with softmax attention; the others have linear attention."""
    kinds = getattr(hf, "layer_types", None) or []
    if kinds:
        return sum(kind != "linear_attention" for kind in kinds)
    every = _first(hf, "full_attention_interval")
    return hf.num_hidden_layers // every if every else int(hf.num_hidden_layers)


def _first(hf: Any, *keys: str) -> int:
    found = (getattr(hf, key, None) for key in keys)
    return next((int(value) for value in found if value), 0)
