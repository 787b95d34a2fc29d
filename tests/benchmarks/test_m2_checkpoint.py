"""The random MiniMax-M2 that benchmarks/scale runs: tensors as transformers writes them, float8 blocks, tokens."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoTokenizer, MiniMaxM2Config, MiniMaxM2ForCausalLM

SCALE = Path(__file__).parents[2] / "benchmarks" / "scale"


@pytest.fixture(scope="module")
def maker():
    spec = importlib.util.spec_from_file_location("m2_checkpoint", SCALE / "m2_checkpoint.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def tensors(folder):
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found |= {key: opened.get_slice(key).get_shape() for key in opened.keys()}  # noqa: SIM118
    return found


def test_names_and_shapes_are_those_that_transformers_writes(maker, tmp_path):
    config = maker.write_checkpoint(tmp_path / "ours", 2, fp8=False, tiny=True)
    kept = {k: v for k, v in config.items() if k not in ("architectures", "model_type", "torch_dtype")}
    MiniMaxM2ForCausalLM(MiniMaxM2Config(**kept)).save_pretrained(tmp_path / "theirs")
    assert tensors(tmp_path / "ours") == tensors(tmp_path / "theirs")
    model, loading = MiniMaxM2ForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    assert torch.isfinite(model(torch.arange(8)[None]).logits).all()


def test_float8_blocks_give_the_weights_back(maker, tmp_path):
    weight = (torch.randn(256, 384) * 0.02).to(torch.bfloat16)
    quantized, scale = maker._blocks(weight)
    assert quantized.dtype == torch.float8_e4m3fn and scale.shape == (2, 3)
    back = quantized.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert float((back - weight.float()).norm() / weight.float().norm()) < 0.04
    config = maker.write_checkpoint(tmp_path, 1, fp8=True, tiny=True)
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    names = tensors(tmp_path)
    assert names["model.layers.0.block_sparse_moe.experts.7.w2.weight_scale_inv"] == [2, 1]
    assert (
        "lm_head.weight_scale_inv" not in names and "model.layers.0.block_sparse_moe.gate.weight_scale_inv" not in names
    )


def test_the_vocabulary_is_whole_and_markers_stand_where_the_real_ones_do(maker, tmp_path):
    tokenizer = maker._tokenizer(200064, maker._special_ids(200064), maker.TEMPLATE)
    tokenizer.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == 200064 and tokenizer.eos_token_id == 200020
    assert tokenizer.convert_tokens_to_ids("]~!b[") == 200034
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hé 🙂"}], add_generation_prompt=True)["input_ids"]
    assert ids[0] == 200034 and 200020 in ids
    assert "Hé 🙂" in tokenizer.decode(ids)


@pytest.mark.vllm
@pytest.mark.long
def test_the_whole_pipeline_runs_in_one_command_at_a_tiny_shape(tmp_path):
    out = tmp_path / "out.json"
    command = [sys.executable, str(SCALE / "m2_wide.py"), "--tiny", "--out", str(out), "--folder", str(tmp_path)]
    subprocess.run(command, check=True, timeout=900)
    found = json.loads(out.read_text())
    assert set(found["seconds"]) == {"checkpoint", "prepare", "capture", "train", "export", "eval", "all"}
    for name, pair in found["planned_and_measured"].items():
        assert pair["ratio"] == pytest.approx(1.0, abs=0.1), name
    assert found["evaluation"]["export"] is True and found["evaluation"]["drafts"] > 0
    assert found["loss"][1] < found["loss"][0] and found["probe"]["argmax_agreement"] >= 0.95
