"""What every kernel launch needs to know."""

import torch
import triton


def block(size: int) -> int:
    """Smallest power of two that holds `size`."""
    return int(triton.next_power_of_2(size))


def strips(rows: int, device: torch.device) -> int:
    """Programs of a kernel that sums over rows: each takes every n-th row and keeps one partial sum."""
    if device.type != "cuda":
        return max(1, min(rows, 4))
    return max(1, min(rows, 4 * torch.cuda.get_device_properties(device).multi_processor_count))
