"""How fast batches come out of a store, and how long training waits for them.

    python benchmarks/capture/reader.py --gb 8 --storage bf16 fp8 --out reader.json     # MiniMax-M2.5's shape
    python benchmarks/capture/reader.py --gb 0.05 --hidden 576 --tokens 2048 --steps 20 # a CPU, tiny

Writes a store of random states into --folder (left there, and used again), then measures, a JSON object a storage:

- `first_pass`, `later_passes`: GB/s of the states on disk, from the page cache into a batch: pinned memory on a CUDA
  host, plain memory elsewhere. In the first pass pages are not mapped yet and pinned memory is not there yet.
- `to_device`: GB/s of the bf16 states from there to the GPU, decoding included (CUDA only).
- `wait`: the trainer's own loop over its batches (`Trainer._batches`), and what it waited for them: `wait_` until they
  were read, `data_` until they were on the device (training's `data_seconds`). A step is the fused pass with its
  optimizer at the MiniMax-M2.5 draft's shape on a GPU, and a sleep of --step-ms elsewhere.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file

from draftsmith.core.batch import Batch
from draftsmith.core.config import Config
from draftsmith.core.fp8_states import FP8
from draftsmith.core.manifest import package_versions, write_manifest
from draftsmith.core.store import INDEX, INDEX_SCHEMA, bytes_per_row, shard_name
from draftsmith.data.batching import collate, plan_batches
from draftsmith.hidden_state_capture.reader import HiddenStateStore
from draftsmith.train.ahead import Step
from draftsmith.train.clock import Clock
from draftsmith.train.feed import Feed
from draftsmith.train.loop import Trainer
from draftsmith.train.state import TrainState
from draftsmith.train.step import TrainingStep, Work

LENGTH, SUPERVISED, LAYERS, VOCAB = 1000, 0.6, 3, 200064
SHARD_TOKENS = 40_000


def make_store(folder: Path, gb: float, hidden: int, storage: str) -> HiddenStateStore:
    """A store of `gb` * 10^9 bytes; its states are random, its checksums empty."""
    if (folder / "manifest.json").exists():
        return HiddenStateStore(folder)
    folder.mkdir(parents=True)
    per_token, per_label = bytes_per_row(storage, LAYERS, hidden)
    count = max(8, int(gb * 1e9 / (LENGTH * (per_token + SUPERVISED * per_label))))
    rows: list[dict[str, Any]] = []
    shards: list[dict[str, Any]] = []
    for first in range(0, count, SHARD_TOKENS // LENGTH):
        mine = min(SHARD_TOKENS // LENGTH, count - first)
        name = shard_name(len(shards))
        save_file(shard_tensors(mine, hidden, storage, len(shards)), folder / name)
        rows += [index_row(first + i, i, len(shards)) for i in range(mine)]
        size = (folder / name).stat().st_size
        shards.append({"file": name, "sha256": "", "samples": mine, "tokens": mine * LENGTH, "bytes": size})
    pq.write_table(pa.Table.from_pylist(rows, schema=INDEX_SCHEMA), folder / INDEX)
    outputs = {
        "target": {"hidden_size": hidden},
        "layer_ids": list(range(LAYERS)),
        "storage": storage,
        "shards": shards,
    }
    write_manifest(folder, "capture", {}, outputs)
    return HiddenStateStore(folder)


def index_row(number: int, row: int, shard: int) -> dict[str, Any]:
    labels = int(LENGTH * SUPERVISED)
    return {
        "sample_id": f"s{number:07d}", "shard": shard, "row": row, "start": row * LENGTH, "length": LENGTH,
        "last_start": row * labels, "last_length": labels, "supervised_tokens": labels, "split": "train",
        "source": "random", "sha256": "",
    }  # fmt: skip


def shard_tensors(samples: int, hidden: int, storage: str, seed: int) -> dict[str, torch.Tensor]:
    n, labels, draw = samples * LENGTH, int(LENGTH * SUPERVISED), np.random.default_rng(seed)
    mask = torch.zeros(samples, LENGTH, dtype=torch.uint8)
    mask[:, LENGTH - labels :] = 1
    rows = mask.roll(-1, 1)
    rows[:, -1] = 0
    rows[:, LENGTH - labels - 1] = 1
    last_rows = rows.flatten().nonzero().squeeze(1).to(torch.int32)

    def states(*shape: int) -> torch.Tensor:
        # Random bytes with the exponent's highest bit cleared: finite in either format, and as hard to compress.
        size = int(np.prod(shape)) * (2 if storage == "bf16" else 1)
        drawn = np.frombuffer(draw.bytes(size), dtype=np.uint8) & 0xBF
        return torch.from_numpy(drawn).view(torch.bfloat16 if storage == "bf16" else FP8).view(shape)

    tensors = {
        "input_ids": torch.from_numpy(draw.integers(0, VOCAB, n, dtype=np.int32)), "loss_mask": mask.flatten(),
        "aux_states": states(n, LAYERS, hidden), "last_states": states(len(last_rows), hidden),
        "last_rows": last_rows, "sample_offsets": torch.arange(0, n + 1, LENGTH),
    }  # fmt: skip
    if storage == "fp8":
        tensors |= {"aux_scales": torch.rand(n, LAYERS), "last_scales": torch.rand(len(last_rows))}
    return tensors


def nbytes(batch: Batch) -> int:
    return batch.aux_TAH.nbytes + batch.last_MH.nbytes


def passes(store: HiddenStateStore, tokens: int, count: int) -> tuple[list[float], list[list[int]]]:
    """GB/s of every pass over the store, batch by batch, and the batches."""
    for shard in store.manifest["shards"]:
        (store.folder / shard["file"]).read_bytes()  # into the page cache
    plan, rates = plan_batches(store.lengths(store.numbers("train")), tokens), []
    for _ in range(count):
        began, size = time.perf_counter(), 0
        for numbers in plan:
            size += nbytes(collate(store, numbers))
        rates.append(size / (time.perf_counter() - began) / 1e9)
    return rates, plan


def to_device(store: HiddenStateStore, plan: list[list[int]]) -> dict[str, float]:
    """Median ms of `Batch.to`, and GB/s of the bf16 states that are there afterwards."""
    times, rates = [], []
    for numbers in plan[:12]:
        batch = collate(store, numbers)
        torch.cuda.synchronize()
        began = time.perf_counter()
        there = batch.to(torch.device("cuda"))
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e3)
        rates.append(nbytes(there) / times[-1] / 1e6)
    return {"ms": statistics.median(times), "gb_per_second": statistics.median(rates)}


def waits(store: HiddenStateStore, args: argparse.Namespace) -> dict[str, float]:
    """Steps over the trainer's own batches; the first ones compile kernels and map pages, and do not count."""
    epochs = 1 + (args.steps + args.warmup) * args.tokens // sum(s["tokens"] for s in store.manifest["shards"])
    train = {"tokens_per_batch": args.tokens, "epochs": epochs}
    config, cuda = Config.model_validate({"train": train}), torch.cuda.is_available()
    feed = Feed(store, config, 0, 1)
    step, work_on = fused_step(config) if cuda else slept_step(config, args.step_ms)
    there: Any = SimpleNamespace(device=torch.device("cuda" if cuda else "cpu"), num_processes=1)
    state = TrainState(0, min(len(feed.plan), args.steps + args.warmup), 0, 1, {})
    nothing: Any = None
    trainer = Trainer(config, there, store, nothing, step, feed, [], nothing, nothing, state)
    began = time.perf_counter()
    for number, batches in enumerate(trainer._batches(0)):
        if number == args.warmup:
            trainer.clock.take()
            began, feed.waited = time.perf_counter(), 0.0
        for _ in batches.works:
            work_on(taken(trainer.clock, batches))
    seconds = time.perf_counter() - began
    steps = state.total_steps - args.warmup
    data = trainer.clock.take()["data"] + feed.waited
    return {
        "steps": steps, "step_ms": seconds / steps * 1e3, "wait_ms": feed.waited / steps * 1e3,
        "wait_share": feed.waited / seconds, "data_ms": data / steps * 1e3, "data_share": data / seconds,
        "tokens_per_second": steps * args.tokens / seconds,
    }  # fmt: skip


def taken(clock: Clock, batches: Step) -> Work:
    """The next batch on the device, as the trainer takes it; nothing else refers to it."""
    with clock.part("data"):
        return batches.take()


def slept_step(config: Config, ms: float) -> tuple[TrainingStep, Any]:
    return TrainingStep(torch.nn.Identity(), config.train, None), lambda work: time.sleep(ms / 1e3)


def fused_step(config: Config) -> tuple[TrainingStep, Any]:
    """Forward, backward and AdamW, as benchmarks/training/step.py measures them."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
    from step import build

    objective = build(32000, "cuda")
    optimizer = torch.optim.AdamW(objective.draft.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
    weights = 0.8 ** torch.arange(config.train.ttt_steps, device="cuda") / config.train.tokens_per_batch
    step = TrainingStep(objective, config.train, torch.bfloat16)

    def work_on(work: Work) -> None:
        loss, _ = step(work, weights)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()  # the trainer reads the gradient's norm at every step

    return step, work_on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "draftsmith-reader")
    parser.add_argument("--gb", type=float, default=8.0)
    parser.add_argument("--hidden", type=int, default=3072, help="3072 where a GPU takes the steps")
    parser.add_argument("--storage", nargs="+", default=["bf16", "fp8"], choices=["bf16", "fp8"])
    parser.add_argument("--tokens", type=int, default=16384, help="of a batch")
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--step-ms", type=float, default=100.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = []
    for storage in args.storage:
        store = make_store(args.folder / f"{storage}-{args.hidden}-{args.gb:g}", args.gb, args.hidden, storage)
        rates, plan = passes(store, args.tokens, args.passes)
        pinned = torch.cuda.is_available()
        result = {
            "storage": storage, "bytes": sum(s["bytes"] for s in store.manifest["shards"]), "hidden": args.hidden,
            "tokens": args.tokens, "pinned": pinned, "first_pass": rates[0],
            "later_passes": statistics.median(rates[1:] or rates), "all_passes": rates,
            "to_device": to_device(store, plan) if pinned else None, "wait": waits(store, args),
            "device": torch.cuda.get_device_name() if pinned else None, "cpus": os.cpu_count(),
            "threads": torch.get_num_threads(), "versions": package_versions(),
        }  # fmt: skip
        print(json.dumps(result), flush=True)
        results.append(result)
    if args.out:
        args.out.write_text("".join(json.dumps(r) + "\n" for r in results))


if __name__ == "__main__":
    main()
