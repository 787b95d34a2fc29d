"""The exported draft: it reads back as what was trained, and every way of being silently wrong has a name."""

import json
from types import SimpleNamespace

import pytest
import torch
from drafts import LLAMA3, YARN, make_checkpoint, make_shape

from draftsmith.core.draft_folder import read_draft_folder
from draftsmith.core.draft_shape import resolve_shape
from draftsmith.core.target import resolve_target
from draftsmith.export.contract import find_problems, required_tensors
from draftsmith.export.draft import Draft, from_checkpoint
from draftsmith.export.layout import draft_tensors, plain_config, write_draft

pytestmark = pytest.mark.usefixtures("one_thread")
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def target_like(**values):
    return SimpleNamespace(hf_config=SimpleNamespace(**{"model_type": "llama", "eos_token_id": 1, **values}))


@pytest.fixture
def exported(tmp_path):
    """`exported(shape)`: (checkpoint, tensors, config) as they would be written."""

    def make(shape=None):
        checkpoint = make_checkpoint(tmp_path, shape or make_shape())
        return (
            checkpoint,
            draft_tensors(from_checkpoint(checkpoint)),
            plain_config(from_checkpoint(checkpoint), target_like()),
        )

    return make


def config_of(shape, target=None):
    """The config.json of a draft of that shape over the first layers of [1, 2, 4, 5]."""
    draft = Draft(shape, {}, torch.zeros(0), [1, 2, 4, 5][: shape.num_aux], "test")
    return plain_config(draft, target or target_like())


def read_back(folder, tensors, config):
    folder.mkdir()
    write_draft(folder, tensors, config)
    return read_draft_folder(folder)


SHAPES = {
    "plain": make_shape(),
    "norms": make_shape(norm_before_residual=True, fc_norm=True, norm_output=True),
    "norm_before_fc": make_shape(norm_before_fc=True),
    "4 aux states": make_shape(num_aux=4, fc_norm=True),
    "own attention": make_shape(num_heads=8, num_kv_heads=8, head_dim=32),
    "full vocabulary": make_shape(draft_vocab_size=512),
    "llama3": make_shape(rope=LLAMA3),
    "yarn": make_shape(rope=YARN),
    "partial rotary": make_shape(rope={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
    "sliding window": make_shape(sliding_window=32),
    "own embedding": make_shape(own_embedding=True),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_an_export_reads_back_as_what_was_trained(exported, tmp_path, shape):
    checkpoint, tensors, config = exported(shape)
    draft = read_back(tmp_path / "export", tensors, config)
    assert draft.shape == shape and draft.layer_ids == checkpoint.layer_ids
    assert torch.equal(draft.target_ids, checkpoint.target_ids)
    assert draft.tensors.keys() == checkpoint.tensors.keys()
    for name, tensor in checkpoint.tensors.items():
        assert torch.equal(draft.tensors[name], tensor.bfloat16().float()), name
    assert find_problems(shape, tensors, json.loads((tmp_path / "export/config.json").read_text())) == []


def test_the_embedding_stays_with_the_target_unless_it_was_trained(exported):
    assert not [name for name in exported()[1] if "embed" in name]
    checkpoint, tensors, config = exported(SHAPES["own embedding"])
    assert tensors["embed_tokens.weight"].shape == (512, 64)
    del tensors["embed_tokens.weight"]
    assert find_problems(checkpoint.shape, tensors, config) == ["missing tensor embed_tokens.weight"]


def test_a_full_vocabulary_has_no_mapping(exported):
    assert not {"d2t", "t2d"} & exported(SHAPES["full vocabulary"])[1].keys()


# ---- the contract ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [{"fc_norm": True}, {"norm_before_fc": True}])
def test_every_tensor_of_the_draft_is_required(exported, flags):
    checkpoint, tensors, config = exported(make_shape(**flags))
    assert required_tensors(checkpoint.shape).keys() == tensors.keys()
    for name in tensors:
        some = {k: v for k, v in tensors.items() if k != name}
        assert find_problems(checkpoint.shape, some, config) == [f"missing tensor {name}"]


@pytest.mark.parametrize(
    "name", ["midlayer.hidden_norm.weight", "midlayer.self_attn.o_proj.weight", "lm_head.weight", "d2t"]
)
def test_the_tensors_that_vllm_would_make_up_are_among_them(name):
    assert name in required_tensors(make_shape())


def spoil(name, change):
    def apply(tensors):
        tensors[name] = change(tensors[name])

    return apply


def swap_t2d(t2d):
    return ~t2d


def nan_at_0(tensor):
    tensor = tensor.clone()
    tensor.view(-1)[0] = float("nan")
    return tensor


TRAPS = {
    "absolute ids": (spoil("d2t", lambda d: d + torch.arange(len(d))), "absolute ids instead of offsets"),
    "small absolute ids": (spoil("d2t", lambda d: torch.arange(len(d))), "d2t and t2d name different tokens"),
    "offsets of zero": (spoil("d2t", torch.zeros_like), "d2t and t2d name different tokens"),
    "negative": (spoil("d2t", lambda d: d - 1), "d2t points outside the target's vocabulary"),
    "duplicate": (spoil("d2t", lambda d: torch.where(torch.arange(len(d)) == 1, d - 4, d)), "two draft ids to one"),
    "wrong t2d": (spoil("t2d", swap_t2d), "d2t and t2d name different tokens"),
    "rolled t2d": (spoil("t2d", lambda t: t.roll(1)), "d2t and t2d name different tokens"),
    "int32 d2t": (spoil("d2t", lambda d: d.int()), "d2t is torch.int32"),
    "short d2t": (spoil("d2t", lambda d: d[:-1]), "d2t has shape (127,), not (128,)"),
    "unexpected": (lambda t: t.update(embed_tokens=torch.zeros(2)), "unexpected tensor embed_tokens"),
    "transposed": (spoil("fc.weight", lambda w: w.T), "fc.weight has shape (192, 64), not (64, 192)"),
    "not finite": (spoil("lm_head.weight", nan_at_0), "lm_head.weight has values that are not finite"),
    "target-shaped head": (spoil("lm_head.weight", lambda w: w.repeat(4, 1)), "lm_head.weight has shape (512, 64)"),
}


@pytest.mark.parametrize(("plant", "named"), TRAPS.values(), ids=TRAPS)
def test_a_trap_in_the_tensors_is_named(exported, plant, named):
    checkpoint, tensors, config = exported()
    plant(tensors)
    assert named in "; ".join(find_problems(checkpoint.shape, tensors, config))


# X3: rope_theta lost, positions cut; X4: flags and the number of auxiliary states not carried.
CONFIG_TRAPS = {
    "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32,
    "vocab_size": 500, "draft_vocab_size": 512, "rms_norm_eps": 1e-6, "max_position_embeddings": 2048,
    "num_aux_hidden_states": 4, "rope_theta": 500000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    **dict.fromkeys(FLAGS, True),
}  # fmt: skip


def test_layer_ids_off_by_one_or_left_out_are_named(exported):  # X1
    checkpoint, tensors, config = exported()
    assert find_problems(checkpoint.shape, tensors, config, [1, 2, 4]) == []
    key = "eagle_aux_hidden_state_layer_ids"
    nested = {"eagle_config": {key: [0, 1, 3], "use_aux_hidden_state": True}}
    for wrong in ({key: [0, 1, 3]}, {key: None}, {**nested}, {**nested, "layer_id_convention": "sglang"}):
        (problem,) = find_problems(checkpoint.shape, tensors, {**config, **wrong}, [1, 2, 4])
        assert "the draft was trained on [1, 2, 4]" in problem
    del config[key]
    assert len(find_problems(checkpoint.shape, tensors, config, [1, 2, 4])) == 1
    sglang = {**config, **nested, "layer_id_convention": "sglang"}
    assert find_problems(checkpoint.shape, tensors, sglang, [1, 2, 4]) == []


@pytest.mark.parametrize(("key", "wrong"), CONFIG_TRAPS.items(), ids=CONFIG_TRAPS)
def test_a_wrong_or_missing_key_of_the_config_is_named(exported, key, wrong):
    checkpoint, tensors, config = exported()
    (problem,) = find_problems(checkpoint.shape, tensors, {**config, key: wrong})
    assert problem.startswith(f"config.json says {key}: ")
    del config[key]
    assert find_problems(checkpoint.shape, tensors, config) == [f"config.json lacks {key}"]


def test_every_problem_is_named_at_once(exported):
    checkpoint, tensors, config = exported()
    del tensors["lm_head.weight"]
    tensors["more"] = torch.zeros(1)
    problems = find_problems(checkpoint.shape, tensors, {**config, "head_dim": 1})
    assert len(problems) == 3


# ---- config.json -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", FLAGS)
def test_every_architecture_flag_reaches_the_config(flag):
    config = config_of(make_shape(**{flag: True}))
    assert {f: config[f] for f in FLAGS} == {f: f == flag for f in FLAGS}


def test_four_layers_reach_the_config():
    config = config_of(make_shape(num_aux=4))
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4, 5] and config["num_aux_hidden_states"] == 4


@pytest.mark.parametrize("rope", [LLAMA3, YARN], ids=["llama3", "yarn"])
def test_rope_scaling_is_there_in_both_spellings(rope):
    config = config_of(make_shape(rope=rope))
    assert config["rope_parameters"] == rope and config["rope_theta"] == rope["rope_theta"]
    assert config["rope_scaling"] == {k: v for k, v in rope.items() if k != "rope_theta"}


def test_a_sliding_window_is_where_vllm_looks_for_it():
    config = config_of(make_shape(sliding_window=32))
    assert config["layer_types"] == ["sliding_attention"] and config["sliding_window"] == 32
    # Without one, neither key: vLLM would look for a window as soon as it finds layer_types.
    assert not {"layer_types", "sliding_window"} & config_of(make_shape()).keys()


def test_transformers_reads_window_and_partial_rotary_as_they_were_meant(exported, tmp_path):
    from transformers import AutoConfig

    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64}
    shape = make_shape(sliding_window=32, rope={**rope, "partial_rotary_factor": 0.5})
    _, tensors, config = exported(shape)
    assert read_back(tmp_path / "export", tensors, config).shape == shape
    read = AutoConfig.from_pretrained(tmp_path / "export")
    assert read.layer_types == ["sliding_attention"] and read.sliding_window == 32
    assert read.rope_parameters["partial_rotary_factor"] == 0.5


def test_partial_rotary_is_there_in_both_spellings():
    config = config_of(SHAPES["partial rotary"])
    assert config["rope_parameters"]["partial_rotary_factor"] == config["partial_rotary_factor"] == 0.5
    assert "partial_rotary_factor" not in config_of(make_shape())


def test_plain_rope_has_no_scaling():
    assert config_of(make_shape())["rope_scaling"] is None


def test_transformers_reads_the_rope_as_it_was_meant(exported, tmp_path):
    from transformers import AutoConfig

    _, tensors, config = exported(SHAPES["yarn"])
    read_back(tmp_path / "export", tensors, config)
    read = AutoConfig.from_pretrained(tmp_path / "export").rope_parameters
    assert {k: read[k] for k in YARN} == YARN


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [
        ("llama", "LlamaForCausalLMEagle3"),
        ("qwen3", "LlamaForCausalLMEagle3"),
        ("minimax_m2", "Eagle3MiniMaxM2ForCausalLM"),
    ],
)
def test_the_architecture_follows_the_target(model_type, architecture):
    config = config_of(make_shape(), target_like(model_type=model_type))
    assert config["architectures"] == [architecture]


def test_a_minimax_target_resolves_to_a_draft_that_vllm_knows(make_config, tmp_path):
    from transformers import MiniMaxM2Config

    folder = tmp_path / "minimax"
    sizes = {"num_hidden_layers": 8, "hidden_size": 64, "head_dim": 32, "num_attention_heads": 4, "vocab_size": 512}
    MiniMaxM2Config(**sizes, rotary_dim=16).save_pretrained(folder)
    config = make_config(target={"path": str(folder)}, draft={"num_heads": 4, "num_kv_heads": 4})
    target = resolve_target(config.target)
    shape = resolve_shape(config.draft, target, 3, 128)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (4, 4, 32)
    # The target rotates a part of each head, the draft all of it: vLLM reads this key.
    assert target.hf_config.rope_parameters["partial_rotary_factor"] == 0.5
    assert "partial_rotary_factor" not in shape.rope
    assert config_of(shape, target)["architectures"] == ["Eagle3MiniMaxM2ForCausalLM"]
