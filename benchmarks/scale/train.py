"""Training steps on 1..n GPUs by every engine, at the MiniMax-M2.5 draft's shape, on random states that are on the GPU.

    python benchmarks/scale/train.py --out train.json --processes 1 2 --seconds 900
    python benchmarks/scale/train.py --out tried.json --processes 1 2 --shape tiny --tokens 256      # two CPU cores

Every cell is a launch of its own of the training loop's own optimizer step: rows counted over all ranks, forward,
backward, clipping, AdamW. JSON is written after each; cells that the time does not allow are named as left out.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ENGINES: dict[str, dict[str, str]] = {
    "ddp": {},
    "fsdp2": {"shard": "fsdp2"},
    **{
        name: {"engine": "deepspeed", "deepspeed_config": f"configs/deepspeed/{name}.json"}
        for name in ("zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
    },
}


def work(args: argparse.Namespace) -> None:
    """One rank of one cell; the first one writes the figures."""
    from accelerate.utils import gather_object

    sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
    from step import build, documents, make_batch, shape

    from draftsmith.core.config import Config
    from draftsmith.core.run import RunFolder
    from draftsmith.train.engine import make_accelerator, open_engine
    from draftsmith.train.loop import Trainer
    from draftsmith.train.optim import make_optimizer
    from draftsmith.train.state import TrainState
    from draftsmith.train.step import TrainingStep, fused_dtype

    options = {"ttt_steps": args.ttt, "tokens_per_batch": args.tokens, "grad_accum_steps": args.accum}
    config = Config.model_validate({"train": {**options, "kernels": args.kernels, **ENGINES[args.engine]}})
    accelerator = make_accelerator(RunFolder.of(config))
    device = accelerator.device
    if args.shape == "tiny":
        sizes = dict(hidden_size=128, num_heads=4, num_kv_heads=4, head_dim=32, intermediate_size=256, vocab_size=4096)
        args.vocab, of = 1024, shape(1024, **sizes)
    else:
        of = shape(args.vocab)
    engine = open_engine(config, accelerator)
    bare = build(args.vocab, str(device), of)
    step = TrainingStep(bare, config.train, fused_dtype(config.train, of, device, engine.half))
    engine.prepare(step, lambda named: make_optimizer(config.train, named))
    nothing: Any = None
    state = TrainState(0, 10**6, 0, accelerator.num_processes * args.accum, {})
    trainer = Trainer(config, accelerator, nothing, engine, engine.step, nothing, [], nothing, nothing, state)
    works = []
    for i in range(args.accum):
        docs = documents(args.workload, args.tokens, accelerator.process_index * args.accum + i)
        works.append(step.lay_out(make_batch(docs, str(device), of)).to(device))
    own = timed(trainer, works, args)
    ranks = gather_object([own])
    if accelerator.is_main_process:
        ms = max(rank["ms"] for rank in ranks)
        worst = {key: max(rank[key] for rank in ranks) for key in ("peak_gb", "held_gb")}
        rate = 1e3 * sum(rank["tokens"] for rank in ranks) / ms
        Path(args.worker).write_text(json.dumps({"ms": ms, "tokens_per_second": rate, **worst, "ranks": ranks}))


class There:
    """Batches that are on the device already, as the loop takes them, again at every step."""

    def __init__(self, works: list[Any]) -> None:
        self.works, self.take = works, itertools.cycle(works).__next__


def timed(trainer: Any, works: list[Any], args: argparse.Namespace) -> dict[str, Any]:
    """This rank's figures; seconds by part and memory of the steps after the first ones, losses and norms of all."""
    import torch

    gpu, times, losses, norms, batches = torch.cuda.is_available(), [], [], [], There(works)
    for number in range(args.warmup + args.steps):
        if number == args.warmup:
            trainer.clock.take()
            if gpu:
                torch.cuda.reset_peak_memory_stats()
        trainer.accelerator.wait_for_everyone()
        began = time.perf_counter()
        sums, rows, norm, _ = trainer._optimizer_step(batches, (False, False))
        if gpu:
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
        losses.append(float(trainer.accelerator.reduce(sums.loss_J)[0] / rows[0]))
        norms.append(norm)
        trainer.state.step += 1
    times = times[args.warmup :]
    parts = {part: spent / args.steps for part, spent in trainer.clock.take().items()}
    tokens = sum(work.batch.num_tokens for work in works)
    return {"ms": statistics.median(times), "spread_ms": [min(times), max(times)], "tokens": tokens, "seconds": parts,
            "losses": losses, "grad_norms": norms, **memory(gpu)}  # fmt: skip


def memory(gpu: bool) -> dict[str, float]:
    """Most that a rank held in its steps, and what it holds between them; without a GPU, of its whole process."""
    import psutil
    import torch

    if gpu:
        return {"peak_gb": torch.cuda.max_memory_allocated() / 1e9, "held_gb": torch.cuda.memory_allocated() / 1e9}
    held = psutil.Process().memory_info().rss / 1e9
    return {"peak_gb": held, "held_gb": held}


def launch(args: argparse.Namespace, processes: int, engine: str, seconds: float) -> dict[str, Any]:
    """One cell, in at most so many seconds."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        same = ["tokens", "ttt", "vocab", "workload", "shape", "kernels", "accum", "warmup", "steps"]
        options = [part for name in same for part in (f"--{name}", str(getattr(args, name)))]
        many = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command = [sys.executable, *(many if processes > 1 else []), __file__, "--out", "-", *options]
        env = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        process = subprocess.Popen([*command, "--worker", str(out), "--engine", engine], env=env,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # fmt: skip
        try:
            said = process.communicate(timeout=seconds)[0]
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun takes its processes with it
            said = process.communicate()[0]
            return {"failed": f"not done in {seconds:.0f} s", "said": said[-8000:]}
        if process.returncode or not out.is_file():
            return {"failed": f"exit {process.returncode}", "said": said[-8000:]}
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--processes", type=int, nargs="+", default=[1], help="a GPU each")
    parser.add_argument("--engines", nargs="+", default=["ddp", "fsdp2", "zero1", "zero2", "zero3"], choices=ENGINES)
    parser.add_argument("--seconds", type=float, default=1500, help="for all cells together")
    parser.add_argument("--shape", choices=["minimax-m2.5", "tiny"], default="minimax-m2.5")
    parser.add_argument("--workload", choices=["dense", "conversations", "equal"], default="dense")
    parser.add_argument("--tokens", type=int, default=8192, help="of a batch on one process")
    parser.add_argument("--accum", type=int, default=1, help="batches of a process in a step")
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--ttt", type=int, default=7)
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(args)
    from draftsmith.core.manifest import package_versions

    settings = {k: v for k, v in vars(args).items() if k not in ("out", "worker", "engine")}
    found: dict[str, Any] = {"settings": settings, "versions": package_versions(), "cells": [], "left_out": []}
    end = time.monotonic() + args.seconds
    for processes in args.processes:
        for engine in args.engines:
            left = end - time.monotonic()
            if left < 30:
                found["left_out"].append([processes, engine])
                Path(args.out).write_text(json.dumps(found, indent=2) + "\n")
                continue
            cell = {"processes": processes, "engine": engine, **launch(args, processes, engine, left)}
            found["cells"].append(cell)
            one = next((c for c in found["cells"] if c["processes"] == 1 and "ms" in c and c["engine"] == "ddp"), None)
            if one and "ms" in cell:
                cell["speedup"] = cell["tokens_per_second"] / one["tokens_per_second"]
            Path(args.out).write_text(json.dumps(found, indent=2) + "\n")
            said = {k: round(v, 2) for k, v in cell.items() if isinstance(v, float)} or cell.get("failed")
            print(processes, engine, said, flush=True)


if __name__ == "__main__":
    main()
