"""Are captured states the same whatever the engine does around them?

    python benchmarks/capture/check.py --only smollm2            # many at once and in chunks, against one by one
    python benchmarks/capture/check.py --only minimax4 --tp 2    # two GPUs against one

Prints the relative error of every layer's rows between the two captures, median and largest.
"""

import argparse
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cases import CASES, Case, make_job, prompts
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.core.engine import has_cuda, in_engine_process
from draftsmith.core.samples import Sample
from draftsmith.hidden_state_capture.driver import Job, Replica
from draftsmith.hidden_state_capture.shard import committed_shards


def capture(job: Job, ways: list[tuple[Path, int, list[Sample]]]) -> None:
    """On one engine, one way after the other: folder, requests in flight, samples."""
    with Replica(job, 0) as replica:
        link = job.folder
        for folder, in_flight, samples in ways:
            link.unlink(missing_ok=True)
            link.symlink_to(folder)
            for i in range(0, len(samples), in_flight):
                replica.prefill(samples[i : i + in_flight], None)
            replica.flush()


def stored(folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """sample_id -> aux_states and last_states."""
    found = {}
    for sidecar in committed_shards(folder):
        tensors = load_file(folder / sidecar["shard"]["file"])
        for row in sidecar["rows"]:
            rows = slice(row["start"], row["start"] + row["length"])
            lasts = slice(row["last_start"], row["last_start"] + row["last_length"])
            found[row["sample_id"]] = tensors["aux_states"][rows], tensors["last_states"][lasts]
    return found


def errors(one: dict[str, Any], other: dict[str, Any]) -> dict[str, list[float]]:
    """Layer column -> median and largest relative error of a row; the last state under `last`."""
    assert one.keys() == other.keys() and one
    columns: dict[str, list[Tensor]] = {}
    for sample_id, (aux, last) in one.items():
        theirs = other[sample_id]
        pairs = {str(i): (aux[:, i], theirs[0][:, i]) for i in range(aux.shape[1])} | {"last": (last, theirs[1])}
        for name, (a, b) in pairs.items():
            columns.setdefault(name, []).append((a.float() - b.float()).norm(dim=-1) / b.float().norm(dim=-1))
    return {n: [float(torch.cat(v).median()), float(torch.cat(v).max())] for n, v in columns.items()}


def ways_of(case: Case, args: argparse.Namespace) -> dict[str, Path]:
    """Capture both ways; folder by name."""
    settings = {"cpu": not has_cuda(), "max_batched_tokens": args.chunk, "shard_bytes": 1 << 26}
    base = args.scratch / f"check-{case.name}"
    shutil.rmtree(base, ignore_errors=True)
    names = ["tp1", f"tp{args.tp}"] if args.tp > 1 else ["many", "alone"]
    folders = {name: base / name for name in names}
    for folder in folders.values():
        folder.mkdir(parents=True)
    draw = np.random.default_rng(1)

    def job_and_samples(gpus: int) -> tuple[Job, list[Sample]]:
        job = make_job(
            dataclasses.replace(case, gpus=gpus), args.scratch, base / "link", dict(settings), args.engine_args
        )
        lengths = draw.integers(args.longest // 4, args.longest, size=args.samples)
        whole = prompts(dataclasses.replace(case, length=args.longest), job, args.samples * args.longest)
        cut = [
            dataclasses.replace(s, input_ids=s.input_ids[:n], loss_spans=[(1, int(n))])
            for s, n in zip(whole, lengths, strict=True)
        ]
        (base / "link").unlink(missing_ok=True)
        (base / "link").symlink_to(folders[names[0]])
        return job, cut

    if args.tp > 1:
        for name, gpus in zip(names, (1, args.tp), strict=True):
            draw = np.random.default_rng(1)
            job, samples = job_and_samples(gpus)
            in_engine_process(capture, job, [(folders[name], len(samples), samples)])
    else:
        job, samples = job_and_samples(case.gpus)
        in_engine_process(capture, job, [(folders["many"], len(samples), samples), (folders["alone"], 1, samples)])
    return folders


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=CASES, default="smollm2")
    parser.add_argument("--samples", type=int, default=24)
    parser.add_argument("--longest", type=int, default=1500)
    parser.add_argument("--chunk", type=int, default=512, help="tokens of an engine step: shorter than most samples")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--engine-args", type=json.loads, default={})
    parser.add_argument("--scratch", type=Path, default=Path("/tmp/draftsmith-bench"))
    args = parser.parse_args()
    args.scratch.mkdir(exist_ok=True)
    folders = ways_of(CASES[args.only], args)
    one, other = (stored(folder) for folder in folders.values())
    print(json.dumps({"case": args.only, "compared": list(folders), "samples": len(one), "errors": errors(one, other)}))


if __name__ == "__main__":
    main()
