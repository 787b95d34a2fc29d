"""Matrix products in the dtype of the operands, weight gradients in float32."""

import torch
from torch import Tensor


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """A @ b in the operands' dtype, summed in float32."""
    return torch.mm(a, b) if out is None else torch.mm(a, b, out=out)


def float_product(a: Tensor, b: Tensor) -> Tensor:
    """A @ b in float32."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a, b).float()


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Total += a @ b, `total` float32: a sum over steps and chunks must not be rounded to bfloat16 at each."""
    if a.dtype == torch.float32:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:  # a CPU has no product of bfloat16 into float32
        total.add_(torch.mm(a, b).float())
