"""Faults planted in an export, each served by a real engine without a word, each named by the diagnosis."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.core.checkpoint import Checkpoint
from draftsmith.core.config import Config
from draftsmith.core.draft import DraftModel
from draftsmith.core.draft_shape import resolve_shape
from draftsmith.core.target import resolve_target
from draftsmith.core.target_weights import load_target_weights
from draftsmith.core.vocab import build_mapping
from draftsmith.eval.diagnose import diagnose
from draftsmith.export.draft import from_checkpoint
from draftsmith.export.layout import draft_tensors, plain_config, write_draft
from draftsmith.hidden_state_capture.reader import StoredSample

pytestmark = pytest.mark.vllm
LAYERS, LAYER_IDS, VOCAB, TOKENS = 6, [2, 3, 4], 512, 40


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A tiny target, a random draft of it as if trained, one captured sample, and the export."""
    folder = tmp_path_factory.mktemp("diagnose")
    shape = LlamaConfig(
        num_hidden_layers=LAYERS, hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, vocab_size=VOCAB, max_position_embeddings=256, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(shape).float().eval()
    model.save_pretrained(folder / "target")
    engine_args = {"skip_tokenizer_init": True}
    config = Config.model_validate(
        {"target": {"path": str(folder / "target"), "dtype": "float32", "engine_args": engine_args}}
    )
    target = resolve_target(config.target)
    draft_shape = resolve_shape(config.draft, target, 3, 128)
    draft = DraftModel(draft_shape, load_target_weights(target).embed_VH)
    for p in draft.parameters():
        torch.nn.init.normal_(p, 1.0 if p.dim() == 1 else 0.0, 0.2)
    counts = torch.randint(1, 100, (VOCAB,)).numpy()
    mapping = build_mapping(counts, [0], 128)
    d2t, t2d = torch.as_tensor(mapping.d2t), torch.as_tensor(mapping.t2d)
    checkpoint = Checkpoint(folder, draft_shape, draft.state_dict(), d2t, t2d, LAYER_IDS, "rms", {})
    ids = torch.randint(1, VOCAB, (TOKENS,))
    with torch.no_grad():
        states = model(ids[None], output_hidden_states=True).hidden_states
    aux = torch.stack([states[k][0] for k in LAYER_IDS], dim=1)
    none = torch.zeros(0, dtype=torch.int32)
    sample = StoredSample("s/0", ids.int(), torch.zeros(TOKENS, dtype=torch.uint8), aux, aux[:0, 0], none)
    export = folder / "export"
    export.mkdir()
    exported = from_checkpoint(checkpoint)
    write_draft(export, draft_tensors(exported), plain_config(exported, target))
    return {"config": config, "target": target, "checkpoint": checkpoint, "sample": sample, "export": export}


def served(made, folder):
    return diagnose(made["config"], made["target"], made["checkpoint"], folder, made["sample"])


def without(name):
    def plant(tensors, config):
        del tensors[name]

    return plant


def layers(tensors, config):
    config["eagle_aux_hidden_state_layer_ids"] = [1, 2, 3]  # SGLang's convention, served as vLLM's


def zeroed_norm(tensors, config):
    tensors["midlayer.hidden_norm.weight"].zero_()


def rope(tensors, config):
    config["rope_theta"] = config["rope_parameters"]["rope_theta"] = 500.0


def absolute(tensors, config):
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))


def eight_bits(tensors, config):
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn).to(torch.bfloat16)


def flag(tensors, config):
    config["norm_before_residual"] = True


FAULTS = {
    "none": (lambda tensors, config: None, None),
    "layers": (layers, "layer ids"),
    "hidden_norm zeroed": (zeroed_norm, "hidden_norm"),
    "hidden_norm missing": (without("midlayer.hidden_norm.weight"), "hidden_norm"),
    "rope_theta": (rope, "rope"),
    "norm_before_residual": (flag, "mlp"),
    "lm_head in 8 bits": (eight_bits, "lm_head"),
    "d2t missing": (without("d2t"), "d2t"),
    "d2t absolute": (absolute, "d2t"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(made, tmp_path, fault):
    plant, named = FAULTS[fault]
    tensors = load_file(made["export"] / "model.safetensors")
    config = json.loads((made["export"] / "config.json").read_text())
    plant(tensors, config)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = served(made, tmp_path)
    assert found["first_difference"] == named, found["findings"]
    wrong = [f["part"] for f in found["findings"] if not f["agrees"]]
    # Each part is given what the engine made before it, so that a fault shows in its own place alone; but the residual
    # branch is not seen, and ends in the norm.
    more = {None: [], "layer ids": ["layer ids", "auxiliary states"], "mlp": ["mlp", "norm"]}
    assert wrong == more.get(named, [named]), found["findings"]
