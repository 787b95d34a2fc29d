"""DeepSpeed's JSON: what may stand there, what is the run's own business, and what goes together."""

import json
from importlib.resources import files

import pytest

from draftsmith.core.config_train import TrainConfig
from draftsmith.core.errors import UserError
from draftsmith.core.run import RunFolder
from draftsmith.train.stage import train
from draftsmith.train.zero import deepspeed_config, read_deepspeed_config

SHIPPED = ["zero1", "zero2", "zero2_offload", "zero3", "zero3_offload"]


def test_every_shipped_file_is_found_by_path_and_by_name():
    folder = files("draftsmith.configs").joinpath("deepspeed")
    assert sorted(p.name.removesuffix(".json") for p in folder.iterdir()) == SHIPPED
    for name in SHIPPED:
        by_name = read_deepspeed_config(name)
        assert (
            by_name
            == read_deepspeed_config(f"configs/deepspeed/{name}.json")
            == json.loads(folder.joinpath(f"{name}.json").read_text())
        )
        assert by_name["zero_optimization"]["stage"] == int(name[4])
        assert ("offload_optimizer" in by_name["zero_optimization"]) == name.endswith("offload")


def test_a_file_of_the_users_comes_first_and_keeps_what_it_sets(tmp_path):
    own = {"zero_optimization": {"stage": 3, "reduce_bucket_size": 1000}, "wall_clock_breakdown": False}
    path = tmp_path / "zero2.json"
    path.write_text(json.dumps(own))
    read = read_deepspeed_config(str(path))
    assert read == own
    made = deepspeed_config(read, 0.5)
    assert made["zero_optimization"]["reduce_bucket_size"] == 1000 and made["gradient_clipping"] == 0.5
    assert made["gradient_accumulation_steps"] == 1 and not made["wall_clock_breakdown"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"zero_optimization": {"stage": 2}, "fp16": {"enabled": true}, "optimizer": {}}',
         r"fp16 \(train.precision\), optimizer \(train.optimizer\) are set in the run's own config.*Take them out"),
        ('{"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0}', r"gradient_clipping \(train.max_grad_norm\)"),
        ('{"zero_optimization": {"stage": 0}}', "stage is 0, not 1, 2 or 3"),
        ('{"zero_optimization": {}}', "stage is None, not 1, 2 or 3.*zero2.json"),
        ("[]", "stage is None, not 1, 2 or 3"),
        ('{"zero_optimization": 3}', "stage is None, not 1, 2 or 3"),
        ('{"zero_optimization": {"stage": 2, "foo": 1}}', "own.json: zero_optimization.foo: Extra inputs"),
        ("{", r"damaged.*zero2.json"),
    ],
)  # fmt: skip
def test_what_is_not_its_business_is_refused(tmp_path, content, said):
    path = tmp_path / "own.json"
    path.write_text(content)
    with pytest.raises(UserError, match=said):
        read_deepspeed_config(str(path))


def test_a_wrong_file_leaves_the_run_as_it_was(synthetic_run, changed, tree_of):
    before = tree_of(RunFolder.of(synthetic_run).root)
    with pytest.raises(UserError, match=r"there is no own\.json"):
        train(changed(synthetic_run, train={"engine": "deepspeed", "deepspeed_config": "own.json"}))
    assert tree_of(RunFolder.of(synthetic_run).root) == before


def test_a_file_that_is_not_there_is_named():
    with pytest.raises(UserError, match=r"there is no own.json.*zero2.json"):
        read_deepspeed_config("own.json")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"optimizer": "muon", "engine": "deepspeed"}, "whole matrices"),
        ({"optimizer": "muon", "shard": "fsdp2"}, "whole matrices"),
        ({"engine": "deepspeed", "shard": "fsdp2"}, "belongs to the engine accelerate"),
    ],
)
def test_what_does_not_go_together_is_refused(change, said):
    with pytest.raises(ValueError, match=said):
        TrainConfig(**change)
