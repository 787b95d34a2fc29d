"""The two sides of a spool without an engine: a capture whose states are drawn by sample id, and a training.

As a script it runs them as forks of one process that has imported everything, kills one of them, and prints what it
saw: `python spool_sides.py CONFIG LOG [SIDE:BATCHES:SECONDS ...]`. An attempt each, in which SIDE is killed SECONDS
after training has read BATCHES more; `-` is an attempt without a kill.
"""

import json
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from draftsmith.core.config import Config
from draftsmith.core.config_io import load_config
from draftsmith.core.run import RunFolder
from draftsmith.core.spool import folder_bytes, is_alive
from draftsmith.core.target import resolve_target
from draftsmith.hidden_state_capture.spool import ShardQueue, feed_training
from draftsmith.hidden_state_capture.spool_writer import SpoolWriter
from draftsmith.hidden_state_capture.writer import SampleStates, WriterConfig
from draftsmith.train.feed import SpoolFeed
from draftsmith.train.stage import train

HIDDEN, COLUMNS = 64, 4


def drawn_states(number: int, tokens: int) -> torch.Tensor:
    """As `random_states` of conftest.py gives them."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(tokens, COLUMNS, HIDDEN, generator=generator).to(torch.bfloat16)


def prefill(spoiled: tuple[str, ...] = (), shuffled: bool = True) -> Callable[..., None]:
    """A capture that draws states; of `spoiled` samples they are not finite. Samples end in any order."""

    def capture(config: Config, target: Any, layer_ids: list[int], samples: Any, queue: ShardQueue) -> None:
        sizes = config.capture.shard_bytes, config.capture.pending_bytes, config.capture.storage
        writer = SpoolWriter(RunFolder.of(config).spool, WriterConfig(*sizes, threads=2))
        put = 0
        while queue.wait():
            asked = []
            while (one := queue.take()) is not None:
                asked.append(one)
            if shuffled:
                random.shuffle(asked)
            for number, slot in asked:
                sample = samples[number]
                states = drawn_states(int(sample.sample_id[2:5]), len(sample.input_ids))
                if sample.sample_id in spoiled:
                    states[0] = float("nan")
                spans = [list(span) for span in sample.loss_spans]
                writer.put(SampleStates(sample.sample_id, sample.input_ids, spans, states, bool, slot=slot))
            put += len(asked)
            while writer.written < put:  # as the driver of an engine settles before it waits for room
                writer.check()
                time.sleep(0.001)
        writer.flush()

    return capture


@contextmanager
def capture_beside(config: Config, **how: Any) -> Iterator[list[BaseException]]:
    """A capture on a thread; what ended it, if anything did, is in the list."""
    ended: list[BaseException] = []

    def run() -> None:
        try:
            feed_training(config, prefill(**how))
        except BaseException as error:
            ended.append(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    yield ended
    thread.join(20)
    assert not thread.is_alive(), "the capture goes on without a training"


# ---- as a script -----------------------------------------------------------------------------------------------------


def attempt(config: Config, log: Path, kill: str, world_size: int) -> dict[str, Any]:
    """Run both sides and kill one of them; exit codes, what they said, and the most that the folder held."""
    sides = {"capture": fork(lambda: feed_training(config, prefill()), log / "capture.txt", kill == "full")}
    for rank in range(world_size):
        sides[f"train{rank}"] = fork(
            lambda rank=rank: training(config, log, rank, world_size), log / f"train{rank}.txt"
        )
    side, *moment = kill.split(":")
    before = batches_read(log)
    codes: dict[str, int] = {}
    most, kill_at, give_up = 0, 1e9, time.monotonic() + 300
    while len(codes) < len(sides):
        most = max(most, bytes_in(RunFolder.of(config).spool))
        now = time.monotonic()
        waits = moment and kill_at == 1e9 and is_alive(RunFolder.of(config).spool, "trainer")
        if waits and batches_read(log) - before >= int(moment[0]):
            kill_at = now + float(moment[1])
        if now > kill_at and side not in codes:
            os.kill(sides[side], signal.SIGKILL)
            give_up = now + 5  # where they had not seen each other yet, the one that is left waits for the next
        for name, pid in sides.items():
            done, status = os.waitpid(pid, os.WNOHANG) if name not in codes else (0, 0)
            if done:
                codes[name] = os.waitstatus_to_exitcode(status)
        for name in sides.keys() - codes.keys() if now > give_up else ():
            os.kill(sides[name], signal.SIGTERM)
        time.sleep(0.001)
    return {"codes": codes, "most": most, "said": {n: (log / f"{n}.txt").read_text() for n in sides}}


def batches_read(log: Path) -> int:
    """Batches that training has read so far, in all attempts."""
    file = log / "batches.jsonl"
    return file.read_text().count("\n") if file.is_file() else 0


def bytes_in(folder: Path) -> int:
    """What the spool holds now."""
    try:
        return folder_bytes(folder)
    except FileNotFoundError:
        return 0


def fork(work: Callable[[], None], output: Path, full: bool = False) -> int:
    """Run `work` in a child; errors end it as the command line would."""
    pid = os.fork()
    if pid:
        return pid
    code = 0
    try:
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        torch.set_num_threads(1)
        if full:  # what a full disk does, without one: a file cannot grow beyond this
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        work()
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        code = 1
    sys.stdout.flush()
    os._exit(code)


def training(config: Config, log: Path, rank: int, world_size: int) -> None:
    """`train`, every batch noted as it is handed over."""
    read = SpoolFeed.batch

    def noted(self: SpoolFeed, step: int) -> Any:
        batch = read(self, step)
        with (log / "batches.jsonl").open("a") as file:
            file.write(json.dumps({"rank": rank, "step": step, "ids": batch.sample_ids}) + "\n")
        return batch

    SpoolFeed.batch = noted  # type: ignore[method-assign]
    if world_size > 1:
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
        os.environ.update({**ranks, "MASTER_ADDR": "127.0.0.1", "ACCELERATE_USE_CPU": "true"})
    train(config)


def main() -> None:
    config, log, *kills = sys.argv[1:]
    loaded = load_config(config)
    resolve_target(loaded.target)  # imports transformers, once for all forks
    world_size = int(os.environ.pop("SIDES_WORLD_SIZE", "1"))
    print(json.dumps([attempt(loaded, Path(log), kill, world_size) for kill in kills]))


if __name__ == "__main__":
    main()
