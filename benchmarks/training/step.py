"""One training step (forward, backward, AdamW) at the MiniMax-M2.5 draft's shape, on random states already on the GPU.

    python benchmarks/training/step.py dense 2048 4096 8192 16384 --out table.jsonl
    python benchmarks/training/step.py dense 8192 --ttt 4
    python benchmarks/training/step.py dense 4096 --vocab 200064

Prints one JSON line a measurement: the median of --repeat steps after --warmup, by CUDA events.
"""

import argparse
import itertools
import json
import statistics
import time
from functools import partial

import torch
from workload import conversations, dense, equal

from draftsmith.core.batch import Batch
from draftsmith.core.config_train import TrainConfig
from draftsmith.core.draft import DraftModel
from draftsmith.core.draft_shape import DraftShape
from draftsmith.core.fused import loss as loss_kernels
from draftsmith.core.fused import tiles
from draftsmith.core.fused.layout import lay_out
from draftsmith.core.fused.objective import fused_loss
from draftsmith.core.objective import Objective
from draftsmith.core.target_weights import TargetHead

HIDDEN, VOCAB = 3072, 200064


def shape(draft_vocab: int, **changed: int) -> DraftShape:
    fields = dict(
        hidden_size=HIDDEN, num_aux=3, num_heads=48, num_kv_heads=48, head_dim=128, intermediate_size=9216,
        vocab_size=VOCAB, draft_vocab_size=draft_vocab, rms_norm_eps=1e-6, max_position_embeddings=204800,
        rope={"rope_type": "default", "rope_theta": 5e6},
    )  # fmt: skip
    return DraftShape(**{**fields, **changed})


def build(draft_vocab: int, device: str, of: DraftShape | None = None) -> Objective:
    torch.manual_seed(0)
    with torch.device(device):
        s = of or shape(draft_vocab)
        embed = torch.randn(s.vocab_size, s.hidden_size, dtype=torch.bfloat16) * 0.02
        draft = DraftModel(s, embed)
        for p in draft.parameters():
            if p.dim() > 1:
                torch.nn.init.normal_(p, std=0.02)
        ids = torch.randperm(s.vocab_size)[:draft_vocab].sort().values
        head = TargetHead(
            torch.randn(draft_vocab, s.hidden_size, dtype=torch.bfloat16) * 0.02, torch.ones(s.hidden_size), "rms", 1e-6
        )
        return Objective(draft, head, ids)


def documents(workload: str, tokens: int, seed: int) -> list[tuple[int, int]]:
    """(length, first supervised token) of every document."""
    made = {"dense": dense, "equal": equal, "conversations": partial(conversations, seed=seed)}[workload](tokens)
    return [(d.length, d.reply_start) for d in made]


def make_batch(docs: list[tuple[int, int]], device: str = "cuda", of: DraftShape | None = None) -> Batch:
    hidden, vocab = (of.hidden_size, of.vocab_size) if of else (HIDDEN, VOCAB)
    offsets = [0]
    for length, _ in docs:
        offsets.append(offsets[-1] + length)
    total = offsets[-1]
    mask = torch.zeros(total, dtype=torch.bool)
    for (length, first), begin in zip(docs, offsets[:-1], strict=True):
        mask[begin + first : begin + length] = True
    labels = [b + t for (n, f), b in zip(docs, offsets[:-1], strict=True) for t in range(max(f - 1, 0), n - 1)]
    g = torch.Generator(device).manual_seed(1)
    return Batch(
        sample_ids=tuple(str(i) for i in range(len(docs))),
        offsets=tuple(offsets),
        input_ids_T=torch.randint(vocab, (total,)),
        loss_mask_T=mask,
        positions_T=torch.cat([torch.arange(n) for n, _ in docs]),
        aux_TAH=torch.randn(total, 3, hidden, device=device, dtype=torch.bfloat16, generator=g),
        last_MH=torch.randn(len(labels), hidden, device=device, dtype=torch.bfloat16, generator=g),
        last_rows_M=torch.tensor(labels),
    )


def measure(args: argparse.Namespace, tokens: int, ttt: int) -> dict[str, object]:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    objective = build(args.vocab, "cuda")
    optimizer = torch.optim.AdamW(objective.draft.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
    label_rows = max(1, args.logits_bytes // (2 * ttt * args.vocab))
    batch = make_batch(documents(args.workload, tokens, 0))
    layout = lay_out(batch, ttt, label_rows, whole=args.attention == "auto").to(torch.device("cuda"))
    batch = batch.to(torch.device("cuda"))
    weights = 0.8 ** torch.arange(ttt, device="cuda") / tokens

    def step() -> float:
        loss, _ = fused_loss(objective, batch, layout, weights, torch.bfloat16, args.fp8)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    began = time.monotonic()
    for _ in range(args.warmup):
        loss = step()
    torch.cuda.synchronize()
    warm = time.monotonic() - began
    times = []
    for _ in range(args.repeat):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        loss = step()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    ms = statistics.median(times)
    if args.profile:
        profile(step)
    return {
        "workload": args.workload, "tokens": batch.num_tokens, "documents": len(batch.sample_ids),
        "rows": layout.num_rows, "ttt": ttt,
        "draft_vocab": args.vocab, "matmul": "fp8" if args.fp8 else "bf16",
        "attention": args.attention, "whole_documents": len(layout.whole),
        "ms": round(ms, 2), "spread_ms": [round(min(times), 2), round(max(times), 2)],
        "tokens_per_second": round(batch.num_tokens / ms * 1000),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1),
        "loss": round(float(loss), 4), "warmup_s": round(warm, 1),
    }  # fmt: skip


def profile(step: object) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
        for _ in range(3):
            step()
        torch.cuda.synchronize()
    rows = [e for e in prof.key_averages() if e.self_device_time_total]
    rows.sort(key=lambda e: -e.self_device_time_total)
    total = sum(e.self_device_time_total for e in rows)
    print(f"device time {total / 3000:.2f} ms a step")
    for e in rows[:40]:
        print(f"{e.self_device_time_total / 3000:9.3f} ms {e.count // 3:5d}x  {e.key[:110]}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=["dense", "conversations", "equal"])
    parser.add_argument("tokens", type=int, nargs="+")
    parser.add_argument("--ttt", type=int, nargs="+", default=[7])
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--attention", choices=["triton", "auto"], default="triton", help="as train.attention")
    parser.add_argument("--logits-bytes", type=int, default=TrainConfig().logits_bytes)
    parser.add_argument(
        "--tiles", nargs="*", default=[], help="e.g. GRAD_KV=64,128,8,2,1: rows, keys, warps, stages, tma"
    )
    parser.add_argument("--logit-block", type=int, nargs=2, help="logits a program of the loss works on, and its warps")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=8)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out")
    args = parser.parse_args()
    for tile in args.tiles:
        name, sizes = tile.split("=")
        rows, keys, warps, stages, tma = map(int, sizes.split(","))
        setattr(tiles, name, tiles.Tiles(rows, keys, warps, stages, bool(tma)))
    if args.logit_block:
        loss_kernels.BLOCK, loss_kernels.WARPS = args.logit_block
    for tokens, ttt in itertools.product(args.tokens, args.ttt):
        try:
            line = json.dumps(measure(args, tokens, ttt))
        except Exception as error:
            line = json.dumps({"workload": args.workload, "tokens": tokens, "ttt": ttt, "error": str(error)[:300]})
        print(line, flush=True)
        if args.out:
            with open(args.out, "a", encoding="utf-8") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
