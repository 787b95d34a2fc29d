"""Batches travel while kernels run: whole, into memory that nothing reads any more, at no cost to the step."""

import json
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftsmith.core.batch import Batch
from draftsmith.core.checkpoint import final_checkpoint
from draftsmith.core.fp8_states import encode
from draftsmith.core.run import RunFolder
from draftsmith.train.ahead import Ahead
from draftsmith.train.stage import train
from draftsmith.train.step import Work

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")]
READER = Path(__file__).parents[2] / "benchmarks" / "capture" / "reader.py"
TOKENS, AUX, HIDDEN = 2048, 3, 3072
TENTH = 200_000_000  # cycles: about a tenth of a second


def work_of(number, storage):
    states = torch.randn(TOKENS, AUX + 1, HIDDEN, generator=torch.Generator().manual_seed(number)).to(torch.bfloat16)
    aux, last, aux_scales, last_scales = states[:, :AUX].contiguous(), states[:, AUX].contiguous(), None, None
    if storage == "fp8":
        (aux, aux_scales), (last, last_scales) = encode(aux), encode(last)
        aux_scales, last_scales = aux_scales.pin_memory(), last_scales.pin_memory()
    rows = torch.arange(TOKENS).pin_memory()
    mask = (rows > 99).pin_memory()
    states = aux.pin_memory(), last.pin_memory()
    return Work(Batch((f"s{number}",), (0, TOKENS), rows, mask, rows, *states, rows, aux_scales, last_scales), None)


def tensors(batch):
    named = ((field.name, getattr(batch, field.name)) for field in fields(batch))
    return {name: value for name, value in named if isinstance(value, Tensor)}


@pytest.mark.parametrize("storage", ["bf16", "fp8"])
def test_a_batch_comes_whole_while_a_long_kernel_runs_and_nobody_waits_for_that(storage):
    works, cuda, gate = [work_of(i, storage) for i in range(4)], torch.device("cuda"), threading.Event()
    plain = tensors(works[3].to(cuda).batch)
    with Ahead(cuda) as ahead:
        ahead.begin(lambda: works[0])
        ahead.take(lambda: works[1])
        ahead.take(lambda: works[2])
        torch.cuda.synchronize()  # memory and kernels are there
        ahead.take(lambda: gate.wait() and works[3])
        torch.cuda._sleep(20 * TENTH)
        busy = torch.cuda.Event()
        busy.record()
        gate.set()
        began = time.perf_counter()
        found = tensors(ahead.take(None).batch)
        assert time.perf_counter() - began < 1.0
        ahead._stream.synchronize()
        assert not busy.query(), "the copy waited for the kernel"
        assert found.keys() == plain.keys()
        assert all(torch.equal(found[name], plain[name]) for name in plain)


def test_memory_of_a_batch_that_is_let_go_before_it_was_read_waits_for_the_reading():
    """As where reading takes long: the next copy begins when this batch's work is enqueued, and not yet done."""
    works, cuda, gate = [work_of(i, "bf16") for i in range(2)], torch.device("cuda"), threading.Event()
    expected = works[0].batch.aux_TAH.clone()
    seen = torch.empty_like(expected, device=cuda)
    with Ahead(cuda) as ahead:
        ahead.begin(lambda: works[0])
        first = ahead.take(lambda: gate.wait() and works[1])
        torch.cuda._sleep(5 * TENTH)
        seen.copy_(first.batch.aux_TAH)
        del first
        gate.set()
        second = ahead.take(None)
        ahead._stream.synchronize()
        assert torch.equal(seen.cpu(), expected)
        assert torch.equal(second.batch.aux_TAH.cpu(), works[1].batch.aux_TAH)


@pytest.mark.parametrize("storage", ["bf16", "fp8"])
def test_two_batches_share_the_memory_and_none_is_written_over_while_it_is_read(storage):
    """The host is far ahead of the GPU, which reads each batch a tenth of a second after it was taken."""
    works, cuda = [work_of(i, storage) for i in range(10)], torch.device("cuda")
    seen = torch.empty(len(works), TOKENS, AUX, HIDDEN, dtype=torch.bfloat16, device=cuda)
    expected = [work.to(cuda).batch.aux_TAH.cpu() for work in works]
    one = sum(t.nbytes for t in tensors(works[0].to(cuda).batch).values())
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["active_bytes.all.current"]
    with Ahead(cuda) as ahead:
        ahead.begin(lambda: works[0])
        for number in range(len(works)):
            following = works[number + 1] if number + 1 < len(works) else None
            taken = ahead.take(None if following is None else lambda following=following: following)
            torch.cuda._sleep(TENTH)
            seen[number].copy_(taken.batch.aux_TAH)
            del taken
    torch.cuda.synchronize()
    assert all(torch.equal(mine.cpu(), theirs) for mine, theirs in zip(seen, expected, strict=True))
    beside = one / 2 if storage == "fp8" else 0  # codes, until they are decoded
    assert torch.cuda.memory_stats()["active_bytes.all.peak"] - before <= 1.02 * (2 * one + beside)


def test_pinned_memory_is_not_used_again_before_it_was_copied():
    """The copies wait for one that takes longest; the host lets go of every batch as soon as it was taken."""
    cuda = torch.device("cuda")
    expected = [work_of(i, "bf16").batch.aux_TAH.clone() for i in range(6)]
    seen = torch.empty(len(expected), TOKENS, AUX, HIDDEN, dtype=torch.bfloat16, device=cuda)
    with Ahead(cuda) as ahead:
        ahead.begin(lambda: work_of(0, "bf16"))
        for number in range(len(expected)):
            last = number + 1 == len(expected)
            with torch.cuda.stream(ahead._stream):
                torch.cuda._sleep(TENTH)  # before the copy that `take` begins
            taken = ahead.take(None if last else lambda number=number: work_of(number + 1, "bf16"))
            seen[number].copy_(taken.batch.aux_TAH)
            del taken
    torch.cuda.synchronize()
    assert all(torch.equal(mine.cpu(), theirs) for mine, theirs in zip(seen, expected, strict=True))


@pytest.mark.parametrize("accumulated", [1, 2])
def test_losses_and_draft_are_those_of_plain_copies_bit_for_bit(synthetic_run, changed, copied_plainly, accumulated):
    options = {"attention": "triton", "hidden_noise": 0.1, "epochs": 4 * accumulated, "grad_accum_steps": accumulated}
    config = changed(synthetic_run, train=options)
    run = RunFolder.of(config)

    def outcome():
        rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
        figures = [(row["loss"], row["grad_norm"], row["loss_per_step"]) for row in rows if "loss" in row]
        return figures, (final_checkpoint(run, "test") / "draft.safetensors").read_bytes()

    train(config)
    found = outcome()
    shutil.rmtree(run.checkpoints)
    run.metrics.unlink()
    with copied_plainly():
        train(config)
    assert len(found[0]) >= 20 and outcome() == found


def test_less_than_a_fiftieth_of_a_step_is_spent_on_data_where_the_plain_copy_takes_more(tmp_path):
    """MiniMax-M2.5's width, 8,192 tokens a batch, by the trainer's own loop and clock."""
    out = tmp_path / "reader.json"
    command = [sys.executable, str(READER), "--gb", "1", "--storage", "bf16", "--tokens", "8192", "--passes", "2"]
    command += ["--steps", "20", "--folder", str(tmp_path / "store"), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())
    wait = found["wait"]
    assert found["to_device"]["ms"] / wait["step_ms"] > 0.02
    assert wait["data_share"] < 0.02
