"""DeepSpeed's JSON: what may stand there, what is the run's own business, and what goes together."""

import json
from importlib.resources import files

import pytest

from draftsmith.core.config_train import TrainConfig
from draftsmith.core.errors import UserError
from draftsmith.core.run import RunFolder
from draftsmith.train.stage import train
from draftsmith.train.zero_config import deepspeed_config, read_deepspeed_config

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


def zero(inside: str, beside: str = "") -> str:
    return f'{{"zero_optimization": {{{inside}}}{", " * bool(beside)}{beside}}}'


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
        (zero('"stage": 2, "overlap_com": true'), r"own.json: zero_optimization.overlap_com: .*mean overlap_comm\?"),
        (zero('"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memry": true}'),
         r"optimizer.pin_memry.*pin_memory"),
        (zero('"stage": 2, "cpu_offload": true, "offload_optimizer": {"device": "cpu"}'),
         "refuses zero_opt.*cpu_offload"),
        (zero('"stage": 2, "reduce_bucket_size": -1'), "own.json: zero_optimization.reduce_bucket_size: "),
        (zero('"stage": 3, "stage3_param_persistence_threshold": 10'), "persistence_threshold is 0 with draftsmith"),
        (zero('"stage": 3, "offload_optimizer": {"device": "nvme"}'),
         "offload_optimizer.device is nvme, and there is no nvme_path. Set nvme_path"),
        (zero('"stage": 3, "offload_param": {"device": "nvme"}'), "offload_param.device is nvme, and there is no"),
        (zero('"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}'),
         "stage 3's alone. Set it to cpu"),
        (zero('"stage": 2, "offload_param": {"device": "cpu"}'), "offload_param is stage 3's alone"),
        (zero('"stage": 2', '"comunication_data_type": "fp32"'),
         r"own.json: .*: comunication_data_type \(did you mean communication_data_type\?\)"),
        (zero('"stage": 2', '"zero_optimisation": {}'), r"zero_optimisation \(did you mean zero_optimization"),
        (zero('"stage": 2', '"gradient_acumulation_steps": 4'), "did you mean gradient_accumulation_steps"),
        (zero('"stage": 2', '"xyzzy": 1'), "here: xyzzy. Mend"),
        (zero('"stage": 2', '"sequence_parallel_size": 2'), "not done here: sequence_parallel_size"),
        (zero('"stage": 2', '"data_types": {"grad_accum_dtype": "bf16"}'), r"data_types \(train.precision\)"),
        (zero('"stage": 2', '"steps_per_print": 5'), r"steps_per_print \(train.log_interval\)"),
        (zero('"stage": 2', '"amp": {}'), "amp"),
        (zero('"stage": 2', '"compression_training": {}'), "DeepSpeed refuses it .*compression_training"),
        ("{", r"damaged.*zero2.json"),
    ],
)  # fmt: skip
def test_what_is_not_its_business_is_refused(tmp_path, content, said):
    path = tmp_path / "own.json"
    path.write_text(content)
    with pytest.raises(UserError, match=said):
        read_deepspeed_config(str(path))


def test_what_deepspeed_knows_is_taken(tmp_path):
    own = {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
        "communication_data_type": "fp32", "prescale_gradients": False, "wall_clock_breakdown": True,
        "comms_logger": {"enabled": False}, "flops_profiler": {"enabled": False}, "memory_breakdown": False,
        "activation_checkpointing": {}, "csv_monitor": {"enabled": False}, "timers": {}, "disable_allgather": False,
    }  # fmt: skip
    path = tmp_path / "own.json"
    path.write_text(json.dumps(own))
    assert read_deepspeed_config(str(path)) == own


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
        ({"engine": "deepspeed", "shard": "fsdp2"}, "belongs to train.engine accelerate"),
    ],
)
def test_what_does_not_go_together_is_refused(change, said):
    with pytest.raises(ValueError, match=said):
        TrainConfig(**change)
