"""What the capture beside a training sees of the machine, and how it ends."""

import os
import signal

import pytest

from draftsmith.core.config import Config
from draftsmith.core.errors import UserError
from draftsmith.hidden_state_capture.beside import _environment, _sigterm_unwinds, divide, split_gpus


def test_each_side_has_its_gpus_by_their_place_among_the_visible_ones():
    assert divide([0, 2], ["4", "5", "6", "7"]) == ("4,6", "5,7")
    assert divide([3], ["0", "1", "2", "3"]) == ("3", "0,1,2")


@pytest.mark.parametrize("chosen", [[4], [0, 1, 2, 3], [0, 9]])
def test_a_gpu_that_is_not_there_and_none_for_training_are_refused(chosen):
    with pytest.raises(UserError, match=r"capture\.spool_gpus is .*, and 4 GPUs are visible.*set it to null"):
        divide(chosen, ["4", "5", "6", "7"])


def test_both_sides_share_all_gpus_unless_told_otherwise():
    assert split_gpus(Config()) == (None, None)


def test_an_engine_sees_its_gpus_and_nothing_of_torchrun(monkeypatch):
    torchrun = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "here", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in {**torchrun, "CUDA_VISIBLE_DEVICES": "2,3", "HOME": "/here"}.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    with _environment("0,1"):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1" and os.environ["HOME"] == "/here"
        assert not torchrun.keys() & os.environ.keys()
    assert dict(os.environ) == before


def test_sigterm_leaves_the_block_as_an_exception_does():
    left, handler = [], signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as end, _sigterm_unwinds():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            left.append("the engine")
    assert end.value.code == 128 + signal.SIGTERM and left and signal.getsignal(signal.SIGTERM) == handler
