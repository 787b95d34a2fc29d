"""Tile sizes of the attention kernels: how many rows and keys a program works on at once."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tiles:
    """Rows and keys of one tile, and how the GPU runs it; tma: its copy engine fetches what the loop reads."""

    rows: int
    keys: int
    warps: int = 8
    stages: int = 3
    tma: bool = False


# Fastest on an H200 at head width 128, tried within whole steps (benchmarks/training/step.py --tiles).
FORWARD = Tiles(64, 64, warps=4, stages=3, tma=True)
GRAD_Q = Tiles(64, 64, warps=4, stages=2, tma=True)
GRAD_KV = Tiles(64, 64, warps=4, stages=2, tma=True)
