"""`draftsmith plan`: settings that no machine can run, whose hours it prints, and the sizes of the recipes' targets."""

import json
import shutil
from pathlib import Path

import pytest

from draftsmith.core import plan
from draftsmith.core.config import TargetConfig
from draftsmith.core.errors import UserError
from draftsmith.core.estimate import stated
from draftsmith.core.plan import make_plan, target_shape
from draftsmith.core.plan_hours import Rates
from draftsmith.core.sizes import target_bytes, target_parameters

TARGETS = Path(__file__).parents[2] / "configs" / "targets"
H200 = Rates(gpus=1, gpu_bytes=141e9)


def problems(config, tokens=10**9, gpu_bytes=141e9):
    made = make_plan(config, stated(config, tokens, 1000, 0.26), Rates(gpus=1, gpu_bytes=gpu_bytes))
    return [p["what"] + " " + p["mend"] for p in made["problems"]]


# ---- settings that no machine can run ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "said", "mend"),
    [
        ({"data": {"draft_vocab_size": 300_000}}, "draft_vocab_size is 300,000, and the target has 200,064 tokens",
         {"data": {"draft_vocab_size": 200_064}}),
        ({"data": {"max_length": 196_607}}, "context holds samples of 196,606 tokens",
         {"data": {"max_length": 196_606}}),
        ({"target": {"tensor_parallel": 5}}, "tensor_parallel is 5, and the target has 48 attention heads (8 for keys)",
         {"target": {"tensor_parallel": 4}}),
        ({"target": {"tensor_parallel": 96}}, "tensor_parallel is 96", {"target": {"tensor_parallel": 4}}),
        ({"target": {"tensor_parallel": 8}}, "leaves 192 of an expert's 1536 columns to a GPU",
         {"target": {"tensor_parallel": 8, "engine_args": {"enable_expert_parallel": True}}}),
        ({"draft": {"num_heads": 3, "num_kv_heads": 3}}, "the draft has 3 attention heads",
         {"draft": {"num_heads": 24, "num_kv_heads": 24}}),
        ({"capture": {"mode": "spool", "spool_bytes": 10**9}}, "two shards take 2,147,483,648 bytes or more",
         {"capture": {"mode": "spool", "spool_bytes": 2**31}}),
        ({"capture": {"mode": "spool", "spool_bytes": 10**5, "shard_bytes": 1024}}, "one optimizer step of 328,",
         {"capture": {"mode": "spool", "spool_bytes": 10**9, "shard_bytes": 1024}}),
        ({"train": {"epochs": 100_000}}, "above --max-hours 720", None),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused_and_their_mend_fits(minimax, roomy, sections, said, mend):
    short = {"data": {"max_length": 1024}, "train": {"tokens_per_batch": 16384}}

    def found(changes):
        config = minimax(**{k: {**short.get(k, {}), **changes.get(k, {})} for k in {**short, **changes}})
        return problems(config, tokens=10**7, gpu_bytes=1e13)

    (problem,) = found(sections)
    assert said in problem
    if mend is None:
        mend = {"train": {"epochs": int(problem.split("train.epochs to ")[1].split(" ")[0])}}
    assert found(mend) == []


def test_float8_products_need_a_gpu_that_has_them(minimax, roomy):
    config = minimax(train={"matmul": "fp8", "epochs": 1}, target={"tensor_parallel": 4})
    found = make_plan(config, stated(config, 10**7, 1000, 0.26), Rates(gpus=4, gpu="A100"))["problems"]
    assert [p["what"] for p in found] == ["train.matmul is fp8, and A100s have no float8 products."]
    assert make_plan(config, stated(config, 10**7, 1000, 0.26), Rates(gpus=4, gpu="H100"))["problems"] == []


# ---- whose hours ----------------------------------------------------------------------------------------------------


def test_hours_say_which_gpu_they_are_for(minimax, roomy, monkeypatch):
    config, measured = minimax(target={"tensor_parallel": 4}), "measured on H200s"

    def made(found=(), **rates):
        monkeypatch.setattr(plan, "of_this_machine", lambda: list(found))
        return make_plan(config, stated(config, 10**7, 1000, 0.26), Rates(**rates))

    here = made()
    assert (here["gpu"]["name"], here["gpu"]["bytes"]) == ("H200", 141e9) and "no GPU here" in here["gpu"]["of"]
    assert here["hours"]["train_rate_of"].startswith(measured + " (benchmarks")
    other = made(gpu="A100")
    assert other["hours"]["train_rate"] == pytest.approx(here["hours"]["train_rate"] * 312 / 989)
    assert "by the peak of A100s: not measured" in other["hours"]["train_rate_of"]
    assert other["gpu"]["bytes"] == 80e9
    known = made(found=[("NVIDIA H100 80GB HBM3", 85e9)] * 4)
    assert (known["gpu"]["name"], known["gpu"]["bytes"], known["gpu"]["count"]) == ("H100", 85e9, 4)
    unknown = made(found=[("Radeon 1", 16e9)])
    assert "hours are for an H200" in unknown["gpu"]["of"] and unknown["gpu"]["bytes"] == 16e9
    with pytest.raises(UserError, match=r"--gpu Radeon: its figures are not known here \(known: B200, H200"):
        made(gpu="Radeon")


def test_replies_hours_are_smollms_as_measured_and_follow_the_target(make_config, minimax, roomy):
    small = make_config(target={"path": "smollm2-135m-instruct"})
    rate = make_plan(small, stated(small, 10**6, 180, 0.58), H200)["hours"]["prepare_rate"]
    assert rate == pytest.approx(31_850, rel=0.1)  # benchmarks/data/README.md
    large = minimax(target={"tensor_parallel": 4})
    hours = make_plan(large, stated(large, 10**6, 4000, 0.6), H200)["hours"]
    assert 2_000 < hours["prepare_rate"] < 10_000 and "not measured" in hours["prepare_rate_of"]
    assert hours["all"] == pytest.approx(hours["prepare"] + hours["together"])
    kept = minimax(data={"replies": "keep"})
    assert make_plan(kept, stated(kept, 10**6, 4000, 0.6), H200)["hours"]["prepare"] == 0


def test_torchspecs_engines_and_gpus_are_the_configs(minimax, roomy):
    theirs = {"inference_gpus": 24, "training_nodes": 2, "training_gpus_per_node": 8}
    own = minimax(target={"tensor_parallel": 4}, capture={"mode": "spool", "spool_bytes": 10**11})
    spec = minimax(target={"tensor_parallel": 4}, train={"engine": "torchspec", "torchspec": theirs, "epochs": 1})
    one, six = (make_plan(c, stated(c, 10**8, 1000, 0.6), Rates(gpu="H200")) for c in (own, spec))
    assert six["gpu"]["count"] == 16
    assert six["hours"]["capture_rate"] == pytest.approx(6 * one["hours"]["capture_rate"])
    assert six["hours"]["together"] == max(six["hours"]["capture"], six["hours"]["train"])
    assert "TorchSpec's own rate was not measured" in six["hours"]["train_rate_of"]
    assert six["disk"]["states_needed"] == one["disk"]["states_needed"] - 10**11  # the held-out samples' alone


# Parameters, those that a token uses, and bytes of the weights, as their makers give them.
PUBLISHED = {
    "minimax_m2_5": (229e9, 10e9, 230e9), "minimax_m2_7": (229e9, 10e9, 230e9), "qwen3_8b": (8.19e9, 7.57e9, 16.4e9),
    "llama3_1_8b": (8.03e9, 7.5e9, 16.1e9), "gpt_oss_20b": (20.9e9, 3.6e9, 13.8e9),
    "deepseek_v3_2": (671e9, 37e9, 671e9), "qwen3_5_397b": (397e9, 17e9, 397e9),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_recipes_targets_have_the_sizes_that_their_makers_give(name):
    hf = target_shape(TargetConfig(path="not/here"), TARGETS / name).hf_config
    method = (getattr(hf, "quantization_config", None) or {}).get("quant_method")
    every, active, nbytes = PUBLISHED[name]
    assert target_parameters(hf) == (pytest.approx(every, rel=0.01), pytest.approx(active, rel=0.06))
    assert target_bytes(hf, method) == pytest.approx(nbytes, rel=0.02)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_local_experts", "many"),
        ("num_hidden_layers", "62"),
        ("vocab_size", 0),
        ("hidden_size", 0),
        ("head_dim", -5),
    ],
)
def test_a_described_target_of_odd_sizes_is_refused(tmp_path, key, value):
    given = json.loads((TARGETS / "minimax_m2_5" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**given, key: value}))
    with pytest.raises(UserError, match=rf"{tmp_path}/config.json.*{key} is {value!r}"):
        target_shape(TargetConfig(path="some/where"), tmp_path)


def test_a_description_under_another_name_is_refused_instead_of_its_neighbour(tmp_path):
    shutil.copy(TARGETS / "minimax_m2_5" / "config.json", tmp_path / "config.json")
    shutil.copy(TARGETS / "qwen3_8b" / "config.json", tmp_path / "qwen.json")
    with pytest.raises(UserError, match=r"qwen\.json is not called config\.json"):
        target_shape(TargetConfig(path="some/where"), tmp_path / "qwen.json")
