"""Matrix products in the dtype of the operands, weight gradients in float32; `fp8.py` has the same in float8.

Shape suffixes: M rows, N outputs and K inputs of a layer y_MN = x_MK @ w_NK.T.
"""

from typing import Any

import torch
from torch import Tensor


class Products:
    """The three products of a layer. What `weight` and `gradient` return is only for this class's other methods.

    A peak is a float32 scalar that no absolute value of a matrix exceeds. Products that scale their operands are given
    it where it is known, and measure it themselves where it is None; these need none, so here all peaks are None.
    """

    def weight(self, w_NK: Tensor) -> Any:
        """A weight as `forward` and `into_input` want it."""
        return w_NK

    def measured(self, x: Tensor) -> Tensor | None:
        """The peak of a matrix that several products will use."""
        return None

    def raised(self, like: Tensor) -> Tensor | None:
        """A peak of zero, for the kernel that makes a matrix to raise."""
        return None

    def normed(self, weight_H: Tensor) -> Tensor | None:
        """The peak of what an RMSNorm of this weight makes."""
        return None

    def forward(self, x_MK: Tensor, w: Any, out: Tensor | None = None, peak: Tensor | None = None) -> Tensor:
        """X @ w.T, summed in float32."""
        return torch.mm(x_MK, w.T) if out is None else torch.mm(x_MK, w.T, out=out)

    def gradient(
        self, dy_MN: Tensor, into_input: bool = True, into_weight: bool = True, peak: Tensor | None = None
    ) -> Any:
        """An output's gradient as the next two want it; each only if it was asked for."""
        return dy_MN

    def into_input(self, dy: Any, w: Any, out: Tensor | None = None) -> Tensor:
        """The gradient dy @ w of x."""
        return torch.mm(dy, w) if out is None else torch.mm(dy, w, out=out)

    def into_weight(self, total_NK: Tensor | None, dy: Any, x_MK: Tensor, peak: Tensor | None = None) -> Tensor:
        """`total` + dy.T @ x in float32, in place: a sum over steps must not be rounded to bfloat16 at each."""
        return float_product(dy.T, x_MK) if total_NK is None else add_product(total_NK, dy.T, x_MK)

    def overwriting(self, values_MN: Tensor, peak: Tensor) -> tuple[Any, Tensor, Tensor | None]:
        """For a kernel that overwrites values, row by row, with a gradient of this peak.

        Returns:
            The gradient, once it is written, for `overwritten`; where element [m, n] is to be written, which shares
            the row's memory but may be narrower; and what it is to be divided by.
        """
        return values_MN, values_MN, None

    def overwritten(self, gradient: Any, into_weight: bool) -> Any:
        """That gradient as `gradient` returns one."""
        return gradient


def float_product(a: Tensor, b: Tensor) -> Tensor:
    """A @ b in float32."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a, b).float()


def add_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Total += a @ b, `total` float32."""
    if a.dtype == torch.float32:
        return total.addmm_(a, b)
    if a.is_cuda:
        return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    return total.add_(torch.mm(a, b).float())  # a CPU has no product of bfloat16 into float32
