"""Throughput of replay (K = 1..7 in one pass, intervals included) at the MiniMax-M2.5 draft's shape, on random states.

    python benchmarks/eval/replay.py conversations --tokens 16384 --batches 24
    python benchmarks/eval/replay.py dense --tokens 8192 --batches 24
    python benchmarks/eval/replay.py conversations --temperature 1.0
    python benchmarks/eval/replay.py conversations --tiny --tokens 1024 --batches 4       # any machine

Batches lie in host memory, as the store's memory-mapped shards do once they are read; the time is from the first of
them to the last row of the report, copies to the GPU and the walks on the host included. Prints one JSON line.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "training"))
from workload import conversations, dense

from draftsmith.core.batch import Batch
from draftsmith.core.draft import DraftModel
from draftsmith.core.draft_shape import DraftShape
from draftsmith.core.manifest import package_versions
from draftsmith.core.objective import Objective
from draftsmith.core.replay import bootstrap_lengths, expected_walk, tally, walks
from draftsmith.core.target_weights import TargetHead
from draftsmith.eval.offline import Judge

KS = list(range(1, 8))


def shape(tiny: bool) -> DraftShape:
    sizes = (
        dict(hidden_size=256, num_heads=4, num_kv_heads=4, head_dim=64, intermediate_size=512, vocab_size=4096,
             draft_vocab_size=1024)
        if tiny
        else dict(hidden_size=3072, num_heads=48, num_kv_heads=48, head_dim=128, intermediate_size=9216,
                  vocab_size=200064, draft_vocab_size=32000)
    )  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 5e6}
    return DraftShape(**sizes, num_aux=3, rms_norm_eps=1e-6, max_position_embeddings=204800, rope=rope)


def build(s: DraftShape, device: str, with_full: bool) -> Objective:
    torch.manual_seed(0)
    with torch.device(device):
        draft = DraftModel(s, torch.randn(s.vocab_size, s.hidden_size, dtype=torch.bfloat16) * 0.02)
        for p in draft.parameters():
            if p.dim() > 1:
                torch.nn.init.normal_(p, std=0.02)
        ids = torch.randperm(s.vocab_size)[: s.draft_vocab_size].sort().values
        full = torch.randn(s.vocab_size, s.hidden_size, dtype=torch.bfloat16) * 0.02
        head = TargetHead(full[ids], torch.ones(s.hidden_size), "rms", 1e-6, full if with_full else None)
    return Objective(draft, head, ids)


def make_batch(s: DraftShape, workload: str, tokens: int, seed: int) -> Batch:
    docs = dense(tokens) if workload == "dense" else conversations(tokens, seed)
    offsets = [0, *np.cumsum([d.length for d in docs]).tolist()]
    mask = torch.cat([torch.arange(d.length) >= d.reply_start for d in docs])
    labels = [
        b + t for d, b in zip(docs, offsets, strict=False) for t in range(max(d.reply_start - 1, 0), d.length - 1)
    ]
    g = torch.Generator().manual_seed(seed)
    total = offsets[-1]
    pin = torch.cuda.is_available()  # as the store's reader does
    aux_TAH = torch.empty(total, 3, s.hidden_size, dtype=torch.bfloat16, pin_memory=pin)
    last_MH = torch.empty(len(labels), s.hidden_size, dtype=torch.bfloat16, pin_memory=pin)
    for states in (aux_TAH, last_MH):
        states.normal_(generator=g)
    return Batch(
        sample_ids=tuple(f"{seed}-{i}/0" for i in range(len(docs))),
        offsets=tuple(offsets),
        input_ids_T=torch.randint(s.vocab_size, (total,), generator=g),
        loss_mask_T=mask,
        positions_T=torch.cat([torch.arange(d.length) for d in docs]),
        aux_TAH=aux_TAH,
        last_MH=last_MH,
        last_rows_M=torch.tensor(labels),
    )


def run(judge: Judge, batches: Iterator[Batch], temperatures: list[float]) -> tuple[int, float]:
    """Tokens and acceptance length at the largest K."""
    ids: list[str] = []
    tables: dict[tuple[int, float], list[np.ndarray]] = {}
    tokens = 0
    for batch, chains in judge.all(batches):
        tokens += batch.num_tokens
        ids += batch.sample_ids
        for k, rounds in zip(KS, walks(batch, chains.leading_T, KS), strict=True):
            tables.setdefault((k, 0.0), []).append(tally(rounds, k))
        for t, accept_TJ in zip(temperatures, chains.accept_NTJ, strict=True):
            for k in KS:
                tables.setdefault((k, t), []).append(expected_walk(batch, accept_TJ, k))
    whole = [np.concatenate(parts) for parts in tables.values()]
    lengths = bootstrap_lengths(ids, whole, 1000, 0)
    return tokens, float(lengths[:, KS[-1] - 1].mean())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=["dense", "conversations"])
    parser.add_argument("--tokens", type=int, default=16384, help="of a batch")
    parser.add_argument("--batches", type=int, default=24)
    parser.add_argument("--distinct", type=int, default=4, help="batches that are made; the others repeat them")
    parser.add_argument("--temperature", type=float, nargs="*", default=[])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--logits-bytes", type=int, default=4 * 1024**3)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out")
    args = parser.parse_args()
    s = shape(args.tiny)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    judge = Judge(build(s, device, bool(args.temperature)), KS[-1], args.logits_bytes, args.temperature)
    made = [make_batch(s, args.workload, args.tokens, i) for i in range(args.distinct)]
    run(judge, iter(made[:2]), args.temperature)  # kernels are compiled on their first call
    rates = []
    for _ in range(args.repeat):
        begin = time.perf_counter()
        tokens, length = run(judge, (made[i % len(made)] for i in range(args.batches)), args.temperature)
        rates.append(tokens / (time.perf_counter() - begin))
    result = {
        "workload": args.workload, "tokens_per_batch": args.tokens, "tokens": tokens, "tiny": args.tiny,
        "fused": judge.fused, "ks": KS, "temperatures": args.temperature,
        "tokens_per_second": round(sorted(rates)[len(rates) // 2]),
        "spread": [round(min(rates)), round(max(rates))], "acceptance_length": round(length, 3),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1) if device == "cuda" else None,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu", "versions": package_versions(),
    }  # fmt: skip
    line = json.dumps(result)
    print(line)
    if args.out:
        with open(args.out, "a", encoding="utf-8") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
