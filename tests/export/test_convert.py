"""Conversion between layouts and conventions is exact in every direction, and says what it cannot know."""

import json
import shlex

import pytest
import torch
from drafts import LLAMA3, make_checkpoint, make_shape
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from draftsmith.core.cli import app
from draftsmith.core.config import ExportConfig
from draftsmith.core.draft_folder import read_draft_folder
from draftsmith.core.errors import UserError
from draftsmith.core.target import resolve_target
from draftsmith.core.target_weights import load_target_weights
from draftsmith.export.convert import convert_draft
from draftsmith.export.draft import Draft, from_checkpoint
from draftsmith.export.layout import draft_tensors, folder_config, plain_config, write_draft

pytestmark = pytest.mark.usefixtures("one_thread")
SHAPES = {
    "plain": make_shape(),
    "flags and 4 aux": make_shape(norm_before_residual=True, fc_norm=True, norm_output=True, num_aux=4),
    "norm_before_fc": make_shape(norm_before_fc=True),
    "llama3 rope": make_shape(rope=LLAMA3),
    "full vocabulary": make_shape(draft_vocab_size=512),
    "sliding window": make_shape(sliding_window=32),
    "partial rotary": make_shape(rope={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
}


def options(**values):
    return ExportConfig.model_validate(values)


@pytest.fixture
def target(make_config):
    return resolve_target(make_config().target)


@pytest.fixture
def source(tmp_path, target):
    """`source(shape)`: a draft folder in the plain layout."""

    def make(shape=None, **tensors):
        draft = from_checkpoint(make_checkpoint(tmp_path, shape or make_shape()))
        folder = tmp_path / "source"
        folder.mkdir()
        write_draft(folder, {**draft_tensors(draft), **tensors}, plain_config(draft, target))
        return folder

    return make


def content(folder):
    draft = read_draft_folder(folder)
    return draft.shape, draft.layer_ids, draft.target_ids.tolist(), draft.tensors


def equal(a, b):
    return a[:3] == b[:3] and a[3].keys() == b[3].keys() and all(torch.equal(a[3][k], b[3][k]) for k in a[3])


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(
    "there",
    [{"format": "speculators"}, {"layer_id_convention": "sglang"}, {}],
    ids=["speculators", "sglang", "plain"],
)
def test_there_and_back_is_the_same_draft(source, target, tmp_path, shape, there):
    folder = source(shape)
    convert_draft(folder, tmp_path / "there", options(**there), target)
    assert equal(content(tmp_path / "there"), content(folder))
    convert_draft(tmp_path / "there", tmp_path / "back", options(), target)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "back" / name).read_bytes() == (folder / name).read_bytes()


def test_sglangs_ids_are_one_lower_where_sglang_looks(source, target, tmp_path):
    convert_draft(source(), tmp_path / "out", options(layer_id_convention="sglang"), target)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [0, 1, 3], "use_aux_hidden_state": True}
    assert config["layer_id_convention"] == "sglang" and "eagle_aux_hidden_state_layer_ids" not in config
    card = (tmp_path / "out/README.md").read_text()
    assert "by **SGLang's ids** 0, 1, 3; vLLM would read other layers" in card
    assert "--speculative-algorithm EAGLE3" in card and "vllm serve" not in card


def test_the_embedding_state_has_no_sglang_id(target):
    shape = make_shape()
    draft = Draft(shape, {}, torch.zeros(0), [0, 2, 4], "x")
    with pytest.raises(UserError, match="cannot name the embedding"):
        plain_config(draft, target, "sglang")


def test_speculators_is_vllms_and_names_its_target(source, target, tmp_path):
    folder = source(SHAPES["flags and 4 aux"])
    with pytest.raises(UserError, match="names its target, which is unknown here"):
        convert_draft(folder, tmp_path / "out", options(format="speculators"), None)
    with pytest.raises(UserError, match="has vLLM's layer ids"):
        convert_draft(folder, tmp_path / "out", options(format="speculators", layer_id_convention="sglang"), target)
    assert not (tmp_path / "out").exists()
    convert_draft(folder, tmp_path / "out", options(format="speculators"), target)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(target.local_path)
    assert config["speculators_config"]["verifier"]["architectures"] == ["LlamaForCausalLM"]
    # What vLLM's translation leaves out must reach it from within.
    assert config["transformer_layer_config"]["num_aux_hidden_states"] == 4
    assert config["norm_before_residual"] is True and config["fc_norm"] is True and config["norm_output"] is True
    assert "vllm serve PATH_OF_THIS_FOLDER " in (tmp_path / "out/README.md").read_text()


def test_an_embedding_that_is_the_targets_is_left_out(source, target, tmp_path):
    theirs = load_target_weights(target).embed_VH
    folder = source(make_shape(own_embedding=True), **{"embed_tokens.weight": theirs})
    convert_draft(folder, tmp_path / "without", options(), None)
    assert "embed_tokens.weight" in load_file(tmp_path / "without/model.safetensors")  # nobody knows whose it is
    convert_draft(folder, tmp_path / "with", options(), target)
    assert "embed_tokens.weight" not in load_file(tmp_path / "with/model.safetensors")
    other = theirs.clone()
    other[7, 7] += 1
    save_file({**load_file(folder / "model.safetensors"), "embed_tokens.weight": other}, folder / "model.safetensors")
    convert_draft(folder, tmp_path / "other", options(), target)
    assert "embed_tokens.weight" in load_file(tmp_path / "other/model.safetensors")


def test_nothing_is_overwritten_unasked(source, tmp_path):
    folder, out = source(), tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("x")
    with pytest.raises(UserError, match=r"is there already.*--fresh"):
        convert_draft(folder, out, options(), None)
    with pytest.raises(UserError, match="something else than a draft"):
        convert_draft(folder, out, options(), None, fresh=True)
    assert (out / "mine.txt").is_file()
    (out / "config.json").write_text("{}")
    convert_draft(folder, out, options(), None, fresh=True)
    assert sorted(p.name for p in out.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
        "verification.json",
    ]
    for inside in (folder, folder.parent):
        with pytest.raises(UserError, match="holds the source"):
            convert_draft(folder, inside, options(), None, fresh=True)
    assert folder.is_dir()


def test_a_broken_source_leaves_nothing(source, tmp_path):
    folder = source()
    tensors = load_file(folder / "model.safetensors")
    del tensors["midlayer.hidden_norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"lacks midlayer\.hidden_norm\.weight"):
        convert_draft(folder, tmp_path / "out", options(), None)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".tmp*"))


def test_a_conversion_says_that_no_server_has_seen_it(source, target, tmp_path):
    convert_draft(source(), tmp_path / "out", options(license="mit"), target)
    proof = json.loads((tmp_path / "out/verification.json").read_text())
    assert proof["passed"] is True and proof["served"].startswith("not run: a conversion has no trainer")
    assert [c["name"] for c in proof["checks"]] == ["contract", "reload"]
    card = (tmp_path / "out/README.md").read_text()
    assert "not compared on a server" in card and "license: mit" in card


def test_the_command_line(source, tmp_path, tiny_target):
    folder = source()
    line = f"export convert {folder} {tmp_path}/out --format speculators --target {tiny_target}"
    done = CliRunner().invoke(app, shlex.split(line), catch_exceptions=False)
    assert done.exit_code == 0 and "speculators, vllm's layer ids" in done.output
    assert equal(content(tmp_path / "out"), content(folder))
    for wrong, named in (("--format gguf", "--format"), ("--layer-id-convention x", "--layer-id-convention")):
        done = CliRunner().invoke(app, shlex.split(f"{line}2 {wrong}"))
        assert isinstance(done.exception, UserError) and named in str(done.exception)


def test_flags_are_carried_in_every_layout(target):
    for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        for layout in ("hf", "speculators"):
            draft = Draft(make_shape(**{flag: True}), {}, torch.zeros(0), [1, 2, 4], "x")
            config = folder_config(draft, target, options(format=layout), 3)
            assert {f: config[f] for f in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")} == {
                f: f == flag for f in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
            }


def test_the_commands_errors_name_its_options(source, tmp_path):
    folder = source(SHAPES["plain"])
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text('{"auto_map": {"AutoConfig": "x.Y"}, "model_type": "unheard_of"}')
    said = {
        ("--target", "/nowhere"): "--target: `/nowhere` is neither a folder nor a hub id",
        ("--target", str(tmp_path / "odd")): "if you trust it, set --trust-remote-code.",
        ("--format", "speculators"): "Name it with --target.",
        ("--format", "speculators", "--layer-id-convention", "sglang"): "Use --format hf.",
        ("--source-convention", "tgi"): "--source-convention: tgi is neither vllm nor sglang",
    }
    for given, what in said.items():
        error = CliRunner().invoke(app, ["export", "convert", str(folder), str(tmp_path / "out"), *given]).exception
        assert isinstance(error, UserError) and what in str(error), error
        assert not any(key in str(error) for key in ("export.format", "export.layer", "target.path", "target.trust"))
    assert not (tmp_path / "out").exists()
