"""The next batch on its way while one is worked on: order, room for two, errors, the end; on a CPU without streams."""

import os
import shutil
import signal
import threading
import time
from unittest import mock

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from draftsmith.core.batch import Batch
from draftsmith.core.checkpoint import final_checkpoint
from draftsmith.core.fp8_states import encode
from draftsmith.core.run import RunFolder
from draftsmith.train.ahead import Ahead, Step
from draftsmith.train.feed import Feed
from draftsmith.train.metrics import Metrics
from draftsmith.train.stage import train
from draftsmith.train.step import Work

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")


def work_of(number, tokens=8):
    """States in float8, so that what is taken is not what was given."""
    states = torch.randn(tokens, 4, 16, generator=torch.Generator().manual_seed(number))
    aux, aux_scales = encode(states[:, :3])
    last, last_scales = encode(states[:, 3])
    rows = torch.arange(tokens)
    batch = Batch((f"s{number}",), (0, tokens), rows, rows > 2, rows, aux, last, rows, aux_scales, last_scales)
    return Work(batch, None)


def threads():
    """Of training: the one that moves batches, and the one that reads them; other tests leave pools of theirs."""
    return {t for t in threading.enumerate() if t.name.startswith(("to-device", "read-batches"))}


@pytest.fixture
def own_environment():
    """What engines put into the environment does not reach the tests that follow: they start processes."""
    with mock.patch.dict(os.environ):
        yield


# ---- the queue of one ------------------------------------------------------------------------------------------------


def test_batches_come_in_order_and_only_one_ahead_of_the_one_that_is_worked_on():
    found, works = [], [work_of(i) for i in range(5)]

    def finds(number):
        def find():
            found.append(number)
            return works[number]

        return find if number < len(works) else None

    with Ahead(CPU) as ahead:
        ahead.begin(finds(0))
        for number, given in enumerate(works):
            time.sleep(0.02)
            assert found == list(range(number + 1))  # the one after it waits until this one is taken
            taken, expected = ahead.take(finds(number + 1)).batch, given.batch.to(CPU)
            assert taken.sample_ids == (f"s{number}",) and taken.aux_TAH.dtype is torch.bfloat16
            assert torch.equal(taken.aux_TAH, expected.aux_TAH) and torch.equal(taken.last_MH, expected.last_MH)
        with pytest.raises(AssertionError):
            ahead.take(None)


def test_a_step_takes_its_own_batches_and_then_begins_the_next_step():
    from concurrent.futures import Future

    first, second, read = [work_of(i) for i in range(3)], [work_of(3)], Future()
    with Ahead(CPU) as ahead:
        ahead.begin(lambda: first[0])
        step = Step(first, ahead, read)
        ids = [step.take().batch.sample_ids[0] for _ in first]  # the next step's batches are not read yet
        read.set_result(second)
        ids.append(Step(second, ahead, None).take().batch.sample_ids[0])
    assert ids == ["s0", "s1", "s2", "s3"]


def test_what_finding_a_batch_raises_is_raised_where_that_batch_is_taken():
    def broken():
        raise ValueError("of batch 1")

    with Ahead(CPU) as ahead:
        ahead.begin(lambda: work_of(0))
        assert ahead.take(broken).batch.sample_ids == ("s0",)
        time.sleep(0.02)  # it has been raised by now, where nobody sees it yet
        with pytest.raises(ValueError, match="of batch 1"):
            ahead.take(lambda: work_of(2))
    assert not threads()


def test_the_thread_ends_with_its_context_whatever_is_under_way():
    with Ahead(CPU) as ahead:
        ahead.begin(lambda: time.sleep(0.1) or work_of(0))
    assert not threads()


# ---- in a training ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", ["bf16", "fp8"])
@pytest.mark.parametrize("accumulated", [1, 3])
def test_losses_and_draft_are_those_of_plain_copies_bit_for_bit(
    synthetic_run, changed, recaptured, copied_plainly, figures, weights, storage, accumulated
):
    options = {"grad_accum_steps": accumulated, "hidden_noise": 0.1, "epochs": 3}
    config = recaptured(changed(synthetic_run, train=options), storage=storage)
    train(config)
    found = figures(config), weights(config)
    run = RunFolder.of(config)
    shutil.rmtree(run.checkpoints)
    run.metrics.unlink()
    with copied_plainly():
        train(config)
    assert (figures(config), weights(config)) == found
    assert len(found[0]) > 5


@pytest.mark.parametrize("engine", [{}, {"shard": "fsdp2"}, {"engine": "deepspeed", "deepspeed_config": "zero2"}])
def test_nothing_refers_to_a_batch_any_more_when_the_next_one_is_taken(
    synthetic_run, changed, recaptured, monkeypatch, own_environment, engine
):
    """Its memory is what the one after that gets. In float8: on a CPU only decoded states are new tensors."""
    options = {"grad_accum_steps": 2, "epochs": 3, "precision": "float32", **engine}
    config = recaptured(changed(synthetic_run, train=options), storage="fp8")
    take, before, seen = Step.take, [], []

    def noted(self):
        seen.append([ref.expired() for ref in before])
        work = take(self)
        before[:] = [StorageWeakRef(t.untyped_storage()) for t in (work.batch.aux_TAH, work.batch.last_MH)]
        return work

    monkeypatch.setattr(Step, "take", noted)
    train(config)
    assert len(seen) > 8 and seen[1:] == [[True, True]] * (len(seen) - 1)


def test_an_error_of_reading_ends_training_at_its_own_step_and_names_its_samples(synthetic_run, monkeypatch, logged):
    read = Feed.batch

    def broken(self, step):
        if step == 6:
            raise ValueError("the disk is gone")
        return read(self, step)

    monkeypatch.setattr(Feed, "batch", broken)
    with pytest.raises(ValueError, match="the disk is gone") as raised:
        train(synthetic_run)
    [note] = raised.value.__notes__
    assert note.startswith("Raised by the batch of step 7: c-0")
    assert [row["step"] for row in logged(synthetic_run) if "loss" in row] == [1, 2, 3, 4, 5, 6]
    assert not threads()


def test_sigterm_ends_the_threads_while_the_next_batch_is_read(synthetic_run, monkeypatch):
    log, read = Metrics.log, Feed.batch

    def slow(self, step):
        time.sleep(0.05)
        return read(self, step)

    def log_and_signal(self, step, **values):
        if step == 3 and "loss" in values:
            os.kill(os.getpid(), signal.SIGTERM)
        log(self, step, **values)

    monkeypatch.setattr(Feed, "batch", slow)
    monkeypatch.setattr(Metrics, "log", log_and_signal)
    train(synthetic_run)
    assert not threads()
    assert RunFolder.of(synthetic_run).complete_checkpoints()[-1].name == "step-0000004"
    monkeypatch.undo()
    train(synthetic_run)
    assert final_checkpoint(RunFolder.of(synthetic_run), "test").name == "step-0000011"
