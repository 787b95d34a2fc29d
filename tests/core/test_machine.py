"""What a machine can do decides dtypes and passes; an engine process that dies says so, whenever it dies."""

import os

import pytest
import torch

from draftsmith.core import engine
from draftsmith.core.config import TargetConfig
from draftsmith.core.config_train import TrainConfig
from draftsmith.core.draft_shape import resolve_shape
from draftsmith.core.engine import engine_dtype, has_bfloat16, in_engine_process
from draftsmith.core.errors import StageFailed, UserError
from draftsmith.core.target import resolve_target
from draftsmith.train.step import fused_dtype


@pytest.fixture
def gpus(monkeypatch):
    """`gpus((8, 0), ...)`: CUDA devices of these compute capabilities."""

    def have(*capabilities):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device.index])

    return have


@pytest.mark.parametrize(
    ("capabilities", "half"), [([(8, 0)], True), ([(9, 0), (9, 0)], True), ([(7, 5)], False), ([(9, 0), (7, 0)], False)]
)
def test_auto_is_bfloat16_only_where_every_gpu_has_it(gpus, capabilities, half):
    gpus(*capabilities)
    assert has_bfloat16() is half
    assert engine_dtype(TargetConfig(dtype="auto")) == ("bfloat16" if half else "float32")
    assert engine_dtype(TargetConfig(dtype="float16")) == "float16"


@pytest.mark.parametrize(("capability", "found"), [((9, 0), torch.bfloat16), ((7, 5), None)])
def test_the_fused_pass_is_not_chosen_where_its_bfloat16_does_not_compile(gpus, make_config, capability, found):
    gpus(capability)
    config = make_config()
    shape, cuda = resolve_shape(config.draft, resolve_target(config.target), 3, 128), torch.device("cuda", 0)
    assert fused_dtype(TrainConfig(), shape, cuda, half=True) is found
    fused = TrainConfig(kernels="fused")
    assert fused_dtype(fused, shape, cuda, half=False) is torch.float32
    if found is None:
        with pytest.raises(UserError, match=r"older than sm_80.*train\.precision to float32"):
            fused_dtype(fused, shape, cuda, half=True)


def test_an_engine_process_that_dies_before_its_work_is_a_failed_stage(monkeypatch):
    monkeypatch.setattr(engine, "lead_group", os._exit)
    with pytest.raises(StageFailed, match="died without a message"):
        in_engine_process(os.getpid)
