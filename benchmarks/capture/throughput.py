"""Prefill tokens a second: bare, with vLLM's own connector, and with ours, alternating, on the same disk.

    python benchmarks/capture/throughput.py --only smollm2 --seconds 60 --folder /tmp/states --out smollm2.json

Every engine is a process of its own with the same settings. Where three fit on the GPU they stay alive and take turns,
round by round; otherwise (`minimax62`) they run one after another. A round ends when its last state is written: ours
also when every shard is hashed, synced and committed.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
from cases import CASES, ENGINES, TOGETHER, Case, engine_args, make_job, prompts, stock_bytes

from draftsmith.core.engine import answer, has_cuda, lead_group, vllm_engine
from draftsmith.core.samples import Sample
from draftsmith.hidden_state_capture.driver import Job, Replica


def work(engine: str, job: Job, samples: list[Sample], parent: int, pipe: Connection) -> None:
    """An engine that runs a round whenever it is asked to; answers with the seconds of its parts."""
    lead_group(parent)
    if engine == "ours":
        with Replica(job, 0) as replica:
            serve(pipe, lambda count: our_round(replica, samples[:count]))
        return
    with vllm_engine(job.config.target, job.target, **engine_args(engine, job)) as llm:
        serve(pipe, lambda count: plain_round(llm, job, samples[:count], engine))


def serve(pipe: Connection, run_round: Callable[[int], dict[str, float]]) -> None:
    """Run rounds of so many samples as are asked for, until none is."""
    pipe.send("ready")
    while count := pipe.recv():
        pipe.send(run_round(count))


def our_round(replica: Replica, samples: list[Sample]) -> dict[str, float]:
    begin = time.monotonic()
    replica.prefill(samples, None)
    on_host = time.monotonic() - begin
    replica.flush()
    return {"prefilled": on_host, "seconds": time.monotonic() - begin}


def plain_round(llm: Any, job: Job, samples: list[Sample], engine: str) -> dict[str, float]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
    rest = iter(enumerate(samples))

    def take() -> Any:
        found = next(rest, None)
        return None if found is None else (found[0], found[1].input_ids, params)

    begin = time.monotonic()
    for _ in answer(llm, take, 4 * job.config.capture.max_num_seqs):
        pass
    prefilled = time.monotonic() - begin
    expected, deadline = stock_bytes(job, samples), begin + 300
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    while engine == "stock" and folder_bytes(job.folder) < expected and time.monotonic() < deadline:
        if core is not None and core.scheduler.has_requests():
            llm.llm_engine.step()
        time.sleep(0.01)
    return {"prefilled": prefilled, "seconds": time.monotonic() - begin}


def folder_bytes(folder: Path) -> int:
    return sum(entry.stat().st_size for entry in os.scandir(folder) if entry.name.endswith(".safetensors"))


class Engine:
    """Its process, and what is measured from outside."""

    def __init__(self, name: str, job: Job, samples: list[Sample]) -> None:
        self.name, self.job, self.lengths = name, job, [len(s.input_ids) for s in samples]
        self.pipe, theirs = multiprocessing.get_context("spawn").Pipe()
        args = (name, job, samples, os.getpid(), theirs)
        self.process = multiprocessing.get_context("spawn").Process(target=work, args=args)
        self.begin = time.monotonic()
        self.process.start()

    def ready(self) -> None:
        """Wait for the engine's start."""
        assert self.receive() == "ready"
        print(f"{self.name}: ready in {time.monotonic() - self.begin:.0f} s", flush=True)

    def receive(self) -> Any:
        while not self.pipe.poll(0.2):
            if not self.process.is_alive():
                raise SystemExit(f"the engine `{self.name}` died; its messages are above")
        return self.pipe.recv()

    def round(self, folder: Path, share: float = 1.0) -> dict[str, Any]:
        """Prefill a share of the samples; one row of the results."""
        point(self.job.folder, folder)
        count = max(1, round(share * len(self.lengths)))
        self.pipe.send(count)
        found, tokens = self.receive(), sum(self.lengths[:count])
        written = folder_bytes(folder)
        row = {
            "engine": self.name, "folder": str(folder), "tokens": tokens,
            "tokens_per_second": round(tokens / found["seconds"]),
            "prefilled_per_second": round(tokens / found["prefilled"]), "bytes": written,
            "gb_per_second": round(written / found["seconds"] / 1e9, 3), "host_rss": rss(self.process.pid),
            "gpu_memory": gpu_memory(),
        }  # fmt: skip
        clear(folder)
        print(json.dumps(row), flush=True)
        return row

    def stop(self) -> None:
        self.pipe.send(0)
        self.process.join(60)
        self.process.kill()


def point(link: Path, folder: Path) -> None:
    """Empty the folder and let the link, which the engines know, lead there."""
    clear(folder)
    link.unlink(missing_ok=True)
    link.symlink_to(folder)


def clear(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def rss(pid: int | None) -> int:
    """Resident memory of a process and its children: what they share is counted once a process."""
    top = psutil.Process(pid)
    return sum(p.memory_info().rss for p in [top, *top.children(recursive=True)])


def gpu_memory() -> list[int]:
    """MiB in use on every GPU."""
    if not has_cuda():
        return []
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(x) for x in subprocess.run(command, capture_output=True, text=True).stdout.split()]


def measure(case: Case, args: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    """Rounds of all engines until the time is up, at least one of each beside a warm-up."""
    folders = [Path(f) / f"draftsmith-{case.name}" for f in args.folder]
    settings = {"cpu": not has_cuda(), **json.loads(args.capture)}
    job = make_job(case, scratch, scratch / "link", settings, json.loads(args.engine_args))
    samples = prompts(case, job, args.tokens or case.tokens)
    point(job.folder, folders[0])
    together = case.memory < TOGETHER
    rows: list[dict[str, Any]] = []
    alive: list[Engine] = []
    for name in args.engines.split(","):
        alive.append(Engine(name, job, samples))
        if not (together and has_cuda()):
            alive[-1].ready()
        if not together:
            rows += rounds(alive, folders, args.seconds / len(ENGINES))
            alive.pop().stop()
    if alive:
        if has_cuda():
            for engine in alive:
                engine.ready()
        while args.after and not args.after.exists():
            time.sleep(0.2)
        rows += rounds(alive, folders, args.seconds)
    for engine in alive:
        engine.stop()
    return rows


def rounds(engines: list[Engine], folders: list[Path], seconds: float) -> list[dict[str, Any]]:
    for engine in engines:
        engine.round(folders[0], 0.1)  # warm-up: compilation, pinned memory, page tables
    begin, rows = time.monotonic(), []
    while not rows or time.monotonic() - begin < seconds:
        rows += [engine.round(folder) for folder in folders for engine in engines]
    return rows


def summary(case: Case, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the rounds by engine and folder, and ours as a share of bare."""
    found: dict[str, Any] = {"case": case.name, "length": case.length}
    for folder in dict.fromkeys(r["folder"] for r in rows):
        cell: dict[str, Any] = {}
        for engine in ENGINES:
            mine = [r for r in rows if r["folder"] == folder and r["engine"] == engine]
            if mine:
                rates = [r["tokens_per_second"] for r in mine]
                cell[engine] = {
                    "tokens_per_second": round(statistics.median(rates)), "lowest": min(rates), "highest": max(rates),
                    "prefilled_per_second": round(statistics.median(r["prefilled_per_second"] for r in mine)),
                    "gb_per_second": round(statistics.median(r["gb_per_second"] for r in mine), 3), "rounds": len(mine),
                    "host_rss_first_last": [mine[0]["host_rss"], mine[-1]["host_rss"]],
                    "gpu_memory": mine[-1]["gpu_memory"],
                }  # fmt: skip
        if "bare" in cell:
            for engine in set(cell) - {"bare"}:
                cell[engine]["of_bare"] = round(
                    cell[engine]["tokens_per_second"] / cell["bare"]["tokens_per_second"], 4
                )
        found[folder] = cell
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=CASES, required=True)
    parser.add_argument("--seconds", type=float, default=60.0, help="of rounds; the starts of the engines come on top")
    parser.add_argument("--tokens", type=int, help="of a round, instead of the case's")
    parser.add_argument("--folder", action="append", required=True, help="where the states go; several take turns")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--engine-args", default="{}", help='JSON, e.g. {"enforce_eager": true}')
    parser.add_argument("--capture", default="{}", help='JSON of the capture section, e.g. {"writer_threads": 4}')
    parser.add_argument("--after", type=Path, help="ready engines wait for this file: others may be measuring")
    parser.add_argument("--scratch", type=Path, default=Path("/tmp/draftsmith-bench"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.scratch.mkdir(exist_ok=True)
    case = CASES[args.only]
    begin = time.monotonic()
    rows = measure(case, args, args.scratch)
    from vllm import __version__

    result = {
        **summary(case, rows),
        "vllm": __version__,
        "total_seconds": round(time.monotonic() - begin),
        "rows": rows,
    }
    print(json.dumps({k: v for k, v in result.items() if k != "rows"}))
    if args.out:
        args.out.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
