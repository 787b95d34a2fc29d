"""One strict schema: what is refused names the line and the mend; what is accepted survives being written and read."""

import subprocess
import sys
from pathlib import Path

import pytest

from draftsmith.core.config import Config
from draftsmith.core.config_io import dump_config, load_config, schema_json
from draftsmith.core.errors import UserError

CONFIGS = Path(__file__).parents[2] / "configs"


def refused(config_file, text, overrides=None):
    with pytest.raises(UserError) as error:
        load_config(config_file(text), overrides)
    return str(error.value)


def test_empty_file_means_all_defaults(config_file):
    assert load_config(config_file("")) == Config()


def test_section_with_everything_commented_out_means_defaults(config_file):
    assert load_config(config_file("train:\n  # epochs: 3\n")) == Config()


def test_missing_file_is_named():
    with pytest.raises(UserError, match=r"nowhere\.yaml: no such config file"):
        load_config("nowhere.yaml")


def test_unknown_key_names_the_line_and_suggests_the_right_one(config_file):
    message = refused(config_file, "run: {name: a}\ntrain:\n  epochs: 3\n  learning_rte: 0.1\n")
    assert "config.yaml, line 4: unknown key `train.learning_rte`" in message
    assert "Did you mean `train.learning_rate`?" in message


def test_unknown_section_suggests_the_right_one(config_file):
    message = refused(config_file, "\ntrian: {epochs: 3}\n")
    assert "line 2: unknown key `trian`" in message and "Did you mean `train`?" in message


def test_unknown_key_unlike_any_other_lists_the_known_ones(config_file):
    message = refused(config_file, "eval: {zzz: 1}\n")
    assert "Known keys: k, replay_k, " in message


def test_unknown_key_inside_a_list_item_is_placed(config_file):
    message = refused(config_file, "data:\n  sources:\n    - path: a.jsonl\n    - {path: b.jsonl, limt: 3}\n")
    assert "line 4: unknown key `data.sources.1.limt`" in message
    assert "Did you mean `data.sources.1.limit`?" in message


def test_wrong_value_inside_a_list_item_is_placed(config_file):
    message = refused(config_file, "eval:\n  k:\n    - 3\n    - 0\n")
    assert "line 4: `eval.k.1`" in message and "got 0" in message


def test_all_faults_are_reported_at_once(config_file):
    message = refused(config_file, "train: {epochs: 0}\neval: {kk: [1]}\n")
    assert "train.epochs" in message and "eval.kk" in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train.epochs", "true"),
        ("train.epochs", "'3'"),
        ("train.epochs", "3.0"),
        ("train.learning_rate", "'1e-4'"),
        ("train.learning_rate", "false"),
        ("export.verify", "1"),
        ("run.name", "7"),
        ("data.sources", "prompts.jsonl"),
        ("capture.layer_ids", "all"),
        ("capture.layer_ids", "[2, 'x', 5]"),
    ],
)
def test_a_value_of_another_type_is_refused_not_converted(config_file, key, value):
    section, name = key.split(".")
    message = refused(config_file, f"{section}: {{{name}: {value}}}\n")
    assert "line 1" in message and key in message


@pytest.mark.parametrize(
    "bad",
    [
        "train: {epochs: 0}",
        "train: {learning_rate: 0.0}",
        "train: {learning_rate: .nan}",
        "train: {betas: [0.9]}",
        "data: {eval_share: 1.0}",
        "data: {sources: []}",
        "data: {sources: [{path: ''}]}",
        "run: {name: ../elsewhere}",
        "eval: {k: []}",
    ],
)
def test_a_value_out_of_range_is_refused(config_file, bad):
    assert "line 1" in refused(config_file, bad)


def test_a_reply_that_cannot_fit_is_refused(config_file):
    message = refused(config_file, "data: {max_length: 64, sampling: {max_tokens: 64}}")
    assert "data.sampling.max_tokens (64) must be below data.max_length (64)" in message


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "1.0e-4", "0.0001"])
def test_floats_in_every_spelling(config_file, text):
    assert load_config(config_file(f"train: {{learning_rate: {text}}}")).train.learning_rate == 1e-4
    assert load_config(config_file(""), [f"train.learning_rate={text}"]).train.learning_rate == 1e-4


def test_a_key_given_twice_is_refused_with_both_places(config_file):
    message = refused(config_file, "train:\n  epochs: 1\n  epochs: 2\n")
    assert "line 3: `train.epochs` is given twice" in message and "line 2" in message


@pytest.mark.parametrize("text", ["- a\n- b\n", "just words\n", "3\n"])
def test_a_file_that_is_no_mapping_is_refused(config_file, text):
    assert "not a mapping of sections" in refused(config_file, text)


def test_broken_yaml_names_the_line(config_file):
    assert "line 2: not valid YAML" in refused(config_file, "run: {name: a}\ntrain: {epochs: [3}\n")


@pytest.mark.parametrize("text", ["target: !!python/object:os.system {}\n", "target: !secret x\n", "? [a, b]\n: 3\n"])
def test_yaml_that_is_more_than_plain_data_is_refused(config_file, text):
    assert "line 1" in refused(config_file, text)


def test_precedence_is_default_then_yaml_then_override(config_file):
    file = config_file("train: {epochs: 3, ttt_steps: 5}\n")
    loaded = load_config(file, ["train.epochs=4", "train.epochs=5", "data.sampling.max_tokens=9"])
    assert (loaded.train.epochs, loaded.train.ttt_steps) == (5, 5)
    assert loaded.data.sampling.max_tokens == 9
    assert loaded.train.step_decay == Config().train.step_decay


def test_override_values_are_yaml(config_file):
    loaded = load_config(config_file(""), ["eval.k=[1, 5]", "target.revision=null", "target.engine_args={a: 1}"])
    assert loaded.eval.k == [1, 5] and loaded.target.revision is None and loaded.target.engine_args == {"a": 1}


@pytest.mark.parametrize("text", ["train.epochs", "epochs=3", "=3", "train.=3", ".epochs=3"])
def test_text_that_is_no_override_is_refused(config_file, text):
    assert "is not an override" in refused(config_file, "", [text])


def test_override_with_broken_yaml_is_refused(config_file):
    assert "the value is not valid YAML" in refused(config_file, "", ["eval.k=[1,"])


def test_override_below_a_value_is_refused(config_file):
    assert "`epochs` is not a section" in refused(config_file, "train: {epochs: 3}", ["train.epochs.x=1"])


def test_wrong_override_is_named_and_not_the_file(config_file):
    message = refused(config_file, "train: {epochs: 3}", ["train.epochs=x"])
    assert "override `train.epochs=x`" in message and "line" not in message


@pytest.mark.parametrize(
    ("text", "overrides", "places"),
    [
        ("train:\n  epochs: 3\n  optimizer: muon\n", ["train.shard=fsdp2"], ["line 3", "override `train.shard=fsdp2`"]),
        ("train:\n  epochs: 3\n  shard: fsdp2\n", ["train.optimizer=muon"],
         ["override `train.optimizer=muon`", "line 3"]),
        ("train:\n  epochs: 3\n  shard: fsdp2\n  optimizer: muon\n", [], ["line 4", "line 3"]),
        ("data:\n  max_length: 500\n", ["data.sampling={max_tokens: 600}"],
         ["override `data.sampling={max_tokens: 600}`", "line 2"]),
        ("train: {shard: fsdp2}", ["train.engine=deepspeed"], ["line 1", "override `train.engine=deepspeed`"]),
        ("data:\n  max_length: 500\n", ["data.sampling.max_tokens=600"],
         ["override `data.sampling.max_tokens=600`", "line 2"]),
        ("run: {}\ndata:\n  eval_share: 0.1\n", ["data.max_length=100"], ["override `data.max_length=100`"]),
        ("draft: {init: random}", ["draft.train_lm_head=false"], ["override `draft.train_lm_head=false`", "line 1"]),
        ("capture:\n  mode: spool\n", [], ["line 2"]),
        ("capture:\n  mode: spool\n", ["capture.spool_bytes=9", "capture.data_parallel=2"],
         ["line 2", "override `capture.data_parallel=2`"]),
        ("capture:\n  mode: spool\n  spool_bytes: 9\n", ["capture.spool_gpus=[0,1]", "target.tensor_parallel=4"],
         ["override `capture.spool_gpus=[0,1]`", "override `target.tensor_parallel=4`"]),
        ("eval:\n  k: [3]\n", ["eval.sets=[mt_bench]"], ["override `eval.sets=[mt_bench]`"]),
    ],
)  # fmt: skip
def test_values_that_do_not_go_together_are_each_named_with_their_place(config_file, text, overrides, places):
    path = config_file(text)
    with pytest.raises(UserError) as caught:
        load_config(path, overrides)
    where = " and ".join(f"{path}, {p}" if p.startswith("line") else p for p in places)
    assert str(caught.value).startswith(f"{where}: ") and "got {" not in str(caught.value)


def test_fault_inside_an_overriding_list_is_named_and_not_the_line_it_replaces(config_file):
    message = refused(config_file, "data:\n  sources: [{path: a}]\n", ["data.sources=[{pth: b}]"])
    assert "override `data.sources=[{pth: b}]`" in message and "line" not in message


def test_a_dumped_config_loads_as_an_equal_one(config_file):
    config = Config.model_validate(
        {
            "run": {"name": "a.b-c", "dir": "/tmp/ü: #x"},
            "target": {"revision": "no", "engine_args": {"a": [1, 2.5, None, "1"], "b": {"c": True}}},
            "data": {"sources": [{"path": "a b.jsonl", "limit": 3}, {"path": "null"}], "draft_vocab_size": None},
            "capture": {"layer_ids": [1, 2, 3]},
            "train": {"learning_rate": 1e-05, "betas": [0.9, 0.999]},
        }
    )
    assert load_config(config_file(dump_config(config))) == config


@pytest.mark.parametrize("text", ["1e5", "12e4567", "007", "1_000", "0x1f", "2024-01-01", "off", "~"])
def test_strings_that_look_like_other_types_survive_dumping(config_file, text):
    config = Config.model_validate({"target": {"path": text, "revision": text, "engine_args": {"a": text}}})
    assert load_config(config_file(dump_config(config))) == config


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda f: f.name)
def test_shipped_configs_load_and_name_their_schema(file):
    load_config(file)
    assert file.read_text().startswith("# yaml-language-server: $schema=schema.json\n")


def test_configs_are_shipped():
    assert (CONFIGS / "quickstart.yaml").is_file()


def test_the_schema_file_is_current():
    assert (CONFIGS / "schema.json").read_text(encoding="utf-8") == schema_json()


def test_every_key_is_checked_by_the_schema():
    import json

    schema = json.loads(schema_json())
    for part in (schema, *schema["$defs"].values()):
        assert part["additionalProperties"] is False


def test_the_schema_loads_without_torch_transformers_and_vllm():
    script = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "vllm"):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Block())
from draftsmith.core.config_io import load_config
print(load_config(sys.argv[1]).run.name)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(CONFIGS / "quickstart.yaml")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "quickstart"


DESIGN_EXAMPLE = """
run:     {name: quickstart, dir: runs, seed: 0}
target:  {path: smollm2-135m-instruct, revision: null, dtype: bfloat16, chat_template: null, tensor_parallel: 1,
          engine_args: {}}
data:    {sources: [{path: prompts.jsonl, limit: null, weight: 1.0}], replies: regenerate,
          sampling: {temperature: 0.0, max_tokens: 256}, max_length: 2048, eval_share: 0.1, draft_vocab_size: 8192,
          max_skip_share: 0.05}
capture: {layer_ids: auto, storage: bf16, mode: store, shard_bytes: 1073741824, spool_bytes: null, data_parallel: 1}
draft:   {num_heads: null, num_kv_heads: null, head_dim: null, intermediate_size: null, norm_before_residual: false,
          norm_before_fc: false, fc_norm: false, norm_output: false}
train:   {engine: accelerate, ttt_steps: 7, step_decay: 0.8, loss: soft_ce, tokens_per_batch: 16384, epochs: 10,
          learning_rate: 1.0e-4, warmup_ratio: 0.015, schedule: cosine, max_grad_norm: 0.5, eval_interval: 200,
          save_interval: 200, trackers: []}
eval:    {k: [3], temperature: [0.0], concurrency: [1], sets: [], max_prompts: null}
export:  {format: hf, verify: true}
"""


def test_the_contracts_keys_and_defaults(tmp_path):
    """The names and defaults that the design promises; only the source differs from ours."""
    path = tmp_path / "design.yaml"
    path.write_text(DESIGN_EXAMPLE)
    loaded = load_config(path, ["data.sources=[{path: demo-prompts}]"])
    assert loaded == Config()
