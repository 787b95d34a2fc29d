"""What the tests share: a tiny random target, configs on it, and a run folder made by the real writers without vLLM.

Test modules cannot import one another (`--import-mode=importlib`), so helpers are fixtures that return functions;
`families.py` and `drafts.py` alone can be imported, since tests are parametrised by their names.
"""

import importlib.util
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from families import checkpoint_of, tokenizer_of

from draftsmith.core.config import Config
from draftsmith.core.config_io import dump_config
from draftsmith.core.run import RunFolder
from draftsmith.core.samples import Sample
from draftsmith.core.target import resolve_layer_ids, resolve_target

# A shell's background job ignores SIGINT, and so would everything that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

__all__ = ["checkpoint_of", "tokenizer_of"]

LAYERS, HIDDEN, VOCAB = 6, 64, 512
NUM_SAMPLES, NUM_EVAL = 24, 4
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Small enough that a stage takes a second.
SECTIONS: dict[str, dict[str, Any]] = {
    "run": {"name": "test"},
    "data": {
        "sampling": {"max_tokens": 16},
        "max_length": 64,
        "draft_vocab_size": 128,
        "eval_share": NUM_EVAL / NUM_SAMPLES,
    },
    "capture": {"shard_bytes": 32 * 1024},
    "train": {
        "ttt_steps": 3,
        "tokens_per_batch": 64,
        "epochs": 2,
        "learning_rate": 1e-3,
        "log_interval": 1,
        "eval_interval": 5,
        "save_interval": 4,
    },
    "eval": {"k": [1, 3], "bootstrap": 50},
    "export": {"verify": "offline"},  # the engine's part is tests/pipeline's
}


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Llama checkpoint and a byte-level tokenizer of its own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("target") / "tiny"
    tokenizer = _tokenizer()
    config = LlamaConfig(
        num_hidden_layers=LAYERS, hidden_size=HIDDEN, intermediate_size=128, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=VOCAB, max_position_embeddings=256, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.lm_head.weight.data *= 10  # else every next token is as likely as any other, and there is nothing to learn
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(["the user asks and the assistant answers the question of the user"] * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", chat_template=CHATML)


@pytest.fixture
def make_config(tmp_path: Path, tiny_target: Path) -> Callable[..., Config]:
    """`make_config(train={"epochs": 1})`: a small config on the tiny target, its run below `tmp_path`."""

    def make(**sections: dict[str, Any]) -> Config:
        return _config(tmp_path, tiny_target, sections)

    return make


def _config(folder: Path, target: Path, sections: dict[str, dict[str, Any]]) -> Config:
    here = {"run": {"dir": str(folder / "runs")}, "target": {"path": str(target)}}
    names = {**SECTIONS, **here, **sections}
    return Config.model_validate(
        {name: {**SECTIONS.get(name, {}), **here.get(name, {}), **sections.get(name, {})} for name in names}
    )


@pytest.fixture
def changed() -> Callable[..., Config]:
    """`changed(config, train={"epochs": 1})`: the same config with other values."""

    def change(config: Config, **sections: dict[str, Any]) -> Config:
        tree = config.model_dump()
        for name, values in sections.items():
            tree[name].update(values)
        return Config.model_validate(tree)

    return change


@pytest.fixture
def config_file(tmp_path: Path) -> Callable[[Config | str], str]:
    """`config_file(config_or_text)`: path of a YAML file that holds it."""

    def write(config: Config | str) -> str:
        path = tmp_path / "config.yaml"
        path.write_text(config if isinstance(config, str) else dump_config(config), encoding="utf-8")
        return str(path)

    return write


@pytest.fixture(scope="session")
def random_states() -> Callable[..., torch.Tensor]:
    """`random_states(tokens, seed)`: bf16 [T, A + 1, H] of the tiny target's size."""

    def make(tokens: int, seed: int = 0, columns: int = 4, hidden: int = HIDDEN) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(tokens, columns, hidden, generator=generator).to(torch.bfloat16)

    return make


@pytest.fixture(scope="session")
def synthetic_samples() -> list[Sample]:
    """Prompts and replies of random ids with a skewed distribution; the last ones are held out."""
    generator = torch.Generator().manual_seed(1)

    def ids(count: int) -> list[int]:
        return (torch.rand(count, generator=generator).pow(3) * VOCAB).long().tolist()

    samples = []
    for i in range(NUM_SAMPLES):
        prompt, reply = 4 + i % 5, 6 + i % 9
        split = "eval" if i >= NUM_SAMPLES - NUM_EVAL else "train"
        samples.append(
            Sample(f"c-{i:03d}/0", ids(prompt + reply), [(prompt, prompt + reply)], "synthetic", "stop", split)
        )
    return samples


@pytest.fixture(scope="session")
def _built_run(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_target: Path,
    synthetic_samples: list[Sample],
    random_states: Callable[..., torch.Tensor],
) -> Path:
    """A folder with `prompts.jsonl` and `runs/test`, prepared and captured; copied for every test that uses it."""
    from draftsmith.data.stage import prepare_inputs
    from draftsmith.hidden_state_capture.finish import Captured, finish
    from draftsmith.hidden_state_capture.stage import capture_inputs
    from draftsmith.hidden_state_capture.todo import Head

    folder = tmp_path_factory.mktemp("built")
    source = folder / "prompts.jsonl"
    source.write_text("".join(f'{{"prompt": "question {i}"}}\n' for i in range(NUM_SAMPLES)))
    config = _config(folder, tiny_target, {"data": {"sources": [{"path": str(source)}]}})
    run, target = RunFolder.of(config), resolve_target(config.target)
    run.open(config)
    _write_samples(config, run, synthetic_samples, prepare_inputs(config, target))
    _write_states(config, run, synthetic_samples, random_states)
    layer_ids = resolve_layer_ids(config.capture, LAYERS)
    heads, inputs = [Head.of(s) for s in synthetic_samples], capture_inputs(config, target, layer_ids, run)
    finish(Captured(config, target, layer_ids, heads, [], inputs, run.hidden_states))
    return folder


def _write_samples(config: Config, run: RunFolder, samples: list[Sample], inputs: dict[str, Any]) -> None:
    from draftsmith.core.atomic import sha256_file
    from draftsmith.core.manifest import write_manifest
    from draftsmith.core.samples import write_samples
    from draftsmith.core.vocab import build_mapping, count_tokens, save_mapping

    replies = [s.input_ids[a:b] for s in samples for a, b in s.loss_spans if s.split == "train"]
    save_mapping(
        run.vocab_mapping, build_mapping(count_tokens(replies, VOCAB), [0, 1], config.data.draft_vocab_size), {}
    )
    run.samples.mkdir()
    write_samples(run.samples, samples)
    counts = {"train": len(samples) - NUM_EVAL, "eval": NUM_EVAL}
    made = {"counts": counts, "vocab_mapping_sha256": sha256_file(run.vocab_mapping)}
    write_manifest(run.samples, "prepare", inputs, made)


def _write_states(config: Config, run: RunFolder, samples: list[Sample], states: Callable[..., torch.Tensor]) -> None:
    from draftsmith.core.atomic import write_json
    from draftsmith.hidden_state_capture.writer import SampleStates, ShardWriter, WriterConfig

    writer = ShardWriter(run.hidden_states, WriterConfig(config.capture.shard_bytes, config.capture.pending_bytes))
    for i, s in enumerate(samples):
        spans = [list(span) for span in s.loss_spans]
        writer.put(SampleStates(s.sample_id, s.input_ids, spans, states(len(s.input_ids), i), ready=bool))
    writer.flush()
    assert not writer.rejected
    probe = {"norm_form": "rms", "eps": 1e-6, "argmax_agreement": 1.0, "positions": 8, "state_errors": None}
    write_json(run.hidden_states / "probe.json", probe)


@pytest.fixture(scope="session")
def _trained_run(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path, _built_run: Path) -> Path:
    """The built run, trained too."""
    from draftsmith.train.stage import train

    folder = tmp_path_factory.mktemp("trained")
    with _one_thread():
        train(_copy(_built_run, _built_run, folder, tiny_target))
    return folder


def _copy(run: Path, built: Path, folder: Path, target: Path) -> Config:
    shutil.copytree(run / "runs", folder / "runs")
    return _config(folder, target, {"data": {"sources": [{"path": str(built / "prompts.jsonl")}]}})


@pytest.fixture
def synthetic_run(tmp_path: Path, tiny_target: Path, _built_run: Path) -> Config:
    """Config of a run of its own that is prepared and captured without vLLM; train, export and replay work on it."""
    return _copy(_built_run, _built_run, tmp_path, tiny_target)


@pytest.fixture
def trained_run(tmp_path: Path, tiny_target: Path, _built_run: Path, _trained_run: Path) -> Config:
    """`synthetic_run` after 11 steps of training."""
    return _copy(_trained_run, _built_run, tmp_path, tiny_target)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Bit-for-bit comparisons, and small matrices: one thread."""
    with _one_thread():
        yield


@pytest.fixture
def copied_plainly() -> Callable[[], AbstractContextManager[None]]:
    """`with copied_plainly():` training copies a batch as it takes it, on its own thread and stream: the reference."""
    from draftsmith.train.ahead import Ahead

    class Plain(Ahead):
        def begin(self, find: Any) -> None:
            self._find = find

        def take(self, following: Any) -> Any:
            work = self._find().to(self._device)
            self._find = following
            return work

    @contextmanager
    def place() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("draftsmith.train.loop.Ahead", Plain)
            yield

    return place


@pytest.fixture
def tree_of() -> Callable[[Path], dict[str, bytes]]:
    """`tree_of(folder)`: content of every file below it, to show that nothing changed."""

    def read(folder: Path) -> dict[str, bytes]:
        return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}

    return read


@pytest.fixture(scope="session")
def reference() -> ModuleType:
    """`parity/reference.py`: the float64 reference of the objective."""
    path = Path(__file__).parent / "parity" / "reference.py"
    spec = importlib.util.spec_from_file_location("parity_reference", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
