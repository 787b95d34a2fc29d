"""Times the attention kernels alone over tile sizes, beside cuDNN, at T x 48 x 128, one dense document.

    for i in 0 1 2 3 4 5 6 7; do python benchmarks/training/attention_tiles.py --compile $i & done; wait
    python benchmarks/training/attention_tiles.py [--tokens 8192]

The first line only fills Triton's cache, eight processes at once.
"""

import argparse
import itertools

import torch
from triton.testing import do_bench

from draftsmith.core.batch import Batch
from draftsmith.core.fused import attention, tiles
from draftsmith.core.fused.layout import lay_out
from draftsmith.core.fused.tiles import Tiles

N, D = 48, 128


def batch_of(tokens: int) -> Batch:
    return Batch(
        ("d",), (0, tokens), torch.zeros(tokens, dtype=torch.int64), torch.ones(tokens, dtype=torch.bool),
        torch.arange(tokens), torch.empty(0), torch.empty(tokens, 0), torch.arange(tokens),
    )  # fmt: skip


def timed(name: str, run: object, flops: float, only_run: bool = False) -> None:
    try:
        if only_run:
            run()
            return
        ms = do_bench(run, warmup=5, rep=30, return_mode="median")
        print(f"{name:44s} {ms:8.3f} ms {flops / ms / 1e9:7.0f} TFLOP/s", flush=True)
    except Exception as error:
        print(f"{name:44s} {type(error).__name__}: {str(error)[:80]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--own", type=int, default=3)
    parser.add_argument("--compile", type=int)
    parser.add_argument("--only", default="forward,grad_q,grad_kv,cudnn")
    args = parser.parse_args()
    t, device = args.tokens, torch.device("cuda")
    q, k, v, do, out = (torch.randn(t, N, D, device=device, dtype=torch.bfloat16) for _ in range(5))
    own_k, own_v = (torch.randn(6, t - 2, N, D, device=device, dtype=torch.bfloat16) for _ in range(2))
    q, do, out = q[: t - 2].contiguous(), do[: t - 2].contiguous(), out[: t - 2].contiguous()
    lse, delta = (torch.zeros(N, t - 2, device=device) for _ in range(2))
    product = t * t / 2 * D * N * 2
    grid = list(itertools.product((64, 128), (64, 128), (4, 8), (2, 3, 4), (False, True)))

    def sweep(kind: str, flops: float, run: object) -> None:
        for number, (rows, keys, warps, stages, tma) in enumerate(grid):
            if args.compile is not None and number % 8 != args.compile:
                continue
            if (rows * keys > 8192 and warps == 4) or (kind != "FORWARD" and rows * keys > 8192 and stages > 2):
                continue  # spills
            setattr(tiles, kind, Tiles(rows, keys, warps, stages, tma))
            layout = lay_out(batch_of(t), 7, 2048).to(device)
            timed(
                f"{kind} rows {rows} keys {keys} warps {warps} stages {stages} tma {int(tma)}",
                lambda lay=layout: run(lay),
                flops,
                args.compile is not None,
            )

    if "forward" in args.only:
        sweep(
            "FORWARD", 2 * product,
            lambda lay: attention.forward(q, k, v, own_k, own_v, args.own, out, lse, lay, D**-0.5),
        )  # fmt: skip
    tiles.FORWARD = Tiles(128, 64)
    attention.forward(q, k, v, own_k, own_v, args.own, out, lse, lay_out(batch_of(t), 7, 2048).to(device), D**-0.5)
    if "grad_q" in args.only:
        sweep(
            "GRAD_Q", 3 * product,
            lambda lay: attention.grad_q(q, k, v, own_k, own_v, args.own, out, do, lse, delta, lay, D**-0.5),
        )  # fmt: skip
    if "grad_kv" in args.only:
        sweep(
            "GRAD_KV", 4 * product,
            lambda lay: attention.grad_kv(q[None], k, v, do[None], lse[None], delta[None], lay, D**-0.5),
        )  # fmt: skip
    if "cudnn" in args.only and args.compile is None:
        x = [torch.randn(1, N, t, D, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
            timed(
                "cuDNN forward",
                lambda: torch.nn.functional.scaled_dot_product_attention(*x, is_causal=True),
                2 * product,
            )
            y = torch.nn.functional.scaled_dot_product_attention(*x, is_causal=True)
            g = torch.randn_like(y)
            timed("cuDNN backward", lambda: torch.autograd.grad(y, x, g, retain_graph=True), 5 * product)


if __name__ == "__main__":
    main()
