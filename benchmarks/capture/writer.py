"""What the shard writer takes, without an engine: random states out of a ring of host memory, where GPU copies land.

    python benchmarks/capture/writer.py --gb 16 --threads 1 4 8 12 --folder /tmp/w --folder /dev/shm/w --out writer.json

Prints a JSON object a folder and number of threads: GB/s until the producer had handed over everything (what an engine
would see), and until every shard was hashed, synced and committed. The folder is emptied afterwards.
"""

import argparse
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from draftsmith.hidden_state_capture.gather import Batch, SampleRows
from draftsmith.hidden_state_capture.ring import HostRing
from draftsmith.hidden_state_capture.writer import ShardWriter, WriterConfig

LAYERS, LENGTH = 3, 1500


def batch_of(ring: HostRing, first: int, count: int, hidden: int) -> Batch:
    """Samples whose second half has labels; the ring's bytes are taken as they are."""
    rows = [SampleRows.of(f"s{first + i:06d}", [1] * LENGTH, [[LENGTH // 2, LENGTH]]) for i in range(count)]
    tokens, lasts = count * LENGTH, sum(len(r.last_rows_M) for r in rows)
    sizes = tokens * LAYERS * hidden * 2, lasts * hidden * 2
    region = ring.take(sum(sizes))
    aux, last = region.bytes_B[: sizes[0]], region.bytes_B[sizes[0] : sum(sizes)]
    found = {
        "aux_states": aux.view(torch.bfloat16).view(tokens, LAYERS, hidden),
        "last_states": last.view(torch.bfloat16).view(lasts, hidden),
        "aux_peaks": torch.ones(tokens, LAYERS), "last_peaks": torch.ones(lasts),
    }  # fmt: skip
    return Batch(rows, sum(sizes), lambda: dict(found), lambda: ring.give(region))


def measure(folder: Path, threads: int, args: argparse.Namespace) -> dict[str, Any]:
    shutil.rmtree(folder, ignore_errors=True)
    ring = HostRing(args.pending_bytes, pinned=torch.cuda.is_available())
    ring._memory.random_(1, 100)
    writer = ShardWriter(folder, WriterConfig(args.shard_bytes, args.pending_bytes, threads=threads))
    per_sample = LENGTH * (LAYERS * 2 + 1) * args.hidden  # the last states of half of the rows
    count = max(1, args.batch_bytes // per_sample)
    wanted, given, begin = int(args.gb * 1e9 / per_sample), 0, time.monotonic()
    while given < wanted:
        writer.put(batch_of(ring, given, min(count, wanted - given), args.hidden))
        given += count
    handed = time.monotonic() - begin
    writer.flush()
    done = time.monotonic() - begin
    written = sum(e.stat().st_size for e in os.scandir(folder) if e.name.endswith(".safetensors"))
    shutil.rmtree(folder)
    return {
        "folder": str(folder), "threads": threads, "gb": round(written / 1e9, 2),
        "handed_over_gb_per_second": round(written / 1e9 / handed, 2),
        "committed_gb_per_second": round(written / 1e9 / done, 2),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=16.0)
    parser.add_argument("--hidden", type=int, default=3072)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 4, 8, 12])
    parser.add_argument("--folder", type=Path, action="append", required=True)
    parser.add_argument("--shard-bytes", type=int, default=1024**3)
    parser.add_argument("--pending-bytes", type=int, default=2 * 1024**3)
    parser.add_argument("--batch-bytes", type=int, default=128 * 1024**2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = []
    for folder in args.folder:
        for threads in args.threads:
            found.append(measure(folder, threads, args))
            print(json.dumps(found[-1]), flush=True)
    if args.out:
        args.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
