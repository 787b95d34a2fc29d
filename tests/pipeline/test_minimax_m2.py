"""A tiny random MiniMax-M2 through every stage: the architecture this project exists for, at a size for a CPU."""

import json
import shutil

import pytest
import torch
from transformers import AutoTokenizer, MiniMaxM2Config, MiniMaxM2ForCausalLM

from draftsmith.core.embedded import embedded_checkpoint
from draftsmith.hidden_state_capture.reader import HiddenStateStore

pytestmark = pytest.mark.vllm


def write_tiny_m2(folder):
    """MiniMax-M2 of 6 layers and 8 experts with SmolLM2's tokenizer.

    vLLM's router on CPU knows only `softmax`; the real checkpoints' `sigmoid` with a bias needs a GPU.
    """
    torch.manual_seed(0)
    config = MiniMaxM2Config(
        vocab_size=49152, hidden_size=128, intermediate_size=64, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=512,
        bos_token_id=1, eos_token_id=2, tie_word_embeddings=False, initializer_range=0.08,
        rope_parameters={"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
    )  # fmt: skip
    model = MiniMaxM2ForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        # Near zero, softmax over the chosen experts and transformers' normed sigmoid are the same weights.
        for layer in model.model.layers:
            layer.mlp.gate.weight.mul_(0.02)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(embedded_checkpoint()).save_pretrained(folder)
    path = folder / "config.json"
    written = json.loads(path.read_text())
    written |= {"scoring_func": "softmax", "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer"}
    written["rotary_dim"] = 32
    path.write_text(json.dumps(written))


@pytest.fixture(scope="module")
def run(tmp_path_factory, cli):
    folder = tmp_path_factory.mktemp("m2")
    write_tiny_m2(folder / "tiny-m2")
    config = folder / "config.yaml"
    config.write_text(
        f"""
run: {{name: m2, dir: {folder}}}
target: {{path: {folder}/tiny-m2, dtype: auto}}
data:
  sources: [{{path: demo-prompts, limit: 12}}]
  sampling: {{max_tokens: 16}}
  max_length: 256
  eval_share: 0.3
  draft_vocab_size: 1024
draft: {{num_heads: 4, num_kv_heads: 4, intermediate_size: 192}}
train: {{ttt_steps: 2, tokens_per_batch: 512, epochs: 2}}
eval: {{k: [2], concurrency: [4]}}
"""
    )
    for stage in ("prepare", "capture", "train", "export", "eval"):
        cli(stage, "--config", config)
    return folder / "m2"


def test_states_agree_with_transformers_at_every_layer(run):
    manifest = HiddenStateStore(run / "hidden_states").manifest
    assert manifest["layer_ids"] == [3, 4, 5]  # 2, n//2 and n-3 collide on six layers
    assert manifest["probe"]["argmax_agreement"] >= 0.95
    assert all(error < 0.03 for error in manifest["probe"]["state_errors"].values())


def test_export_is_a_minimax_draft_and_is_served(run):
    config = json.loads((run / "export" / "config.json").read_text())
    assert config["architectures"] == ["Eagle3MiniMaxM2ForCausalLM"]
    assert config["rope_theta"] == 5e6
    assert "partial_rotary_factor" not in config["rope_parameters"]  # the draft rotates whole heads
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (4, 4, 64)
    report = json.loads((run / "eval" / "report.json").read_text())
    assert report["served"][0]["drafts"] > 0
    [replayed] = [r for r in report["replay"] if r["k"] == 2]
    assert report["served"][0]["acceptance_length"] == pytest.approx(replayed["acceptance_length"], rel=0.05)


def test_another_runs_draft_is_replayed_and_served_on_this_target(run, cli):
    """As M2.5's on M2.7: `eval --draft`; here it is the run's own under another name, so that the figures are known."""
    other = run.parent / "m2-5" / "export"
    shutil.copytree(run / "export", other)
    cli("eval", "--config", run.parent / "config.yaml", "--draft", other)
    theirs, own = (json.loads((run / name / "report.json").read_text()) for name in ("eval-m2-5", "eval"))
    assert theirs["replay"] == own["replay"] and theirs["objective"] is None
    assert theirs["served"][0]["drafts"] > 0
    assert theirs["served"][0]["acceptance_length"] == pytest.approx(own["served"][0]["acceptance_length"], rel=0.05)
