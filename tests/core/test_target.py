"""The target as every stage sees it: layer ids that are valid for any depth, and refusals that say what to do."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.core.config import CaptureConfig, TargetConfig
from draftsmith.core.errors import UserError
from draftsmith.core.target import load_tokenizer, resolve_layer_ids, resolve_target, weight_bytes
from draftsmith.core.target_weights import load_target_weights


def ids_for(layers, ids="auto"):
    return resolve_layer_ids(CaptureConfig(layer_ids=ids), layers)


@pytest.fixture
def own_target(tiny_target, tmp_path):
    """A copy of the tiny target that a test may change, and a setter for keys of its config.json."""
    folder = tmp_path / "target"
    shutil.copytree(tiny_target, folder)

    def set_config(**values):
        raw = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(raw | values))
        return folder

    return set_config


def refused(do, *args):
    with pytest.raises(UserError) as error:
        do(*args)
    return str(error.value)


# ---- layer ids ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", range(4, 101))
def test_auto_layer_ids_are_valid_at_every_depth(layers):
    ids = ids_for(layers)
    assert len(ids) == 3 and ids == sorted(set(ids))
    assert ids[0] >= 0 and ids[-1] < layers
    assert ids_for(layers, ids) == ids


@pytest.mark.parametrize(("layers", "ids"), [(30, [2, 15, 27]), (62, [2, 31, 59]), (7, [2, 3, 4])])
def test_auto_layer_ids_are_those_of_vllm(layers, ids):
    assert ids_for(layers) == ids


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_auto_layer_ids_of_a_shallow_target_are_refused(layers):
    message = refused(ids_for, layers)
    assert f"this one has {layers}" in message and "List three or more ids yourself" in message


@pytest.mark.parametrize(
    ("ids", "problem"),
    [
        ([2, 3, 6], "[6] is outside 0..5"),
        ([-1, 2, 3], "[-1] is outside 0..5"),
        ([3, 2, 4], "not ascending"),
        ([2, 2, 4], "given twice"),
        ([2, 4], "2 ids; an EAGLE3 draft takes 3 or 4"),
        ([0, 1, 2, 3, 4], "5 ids"),
        ([], "0 ids"),
    ],
)
def test_wrong_layer_ids_are_refused_with_the_convention(ids, problem):
    message = refused(ids_for, 6, ids)
    assert problem in message and "id k is the state after k layers" in message


@pytest.mark.parametrize("ids", [[0, 1, 2], [3, 4, 5], [0, 2, 4, 5]])
def test_three_or_four_ascending_ids_are_taken_as_they_are(ids):
    assert ids_for(6, ids) == ids


# ---- where it lies and what it is ------------------------------------------------------------------------------------


def test_the_shape_is_read_from_the_checkpoint(tiny_target):
    target = resolve_target(TargetConfig(path=str(tiny_target)))
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (6, 64, 512)
    assert target.local_path == tiny_target and target.revision is None
    assert weight_bytes(target) == (tiny_target / "model.safetensors").stat().st_size


def test_a_folder_without_config_json_is_refused(tmp_path):
    message = refused(resolve_target, TargetConfig(path=str(tmp_path)))
    assert f"{tmp_path} has no config.json" in message


@pytest.mark.parametrize("path", ["/nowhere/at/all", "no-such-model", "a/b/c"])
def test_a_path_that_is_nothing_is_refused(path):
    message = refused(resolve_target, TargetConfig(path=path))
    assert f"`{path}` is neither a folder nor a hub id" in message


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"model_type": "no_such_type"}', '{"model_type": "vit"}'])
def test_a_config_json_that_is_no_language_model_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    assert str(tmp_path) in refused(resolve_target, TargetConfig(path=str(tmp_path)))


def test_code_of_the_target_is_not_run_without_consent(own_target):
    folder = own_target(model_type="unheard_of", auto_map={"AutoConfig": "evil.Config"})
    (folder / "evil.py").write_text("raise SystemExit('it ran')")
    message = refused(resolve_target, TargetConfig(path=str(folder)))
    assert "auto_map" in message and "target.trust_remote_code=true" in message


def test_auto_map_of_a_known_type_needs_no_consent(own_target):
    folder = own_target(auto_map={"AutoConfig": "own.Config"})
    assert resolve_target(TargetConfig(path=str(folder))).num_layers == 6


# ---- tokenizer and template ------------------------------------------------------------------------------------------


def test_the_tokenizer_encodes_any_text_and_renders_chats(tiny_target):
    config = TargetConfig(path=str(tiny_target))
    tokenizer = load_tokenizer(resolve_target(config), config)
    text = "naïve 日本語 🙂\n\ttrailing "
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_token == "<|im_end|>" and len(tokenizer) < 512
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n"


def remove_template(folder):
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    raw = json.loads((folder / "tokenizer_config.json").read_text())
    raw.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(raw))


def test_a_target_without_a_chat_template_is_refused(own_target):
    remove_template(folder := own_target())
    config = TargetConfig(path=str(folder))
    message = refused(load_tokenizer, resolve_target(config), config)
    assert "has no chat template" in message and "Set target.chat_template" in message


def test_a_template_from_a_file_takes_the_place_of_the_own_one(own_target, tmp_path):
    remove_template(folder := own_target())
    (tmp_path / "chat.jinja").write_text("{{ messages[0]['content'] }}!")
    config = TargetConfig(path=str(folder), chat_template=str(tmp_path / "chat.jinja"))
    tokenizer = load_tokenizer(resolve_target(config), config)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi!"


def test_a_missing_template_file_is_named(tiny_target, tmp_path):
    config = TargetConfig(path=str(tiny_target), chat_template=str(tmp_path / "none.jinja"))
    assert "none.jinja does not exist" in refused(load_tokenizer, resolve_target(config), config)


def test_a_folder_without_a_tokenizer_is_refused(own_target):
    folder = own_target()
    for file in folder.glob("*token*"):
        file.unlink()
    config = TargetConfig(path=str(folder))
    assert "no tokenizer can be loaded" in refused(load_tokenizer, resolve_target(config), config)


def change_weights(folder):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file({k: v + 1 for k, v in tensors.items()}, file, metadata={"format": "pt"})


def change_template(folder):
    (folder / "chat_template.jinja").write_text("another")


def change_tokenizer(folder):
    raw = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(raw, indent=1))


@pytest.mark.parametrize("change", [change_weights, change_template, change_tokenizer])
def test_the_fingerprint_tells_a_changed_target(own_target, change):
    config = TargetConfig(path=str(own_target()))
    before = resolve_target(config).fingerprint(config)
    change(own_target())
    assert resolve_target(config).fingerprint(config) != before


def test_the_fingerprint_tells_another_template_file(tiny_target, tmp_path):
    (tmp_path / "a.jinja").write_text("{{ messages }}")
    plain = TargetConfig(path=str(tiny_target))
    own = TargetConfig(path=str(tiny_target), chat_template=str(tmp_path / "a.jinja"))
    target = resolve_target(plain)
    assert target.fingerprint(own) != target.fingerprint(plain)


# ---- weights ---------------------------------------------------------------------------------------------------------


def weights_of(folder):
    return load_target_weights(resolve_target(TargetConfig(path=str(folder))))


def test_an_untied_head_is_the_checkpoints_own(tiny_target):
    weights, stored = weights_of(tiny_target), load_file(tiny_target / "model.safetensors")
    assert torch.equal(weights.head_VH, stored["lm_head.weight"])
    assert torch.equal(weights.embed_VH, stored["model.embed_tokens.weight"])
    assert torch.equal(weights.norm_H, stored["model.norm.weight"])
    assert not torch.equal(weights.head_VH, weights.embed_VH)


def rewrite(folder, tensors):
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_tied_head_is_the_embedding(own_target):
    folder = own_target(tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    rewrite(folder, tensors)
    assert torch.equal(weights_of(folder).head_VH, tensors["model.embed_tokens.weight"])


def test_shards_are_found_through_the_index(own_target):
    folder = own_target()
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({n: tensors[n] for n in part}, folder / file)
    # A stray file that the index does not name must not be read.
    save_file({n: t + 1 for n, t in tensors.items()}, folder / "0-stray.safetensors")
    index = {"weight_map": {n: file for file, part in parts.items() for n in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    weights = weights_of(folder)
    assert torch.equal(weights.head_VH, tensors["lm_head.weight"])
    assert torch.equal(weights.norm_H, tensors["model.norm.weight"])


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"])
def test_a_missing_tensor_is_refused(own_target, name):
    folder = own_target()
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    rewrite(folder, tensors)
    message = refused(weights_of, folder)
    assert name.split(".", 1)[-1] in message and "whole" in message


def test_a_shard_that_the_index_names_and_the_folder_lacks_is_refused(own_target):
    folder = own_target()
    names = load_file(folder / "model.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00002.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00001-of-00002.safetensors" in refused(weights_of, folder)


def test_a_weight_file_cut_short_is_refused(own_target):
    file = own_target() / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    assert "model.safetensors" in refused(weights_of, file.parent)


def test_a_quantised_head_is_refused(own_target):
    folder = own_target()
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)
    rewrite(folder, tensors)
    assert "must not be quantised" in refused(weights_of, folder)


def test_padded_rows_are_left_out(own_target):
    folder = own_target(vocab_size=500)
    weights = weights_of(folder)
    assert len(weights.head_VH) == len(weights.embed_VH) == 500


@pytest.mark.parametrize("key", ["final_logit_softcapping", "logits_scaling", "logit_scale"])
def test_logits_changed_after_the_head_are_refused(own_target, key):
    assert f"`{key}`" in refused(weights_of, own_target(**{key: 30.0}))


def test_a_gemma_checkpoint_with_softcapping_is_refused(own_target, tmp_path):
    from transformers import Gemma2Config

    folder = own_target()
    Gemma2Config(num_hidden_layers=6, hidden_size=64, vocab_size=512).save_pretrained(folder)
    assert "final_logit_softcapping" in refused(weights_of, folder)


def test_the_two_norm_forms_differ_by_one(tiny_target):
    weights = weights_of(tiny_target)
    states = torch.ones(1, 64)
    rms, plus_one = (weights.head(form, torch.tensor([3, 7]))(states) for form in ("rms", "rms_plus_one"))
    assert rms.shape == (1, 2)
    # The tiny target's norm weight is 1, so `1 + w` doubles the logits.
    assert torch.equal(plus_one, 2 * rms) and rms.any()
