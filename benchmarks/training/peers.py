"""Peers' EAGLE3 training steps on the documents of `workload.py`: tokens a second and peak memory.

    python benchmarks/training/peers.py --peer speculators,specforge --workload dense --tokens 2048,8192

Lists are multiplied out. Every measurement is a process of its own with a time limit, and prints one JSON line whether
it succeeded or not. README.md beside this file says which packages are needed and what each peer is made to do.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version

import workload

PEERS = ("speculators", "specforge")


@dataclass(frozen=True)
class Cell:
    """One measurement: what is trained, on what, and how often."""

    peer: str
    workload: str
    tokens: int
    seed: int
    ttt_steps: int
    draft_vocab: int
    head: str
    documents_per_batch: int
    warmup: int
    steps: int
    tiny: bool

    def documents(self) -> list[workload.Document]:
        """The documents of every step."""
        if self.workload == "dense":
            return workload.dense(self.tokens)
        return workload.conversations(self.tokens, self.seed)


@dataclass(frozen=True)
class Shape:
    """The draft's shape; the default is the MiniMax-M2.5 draft's."""

    hidden: int = 3072
    heads: int = 48
    kv_heads: int = 48
    head_dim: int = 128
    intermediate: int = 9216
    vocab: int = 200_064
    rope_theta: float = 5e6
    max_positions: int = 65_536
    target_layers: int = 62

    def llama_fields(self) -> dict:
        """What both peers give to `transformers.LlamaConfig`."""
        return {
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": 1,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_positions,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "tie_word_embeddings": False,
        }


TINY = Shape(hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocab=512, max_positions=1024)


class StepTimer:
    """Marks the ends of optimizer steps, by CUDA events on a GPU. Peak memory is that after the warm-up."""

    def __init__(self, warmup: int) -> None:
        import torch

        self.cuda = torch.cuda if torch.cuda.is_available() else None
        self.warmup = warmup
        self.marks: list = []
        self.first_step_s = 0.0

    def mark(self) -> None:
        """Call once before the first step and after each."""
        if self.cuda:
            event = self.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())
        count = len(self.marks)
        if count == 1:
            self.first_step_s = -time.perf_counter()
        elif count == 2:
            self.first_step_s += time.perf_counter()
        if self.cuda and count == 1 + self.warmup:
            self.cuda.synchronize()
            self.cuda.reset_peak_memory_stats()

    def step_ms(self) -> list[float]:
        """Milliseconds of each step after the warm-up."""
        if self.cuda:
            self.cuda.synchronize()
            gaps = [a.elapsed_time(b) for a, b in itertools.pairwise(self.marks)]
        else:
            gaps = [1e3 * (b - a) for a, b in itertools.pairwise(self.marks)]
        return [round(gap, 2) for gap in gaps[self.warmup :]]

    def peak_gb(self) -> float | None:
        """The most that tensors held after the warm-up, in 10^9 bytes."""
        return round(self.cuda.max_memory_allocated() / 1e9, 1) if self.cuda else None


def measure(cell: Cell) -> dict:
    """Runs one cell in this process and returns its figures."""
    if cell.tiny:
        os.environ.update(TORCHDYNAMO_DISABLE="1", TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    import torch

    if cell.peer == "speculators":
        from peer_speculators import train
    else:
        from peer_specforge import train
    torch.manual_seed(cell.seed)
    documents = cell.documents()
    timer = StepTimer(cell.warmup)
    facts = train(cell, TINY if cell.tiny else Shape(), documents, timer.mark)
    step_ms = timer.step_ms()
    assert len(step_ms) == cell.steps, f"{len(step_ms)} steps were timed, not {cell.steps}"
    useful = sum(document.length for document in documents)
    return {
        "tokens_per_s": round(useful / statistics.median(step_ms) * 1e3),
        "step_ms": round(statistics.median(step_ms), 1),
        "peak_gb": timer.peak_gb(),
        "useful_tokens": useful,
        "documents": [document.length for document in documents],
        "supervised_tokens": sum(document.supervised for document in documents),
        "all_step_ms": step_ms,
        "first_step_s": round(timer.first_step_s, 1),
        **facts,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def versions(peer: str) -> dict[str, str]:
    found = {}
    for name in (peer, "torch", "triton", "transformers"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def run_apart(cell: Cell, timeout_s: float) -> dict:
    """Measures a cell in a process of its own; an exception or the time limit comes back as `error`."""
    command = [sys.executable, __file__, "--cell", json.dumps(asdict(cell))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0)
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        # The compiler's workers hold the pipes open: the whole group has to go.
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        return {"error": f"not done after {timeout_s:.0f} s", "stderr": err[-600:]}
    lines = [line for line in out.splitlines() if line.startswith('{"tokens_per_s"')]
    if process.returncode or not lines:
        return {"error": f"exit code {process.returncode}", "stderr": err[-1500:]}
    # Beyond that limit the compiler silently runs a function uncompiled, which is worth knowing about a figure.
    return {**json.loads(lines[-1]), "recompile_limit_hit": "recompile_limit" in err}


def cells(arguments: argparse.Namespace) -> list[Cell]:
    """Every combination of the lists that were asked for; the seed and the batch size matter to conversations only."""
    made: dict[Cell, None] = {}
    for peer, kind, tokens, steps, batch in itertools.product(
        arguments.peer, arguments.workload, arguments.tokens, arguments.ttt_steps, arguments.documents_per_batch
    ):
        for seed in arguments.seed:
            chosen = (0, 1) if kind == "dense" else (seed, 1 if peer == "speculators" else batch)
            cell = Cell(
                peer=peer,
                workload=kind,
                tokens=tokens,
                seed=chosen[0],
                ttt_steps=steps,
                draft_vocab=256 if arguments.tiny else arguments.draft_vocab,
                head="frozen" if arguments.frozen_head else "trained",
                documents_per_batch=chosen[1],
                warmup=arguments.warmup,
                steps=arguments.steps,
                tiny=arguments.tiny,
            )
            made[cell] = None
    return list(made)


def parse() -> argparse.Namespace:
    def words(text: str) -> list[str]:
        return text.split(",")

    def numbers(text: str) -> list[int]:
        return [int(word) for word in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", type=words, default=list(PEERS))
    parser.add_argument("--workload", type=words, default=["dense"], help="dense, conversations")
    parser.add_argument("--tokens", type=numbers, default=[8192], help="per optimizer step")
    parser.add_argument("--seed", type=numbers, default=[0], help="of the conversations")
    parser.add_argument("--ttt-steps", type=numbers, default=[7])
    parser.add_argument("--draft-vocab", type=int, default=32_000)
    parser.add_argument("--frozen-head", action="store_true", help="speculators' own way; default: lm_head trained")
    parser.add_argument("--documents-per-batch", type=numbers, default=[1], help="specforge pads these to the longest")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--timeout", type=float, default=240, help="seconds for one measurement")
    parser.add_argument("--budget", type=float, default=570, help="seconds for all: what does not fit is not started")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape on the CPU, uncompiled: does it still run?")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    unknown = (set(arguments.peer) - set(PEERS)) | (set(arguments.workload) - {"dense", "conversations"})
    if unknown:
        parser.error(f"not known: {', '.join(sorted(unknown))}")
    return arguments


def main() -> int:
    arguments = parse()
    if arguments.cell:
        print(json.dumps(measure(Cell(**json.loads(arguments.cell)))), flush=True)
        return 0
    end = time.monotonic() + arguments.budget
    failed = 0
    for cell in cells(arguments):
        left = end - time.monotonic()
        start = time.monotonic()
        result = run_apart(cell, min(left, arguments.timeout)) if left > 20 else {"error": "no time was left for it"}
        failed += "error" in result
        line = {**asdict(cell), **result, "wall_s": round(time.monotonic() - start), "versions": versions(cell.peer)}
        print(json.dumps(line), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
