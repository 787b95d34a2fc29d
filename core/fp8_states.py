"""States in eight bits: float8 e4m3 with one float32 scale for every token and layer (`capture.storage: fp8`).

A row of H numbers is divided by scale = amax / 448, so that its largest is e4m3's largest. What comes back is within
2^-4 of every number that is larger than 2^-6 scales, and within 2^-10 scales of the smaller ones. One scale a row and
not one a tensor: a token's first-layer and last-layer states differ by a factor of 30, tokens among each other by more.
"""

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
# What is held in float32 at once, in rows: a sample may have 200,000 tokens.
_ROWS = 4096


def encode(states_XH: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise rows.

    Args:
        states_XH: finite, of any float dtype and any leading dimensions.

    Returns:
        float8_e4m3fn of the same shape, and the float32 scales without the last dimension; a row of zeros has scale 1.
    """
    rows = states_XH.reshape(-1, states_XH.shape[-1])
    codes = torch.empty(rows.shape, dtype=FP8, device=rows.device)
    scales = torch.empty(len(rows), dtype=torch.float32, device=rows.device)
    for begin in range(0, len(rows), _ROWS):
        part = rows[begin : begin + _ROWS].float()
        largest = torch.linalg.vector_norm(part, float("inf"), dim=-1)
        # Below the smallest normal number a quotient by the scale could overflow.
        scale = (largest / torch.finfo(FP8).max).clamp_min(torch.finfo(torch.float32).tiny)
        scale = torch.where(largest == 0, 1.0, scale)  # an assignment by mask would wait for the GPU
        codes[begin : begin + _ROWS] = part / scale[:, None]
        scales[begin : begin + _ROWS] = scale
    return codes.view(states_XH.shape), scales.view(states_XH.shape[:-1])


def decode(codes_XH: Tensor, scales_X: Tensor) -> Tensor:
    """bfloat16 states, on the device of the codes; the product is rounded once."""
    states = codes_XH.to(torch.bfloat16)  # exact: e4m3 has fewer digits
    return states.mul_(scales_X[..., None])
