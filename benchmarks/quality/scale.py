"""Trains one run on shares of its data, and fits acceptance length against training tokens.

    python3 benchmarks/quality/scale.py --config FILE [section.key=value ...] [--shares 0.125 0.25 0.5 1] \
        [--epochs 10 ...] [--equal-steps] [--seeds 0 1] --out scale.jsonl

A share takes whole conversations, and a smaller one is part of every larger one; held-out samples and draft vocabulary
are the whole run's. With --equal-steps a share of 1/n is also trained n times as many epochs. One training at a time,
so that seconds are those of the GPU; `tables.py scale` makes the table and the fit. What has a line in --out is not
trained again.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ablate import Plan, Variant, train_all


def points(shares: list[float], epochs: list[int], equal_steps: bool, seeds: list[int]) -> list[Variant]:
    """Every training: the largest share last."""
    pairs = {(share, n) for share in shares for n in epochs}
    if equal_steps:
        pairs |= {(share, round(max(epochs) / share)) for share in shares}
    return [
        Variant(f"share-{share:g}-epochs-{n}", {"train.epochs": n}, seed, share)
        for seed in (seeds or [None])
        for share, n in sorted(pairs)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--shares", nargs="+", type=float, default=[0.125, 0.25, 0.5, 1.0])
    parser.add_argument("--epochs", nargs="+", type=int, help="else the config's")
    parser.add_argument("--equal-steps", action="store_true")
    parser.add_argument("--seeds", nargs="+", type=int, default=[])
    parser.add_argument("--side-by-side", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=900.0)
    parser.add_argument("--out", type=Path, default=Path("scale.jsonl"))
    given = parser.parse_args()
    plan = Plan(given.config, tuple(given.overrides))
    wanted = points(given.shares, given.epochs or [plan.base.train.epochs], given.equal_steps, given.seeds)
    left = train_all(plan, wanted, given.side_by_side, given.seconds, given.out)
    print("\n".join(left), file=sys.stderr)
    raise SystemExit(1 if left else 0)


if __name__ == "__main__":
    main()
