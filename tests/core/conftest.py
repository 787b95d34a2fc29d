"""A config on MiniMax-M2.5's shape, and a machine of any size."""

import json
import sys
from collections import namedtuple

import pytest

from draftsmith.core import cli, plan
from draftsmith.core.config import Config

# As in the checkpoint's config.json.
MINIMAX = {
    "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "hidden_size": 3072,
    "intermediate_size": 1536, "num_hidden_layers": 62, "num_attention_heads": 48, "num_key_value_heads": 8,
    "head_dim": 128, "rotary_dim": 64, "rope_theta": 5000000, "vocab_size": 200064, "num_local_experts": 256,
    "num_experts_per_tok": 8, "scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True,
    "max_position_embeddings": 196608, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "fmt": "float8_e4m3fn", "weight_block_size": [128, 128]},
}  # fmt: skip


@pytest.fixture
def minimax(tmp_path):
    """A config on MiniMax-M2.5's shape; nothing but its config.json is there."""

    def make(**sections):
        folder = tmp_path / "MiniMax-M2.5"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(MINIMAX))
        tree = {
            "run": {"name": "m", "dir": str(tmp_path / "runs")},
            "target": {"path": str(folder), "tensor_parallel": 2},
            "data": {"sources": [], "max_length": 8192, "draft_vocab_size": 32000},
            "draft": {"num_heads": 48, "num_kv_heads": 48, "head_dim": 128, "intermediate_size": 9216},
            "train": {"epochs": 1, "tokens_per_batch": 16384},
        }
        tree["data"]["sources"] = [{"path": "demo-prompts"}]
        for name, values in sections.items():
            tree.setdefault(name, {}).update(values)
        return Config.model_validate(tree)

    return make


@pytest.fixture
def roomy(monkeypatch):
    """A machine where disk and memory are as large as a test says."""
    disk, memory = namedtuple("disk", "total used free"), namedtuple("memory", "total")

    def make(free=100e12, total=2e12):
        monkeypatch.setattr(plan.shutil, "disk_usage", lambda _: disk(free, 0, int(free)))
        monkeypatch.setattr(plan.psutil, "virtual_memory", lambda: memory(total))

    make()
    return make


@pytest.fixture
def run_cli(monkeypatch, capsys):
    """`run_cli("train", "--config", file)`: exit code, stdout, stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["draftsmith", *map(str, arguments)])
        capsys.readouterr()
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        return (code, *capsys.readouterr())

    return run


@pytest.fixture
def refused(run_cli):
    """`refused("train", ...)`: the message of a command that must end with exit code 2."""

    def run(*arguments):
        code, _, error = run_cli(*arguments)
        assert code == 2, error
        assert error.startswith("error: ") and error.endswith(".\n") and "\n\n" not in error
        assert "Traceback" not in error
        return error

    return run
