"""The table of training speed: measures its cells one after another, and draws results beside the floor and the peers.

    python benchmarks/training/table.py measure --out results/mine.jsonl     # on the GPU (make bench-train)
    python benchmarks/training/table.py draw results/*.jsonl --png training.png

`results/` holds the JSON lines of the figures in README.md and NOTES.md.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
CELLS = [
    ["dense", "2048", "4096", "8192", "16384"],
    ["dense", "8192", "--ttt", "4"],
    ["dense", "4096", "--vocab", "200064"],
    ["conversations", "8192", "65536"],
    ["dense", "8192", "4096", "--fp8"],
    ["conversations", "8192", "--ttt", "1", "2", "3", "4", "5", "6", "8"],
    ["conversations", "4096", "16384", "32768", "49152"],
    ["equal", "4096", "8192", "16384", "32768", "65536"],
]
# Peers on an H200, dense, trained head where they can (tokens/s); recorded before this project's own measurements.
PEERS = {
    "speculators 0.9": {2048: 22700, 4096: 27300, 8192: 27700},
    "SpecForge 0.2": {2048: 20400, 4096: 22000, 8192: 21700, 16384: 18500},
    "TorchSpec": {2048: 17700, 4096: 19100, 8192: 21600, 16384: 17500},
}
PRODUCT_RATE, ATTENTION_MS_8192 = 767e12, 5.8  # measured: a large product; cuDNN, causal, forward and backward


def floor(tokens: int, steps: int = 7) -> float:
    """Tokens/s if nothing took time but the products as the draft defines them and cuDNN's attention."""
    per_step, once = 6 * 315e6, 6 * 28e6 + 2 * 98e6
    seconds = tokens * (steps * per_step + once) / PRODUCT_RATE
    return tokens / (seconds + steps * ATTENTION_MS_8192 / 1000 * (tokens / 8192) ** 2)


def measure(out: str) -> None:
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    for cell in CELLS:
        subprocess.run([sys.executable, str(HERE / "step.py"), *cell, "--out", out], check=False)


def draw(files: list[str], png: str) -> None:
    lines = [json.loads(line) for file in files for line in Path(file).read_text(encoding="utf-8").splitlines()]
    dense = [
        x
        for x in lines
        if x.get("workload") == "dense" and x.get("ttt") == 7 and x.get("draft_vocab") == 32000 and "ms" in x
    ]
    figure, axes = plt.subplots(figsize=(7, 4.5))
    lengths = [2048, 4096, 8192, 16384]
    axes.plot(lengths, [floor(t) for t in lengths], "k--", label="floor: products and attention alone")
    best = {t: max((x["tokens_per_second"] for x in dense if x["tokens"] == t), default=None) for t in lengths}
    axes.plot(*zip(*((t, v) for t, v in best.items() if v), strict=True), "o-", label="draftsmith", linewidth=2)
    for name, figures in PEERS.items():
        axes.plot(list(figures), list(figures.values()), "s:", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(t) for t in lengths])
    axes.set(xlabel="tokens of one dense document", ylabel="tokens/s", ylim=(0, None))
    axes.set_title("EAGLE3 training step, MiniMax-M2.5 draft, J = 7, bf16, one H200", fontsize=10)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(png, dpi=130, bbox_inches="tight")


def lines(files: list[str], png: str) -> None:
    """Milliseconds of a step against J, packed tokens and documents, each beside the line through its ends."""
    found = [json.loads(line) for file in files for line in Path(file).read_text(encoding="utf-8").splitlines()]
    found = [x for x in found if "ms" in x and x["draft_vocab"] == 32000 and x.get("matmul", "bf16") == "bf16"]
    talk = [x for x in found if x["workload"] == "conversations"]
    panels = {
        "training-time-test steps J": ("ttt", [x for x in talk if 8000 < x["tokens"] < 8192]),
        "packed tokens (conversations)": ("tokens", [x for x in talk if x["ttt"] == 7]),
        "documents of 1,024 tokens": ("documents", [x for x in found if x["workload"] == "equal"]),
    }
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4))
    for axis, (label, (key, points)) in zip(axes, panels.items(), strict=True):
        x, y = zip(*sorted((p[key], p["ms"]) for p in points), strict=True)
        axis.plot([x[0], x[-1]], [y[0], y[-1]], "k--", linewidth=1)
        axis.plot(x, y, "o")
        axis.set(xlabel=label, ylim=(0, None), xlim=(0, None))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("ms a step")
    figure.suptitle("EAGLE3 training step, MiniMax-M2.5 draft, bf16, one H200; dashed: straight", fontsize=10)
    figure.savefig(png, dpi=130, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("measure")
    one.add_argument("--out", required=True)
    two = commands.add_parser("draw")
    two.add_argument("files", nargs="+")
    two.add_argument("--png", required=True)
    three = commands.add_parser("lines")
    three.add_argument("files", nargs="+")
    three.add_argument("--png", required=True)
    args = parser.parse_args()
    if args.command == "measure":
        measure(args.out)
    elif args.command == "draw":
        draw(args.files, args.png)
    else:
        lines(args.files, args.png)


if __name__ == "__main__":
    main()
