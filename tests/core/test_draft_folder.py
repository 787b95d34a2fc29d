"""Any EAGLE3 folder reads as vLLM reads it, and what vLLM would serve with made-up weights is refused by name."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from drafts import LLAMA3, YARN, make_checkpoint, make_shape
from safetensors.torch import load_file, save_file

from draftsmith.core.draft_folder import read_draft_folder
from draftsmith.core.errors import UserError
from draftsmith.core.speculators_format import from_plain, to_plain
from draftsmith.core.target import resolve_target

pytestmark = pytest.mark.usefixtures("one_thread")
INDEX = "model.safetensors.index.json"


def third_party_config(shape, **changes):
    """A plain config.json as other trainers write it: few keys, rope in the old spelling."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size, "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads, "num_hidden_layers": 1, "vocab_size": shape.vocab_size,
        "draft_vocab_size": shape.draft_vocab_size, "rms_norm_eps": shape.rms_norm_eps,
        "max_position_embeddings": shape.max_position_embeddings, "rope_theta": 10000.0, "rope_scaling": None,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 4], "hidden_act": "silu", "attention_bias": False,
    }  # fmt: skip
    return {k: v for k, v in {**config, **changes}.items() if v != "absent"}


@pytest.fixture
def draft_folder(tmp_path):
    """`draft_folder(shape, tensors=None, **config)`: (checkpoint, folder)."""

    def make(shape=None, tensors=None, **changes):
        checkpoint = make_checkpoint(tmp_path, shape or make_shape())
        folder = tmp_path / "draft"
        folder.mkdir()
        given = {**checkpoint.tensors, "d2t": checkpoint.d2t, "t2d": checkpoint.t2d} if tensors is None else tensors
        save_file(given, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(third_party_config(checkpoint.shape, **changes)))
        return checkpoint, folder

    return make


def edit(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def same(draft, checkpoint):
    assert draft.tensors.keys() == checkpoint.tensors.keys()
    assert all(torch.equal(draft.tensors[n], t) for n, t in checkpoint.tensors.items())
    assert torch.equal(draft.target_ids, checkpoint.target_ids)


# ---- layouts ---------------------------------------------------------------------------------------------------------


def test_a_plain_folder_of_another_trainer(draft_folder):
    checkpoint, folder = draft_folder()
    draft = read_draft_folder(folder)
    assert draft.shape == checkpoint.shape and draft.layer_ids == [1, 2, 4] and draft.layout == "hf"
    same(draft, checkpoint)


def test_the_other_name_of_the_layer(draft_folder):
    checkpoint, folder = draft_folder()
    renamed = {k.replace("midlayer.", "layers.0."): v for k, v in load_file(folder / "model.safetensors").items()}
    save_file(renamed, folder / "model.safetensors")
    same(read_draft_folder(folder), checkpoint)
    save_file({**renamed, "midlayer.hidden_norm.weight": torch.ones(64)}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"as `midlayer\.` and as `layers\.0\.`"):
        read_draft_folder(folder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_read_as_float32(draft_folder, dtype):
    checkpoint, folder = draft_folder()
    edit(folder, lambda t: t.update({k: v.to(dtype) for k, v in t.items() if v.is_floating_point()}))
    draft = read_draft_folder(folder)
    assert torch.equal(draft.tensors["fc.weight"], checkpoint.tensors["fc.weight"].to(dtype).float())


def split(folder, index=True):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[:4], "model-2.safetensors": names[4:]}
    for file, part in parts.items():
        save_file({n: tensors[n] for n in part}, folder / file)
    if index:
        weight_map = {n: file for file, part in parts.items() for n in part}
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("index", [True, False])
def test_several_files_with_an_index_or_without(draft_folder, index):
    checkpoint, folder = draft_folder()
    split(folder, index)
    same(read_draft_folder(folder), checkpoint)


def test_a_file_of_the_index_is_missing_or_lies_elsewhere(draft_folder):
    _, folder = draft_folder()
    split(folder)
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(UserError, match=r"model-2\.safetensors of it are missing"):
        read_draft_folder(folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"fc.weight": "../../x.safetensors"}}))
    with pytest.raises(UserError, match="names files outside the folder"):
        read_draft_folder(folder)


def test_a_tensor_in_two_files(draft_folder):
    _, folder = draft_folder()
    save_file({"fc.weight": torch.zeros(64, 192)}, folder / "other.safetensors")
    with pytest.raises(UserError, match=r"fc\.weight stand in two files"):
        read_draft_folder(folder)


@pytest.mark.parametrize("spoil", [lambda b: b[: len(b) // 2], lambda b: b"\x00" * 40])
def test_damaged_weights(draft_folder, spoil):
    _, folder = draft_folder()
    file = folder / "model.safetensors"
    file.write_bytes(spoil(file.read_bytes()))
    with pytest.raises(UserError, match=r"model\.safetensors: missing or damaged"):
        read_draft_folder(folder)


def to_torch_file(folder, content=None):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors if content is None else content, folder / "pytorch_model.bin")


def test_a_torch_file_of_nothing_but_tensors(draft_folder):
    checkpoint, folder = draft_folder()
    to_torch_file(folder)
    same(read_draft_folder(folder), checkpoint)


class Evil:
    """Runs when it is unpickled."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return Path.touch, (self.trace,)


@pytest.mark.parametrize("write", [torch.save, lambda obj, f: f.write_bytes(pickle.dumps(obj))], ids=["torch", "raw"])
def test_a_pickle_that_would_run_code_runs_none(draft_folder, tmp_path, write):
    _, folder = draft_folder()
    (folder / "model.safetensors").unlink()
    trace = tmp_path / "ran"
    write({"fc.weight": Evil(trace)}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model\.bin: (holds more than tensors|missing or damaged)"):
        read_draft_folder(folder)
    assert not trace.exists()
    pickle.loads(pickle.dumps(Evil(trace)))
    assert trace.exists()  # so it could have


def test_a_torch_file_of_something_else(draft_folder):
    _, folder = draft_folder()
    to_torch_file(folder, [1, 2])
    with pytest.raises(UserError, match="not a dictionary of tensors"):
        read_draft_folder(folder)


def test_nothing_there(tmp_path):
    with pytest.raises(UserError, match=r"no draft \(no config\.json\)"):
        read_draft_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="no weights"):
        read_draft_folder(tmp_path)
    save_file({"fc.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"config\.json: missing or damaged"):
        read_draft_folder(tmp_path)


# ---- speculators -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [{}, {"norm_before_fc": True}, {"fc_norm": True, "norm_output": True, "num_aux": 4}])
def test_a_speculators_folder(draft_folder, flags):
    shape = make_shape(**flags)
    ids = [1, 2, 4, 5][: shape.num_aux]
    checkpoint, folder = draft_folder(shape)
    said = {k: v for k, v in flags.items() if k != "num_aux"}
    plain = third_party_config(shape, **said, eagle_aux_hidden_state_layer_ids=ids, num_aux_hidden_states=shape.num_aux)
    config = from_plain({**plain, "norm_before_residual": False}, "owner/target", ["LlamaForCausalLM"], 3)
    (folder / "config.json").write_text(json.dumps(config))
    draft = read_draft_folder(folder)
    assert draft.shape == shape and draft.layer_ids == ids and draft.layout == "speculators"
    same(draft, checkpoint)
    del config["norm_before_residual"]
    (folder / "config.json").write_text(json.dumps(config))
    assert read_draft_folder(folder).shape.norm_before_residual is True  # vLLM's default in this layout


def test_vllm_translates_a_speculators_config_alike():
    base = pytest.importorskip("vllm.transformers_utils.configs.speculators.base")
    shape = make_shape(fc_norm=True, norm_output=True, num_aux=4, rope=LLAMA3)
    plain = third_party_config(shape, fc_norm=True, norm_output=True, num_aux_hidden_states=4, head_dim=16,
                               rope_parameters=LLAMA3, eagle_aux_hidden_state_layer_ids=[1, 2, 4, 5])  # fmt: skip
    config = from_plain({**plain, "norm_before_residual": False, "norm_before_fc": False}, "owner/target", [], 3)
    theirs = base.SpeculatorsConfig.extract_transformers_pre_trained_config(json.loads(json.dumps(config)))
    ours = to_plain(config, "config.json")
    assert {k: theirs[k] for k in ours} == ours
    assert theirs["num_aux_hidden_states"] == 4
    speculative = base.SpeculatorsConfig.extract_vllm_speculative_config(config)
    assert speculative == {"method": "eagle3", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speculators_model_type": "dflash"}, "a `dflash` speculator, not an EAGLE3 draft"),
        ({"transformer_layer_config": None}, "lacks transformer_layer_config"),
        ({"transformer_layer_config": {"model_type": "qwen3"}}, "its layer is of type `qwen3`"),
    ],
)
def test_speculators_that_are_not_ours(draft_folder, change, message):
    _, folder = draft_folder()
    config = from_plain(third_party_config(make_shape()), "owner/target", [], 3)
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(UserError, match=message):
        read_draft_folder(folder)


# ---- what config.json leaves out -------------------------------------------------------------------------------------


def test_the_defaults_are_those_that_vllm_reads_the_file_with(draft_folder):
    from transformers import LlamaConfig

    optional = ("num_key_value_heads", "rms_norm_eps", "max_position_embeddings", "rope_theta", "rope_scaling",
                "hidden_act", "num_hidden_layers", "attention_bias", "draft_vocab_size")  # fmt: skip
    shape = make_shape(draft_vocab_size=512, num_kv_heads=4)
    checkpoint, folder = draft_folder(shape, **dict.fromkeys(optional, "absent"))
    edit(folder, lambda t: (t.pop("d2t"), t.pop("t2d")))
    draft = read_draft_folder(folder)
    same(draft, checkpoint)
    theirs = LlamaConfig(**{k: v for k, v in third_party_config(shape).items() if k not in optional})
    ours = draft.shape
    assert (ours.num_kv_heads, ours.head_dim, ours.rms_norm_eps, ours.max_position_embeddings, ours.rope) == (
        theirs.num_key_value_heads, theirs.head_dim, theirs.rms_norm_eps, theirs.max_position_embeddings,
        {k: theirs.rope_parameters[k] for k in ("rope_type", "rope_theta")},
    )  # fmt: skip


@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"])
def test_a_size_that_nothing_else_tells_is_asked_for(draft_folder, key):
    _, folder = draft_folder(**{key: "absent"})
    with pytest.raises(UserError, match=f"lacks {key}"):
        read_draft_folder(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers: 2"),
        ({"attention_bias": True}, "attention_bias: True"),
        ({"hidden_act": "gelu"}, "hidden_act: gelu"),
        ({"target_hidden_size": 128}, "target_hidden_size: 128 beside hidden_size: 64"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state: false"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"head_dim": 32}, r"q_proj\.weight is \[64, 128\], by config\.json \[128, 128\]"),
        ({"fc_norm": True}, r"lacks fc_norm\.0\.weight"),
        ({"norm_before_fc": True}, r"lacks input_norm\.weight"),
        ({"num_aux_hidden_states": 4}, "fc.weight has 192 columns, and vLLM will look for 4"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 4, 5]}, "for 3 auxiliary states"),
        ({"eagle_aux_hidden_state_layer_ids": [4, 2, 1]}, "must ascend"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}}, "contradicts itself about the rope"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "of type dynamic"),
    ],
)
def test_a_draft_that_is_not_modelled_or_not_whole(draft_folder, changes, message):
    _, folder = draft_folder(**changes)
    with pytest.raises(UserError, match=message):
        read_draft_folder(folder)


@pytest.mark.parametrize("spelling", ["old", "older", "new", "both"])
@pytest.mark.parametrize("rope", [LLAMA3, YARN], ids=["llama3", "yarn"])
def test_every_spelling_of_the_rope(draft_folder, rope, spelling):
    scaling = {k: v for k, v in rope.items() if k != "rope_theta"}
    if spelling == "older":
        scaling["type"] = scaling.pop("rope_type")
    old = {"rope_theta": rope["rope_theta"], "rope_scaling": scaling}
    none = {"rope_theta": "absent", "rope_scaling": "absent"}
    new = {"rope_parameters": rope}
    _, folder = draft_folder(**{**(none if spelling == "new" else old), **(new if spelling in ("new", "both") else {})})
    assert read_draft_folder(folder).shape.rope == rope


def test_layers_that_are_not_named_are_the_targets_default(draft_folder, make_config):
    _, folder = draft_folder(eagle_aux_hidden_state_layer_ids="absent")
    with pytest.raises(UserError, match=r"names no layers; vLLM then takes 2, n // 2 and n - 3.*Name the target"):
        read_draft_folder(folder)
    target = resolve_target(make_config().target)  # 6 layers: vLLM would take 2, 3 and 3
    with pytest.raises(UserError, match=r"layers \[2, 3, 3\].*must ascend"):
        read_draft_folder(folder, target)


def test_sglangs_ids_are_read_as_vllms(draft_folder):
    _, folder = draft_folder(
        eagle_aux_hidden_state_layer_ids="absent", eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}
    )
    assert read_draft_folder(folder).layer_ids == [0, 1, 3]  # as vLLM takes them
    assert read_draft_folder(folder, convention="sglang").layer_ids == [1, 2, 4]
    edit_config(folder, layer_id_convention="sglang")
    assert read_draft_folder(folder).layer_ids == [1, 2, 4]
    with pytest.raises(UserError, match="sglang's, not vllm's"):
        read_draft_folder(folder, convention="vllm")


def test_no_lm_head_is_the_targets_where_the_vocabulary_is_full(draft_folder, make_config):
    _, folder = draft_folder(make_shape(draft_vocab_size=512))
    edit(folder, lambda t: [t.pop(n) for n in ("lm_head.weight", "d2t", "t2d")])
    with pytest.raises(UserError, match=r"no lm_head; it is the target's"):
        read_draft_folder(folder)
    target = resolve_target(make_config().target)
    theirs = load_file(Path(target.local_path) / "model.safetensors")["lm_head.weight"].float()
    draft = read_draft_folder(folder, target)
    assert torch.equal(draft.tensors["lm_head.weight"], theirs)
    assert torch.equal(draft.target_ids, torch.arange(512))


def test_an_embedding_of_its_own_is_kept(draft_folder):
    checkpoint, folder = draft_folder(make_shape(own_embedding=True))
    draft = read_draft_folder(folder)
    assert draft.shape.own_embedding
    same(draft, checkpoint)


def test_a_draft_for_another_target(draft_folder, make_config):
    _, folder = draft_folder(make_shape(hidden_size=32, head_dim=16), eagle_aux_hidden_state_layer_ids=[2, 4, 8])
    edit_config(folder, head_dim=16)
    with pytest.raises(UserError, match=r"hidden size 32, the target 64; layers \[2, 4, 8\], the target only 6"):
        read_draft_folder(folder, resolve_target(make_config().target))


# ---- silent traps of vLLM (X1, X2, X4, X5) ---------------------------------------------------------------------------


def drop(*names):
    return lambda tensors: [tensors.pop(name) for name in names]


TRAPS = {
    "hidden_norm": (drop("midlayer.hidden_norm.weight"), r"lacks midlayer\.hidden_norm\.weight"),
    "o_proj": (drop("midlayer.self_attn.o_proj.weight"), r"lacks midlayer\.self_attn\.o_proj\.weight"),
    "reduced without lm_head": (drop("lm_head.weight"), "vLLM would take the target's rows"),
    "reduced without d2t": (drop("d2t"), "no d2t; vLLM would propose the first 128"),
    "absolute d2t": (lambda t: t.update(d2t=t["d2t"] + torch.arange(128)), "its d2t holds absolute ids"),
    "d2t of floats": (lambda t: t.update(d2t=t["d2t"].float()), "d2t is torch.float32"),
    "doubled d2t": (lambda t: t.update(d2t=-torch.arange(128)), "two draft ids to one"),
    "t2d of other tokens": (lambda t: t.update(t2d=t["t2d"].roll(1)), "name different tokens"),
    "short t2d": (lambda t: t.update(t2d=t["t2d"][:-1]), r"t2d is \[511\]"),
    "quantised": (lambda t: t.update({"fc.weight": t["fc.weight"].to(torch.int8)}), "fc.weight is torch.int8"),
    "more": (lambda t: t.update({"midlayer.self_attn.q_norm.weight": torch.ones(16)}), "has midlayer.self_attn.q_norm"),
}


@pytest.mark.parametrize(("plant", "message"), TRAPS.values(), ids=TRAPS)
def test_a_trap_is_refused_by_name(draft_folder, plant, message):
    _, folder = draft_folder()
    edit(folder, plant)
    with pytest.raises(UserError, match=message):
        read_draft_folder(folder)


def test_what_others_keep_beside_the_draft_is_left_alone(draft_folder):
    checkpoint, folder = draft_folder()
    more = {"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(8), "verifier_norm.weight": torch.ones(64)}
    edit(folder, lambda t: t.update(more))
    same(read_draft_folder(folder), checkpoint)
    edit(folder, drop("t2d"))  # vLLM does not read it
    same(read_draft_folder(folder), checkpoint)


def test_a_full_vocabulary_with_a_mapping_that_vllm_would_not_apply(draft_folder):
    _, folder = draft_folder(make_shape(draft_vocab_size=512))
    edit(folder, lambda t: t["d2t"].add_(1))
    with pytest.raises(UserError, match="a full vocabulary with a d2t that moves tokens"):
        read_draft_folder(folder)
