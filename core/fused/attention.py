"""Attention of the unroll: step-1 keys up to the row itself, and the row's own keys of steps 2..j.

One flash pass per step over the step-1 keys, whose running softmax starts from the row's own keys. Backward, the
queries' gradient is a pass per step; the step-1 keys' is a single pass over all steps at the end, summed in float32;
the own keys' is point-wise (rotary.py). No atomics: two runs give the same bits. Of whole documents (whole.py) these
passes see the own keys only.

Shape suffixes: T packed tokens, R rows, N query heads, G key/value heads, D head width, J steps.
"""

from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from draftsmith.core.fused import attention_kernels as kernels
from draftsmith.core.fused import tiles
from draftsmith.core.fused.layout import Layout
from draftsmith.core.fused.tiles import Tiles
from draftsmith.core.fused.whole import ROUND, WholePasses

LOG2_E = 1.4426950408889634


class Attention:
    """The keys and values of one batch, and the passes over them.

    Attributes:
        k_TGD, v_TGD: rotated step-1 keys of all packed rows, and their values.
        own_k, own_v: rotated keys of steps 2..J at every row, [J - 1, R, G, D], and their values.
    """

    def __init__(self, layout: Layout, heads: tuple[int, int, int], like: Tensor) -> None:
        """Allocate keys and values; `rotary.py` fills them.

        Args:
            layout: of the batch.
            heads: N, G, D.
            like: a tensor of the wanted dtype and device.
        """
        self.layout, (self.n, self.g, self.d) = layout, heads
        tokens, later = len(layout.row_of_T), (layout.steps - 1, layout.num_rows)
        behind = ROUND if layout.whole else 0
        storage = [like.new_empty(tokens + behind, self.g, self.d) for _ in range(2)]
        for x in storage:
            x[tokens:] = 0.0
        self.k_TGD, self.v_TGD = (x[:tokens] for x in storage)
        self.whole = WholePasses(layout.whole, layout.rows_R, layout.row_of_T, *storage)
        self.own_k, self.own_v = (like.new_empty(*later, self.g, self.d) for _ in range(2))
        # Three products of tf32 parts are as good as one of float32, and compile in seconds; bfloat16 has one mode.
        self._precision = "tf32x3" if like.dtype == torch.float32 else "tf32"

    def keys_of(self, step: int) -> tuple[Tensor, Tensor]:
        """Keys and values that a step adds."""
        return (self.k_TGD, self.v_TGD) if step == 1 else (self.own_k[step - 2], self.own_v[step - 2])

    def forward(self, step: int, q_RND: Tensor, out_RND: Tensor, lse_NR: Tensor) -> None:
        """Fill `out_RND` with a step's outputs and `lse_NR` (float32) with the log2-sum-exp2 of its scores."""
        lay = self.layout
        tile, streamed = self._streamed(tiles.FORWARD, tiles.FORWARD.keys, self.k_TGD, self.v_TGD)
        kernels._forward[(len(lay.forward_tiles), self.n)](
            q_RND, *streamed, self.own_k, self.own_v, out_RND, lse_NR, lay.rows_R, lay.documents_R, lay.forward_tiles,
            lay.num_rows, len(self.k_TGD), step - 1, lay.window, self._scale(), **tile,
        )  # fmt: skip
        self.whole.forward(q_RND, out_RND, lse_NR)

    def grad_q(self, step: int, q: Tensor, out: Tensor, grad: Tensor, lse_NR: Tensor, delta_NR: Tensor) -> Tensor:
        """Gradient of a step's rotated queries [R, N, D]; fills `delta_NR` with each row's sum(out * grad).

        To be called once a step: whole documents' keys get their gradients here too.
        """
        lay, dq = self.layout, torch.empty_like(q)
        tile, streamed = self._streamed(tiles.GRAD_Q, tiles.GRAD_Q.keys, self.k_TGD, self.v_TGD)
        kernels._grad_q[(len(lay.grad_q_tiles), self.n)](
            q, *streamed, self.own_k, self.own_v, out, grad, lse_NR, delta_NR, dq, lay.rows_R, lay.documents_R,
            lay.grad_q_tiles, lay.num_rows, len(self.k_TGD), step - 1, lay.window, self._scale(), **tile,
        )  # fmt: skip
        self.whole.backward(q, out, grad, lse_NR, dq)
        return dq

    def grad_kv(self, q_JRND: Tensor, grad_JRND: Tensor, lse_JNR: Tensor, delta_JNR: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the rotated step-1 keys and of their values over all steps, [T, G, D] each."""
        lay = self.layout
        dk, dv = (torch.zeros_like(x) if lay.all_whole else torch.empty_like(x) for x in (self.k_TGD, self.v_TGD))
        if not lay.all_whole:
            self._grad_kv_by_tiles(q_JRND, grad_JRND, lse_JNR, delta_JNR, dk, dv)
        self.whole.store(dk, dv)
        return dk, dv

    def _grad_kv_by_tiles(
        self, q_JRND: Tensor, grad_JRND: Tensor, lse_JNR: Tensor, delta_JNR: Tensor, dk: Tensor, dv: Tensor
    ) -> None:
        lay = self.layout
        tile, (q, grad) = self._streamed(
            tiles.GRAD_KV, tiles.GRAD_KV.rows, q_JRND.flatten(0, 1), grad_JRND.flatten(0, 1)
        )
        kernels._grad_kv[(len(lay.grad_kv_tiles), self.g)](
            q, self.k_TGD, self.v_TGD, grad, lse_JNR, delta_JNR, dk, dv, lay.rows_R, lay.documents_R,
            lay.grad_kv_tiles, lay.num_rows, len(dk), lay.steps, lay.window, self._scale(), **tile,
        )  # fmt: skip

    def _scale(self) -> float:
        return float(self.d**-0.5) * LOG2_E

    def _streamed(self, tile: Tiles, rows: int, *tensors: Tensor) -> tuple[dict[str, Any], list[Any]]:
        """A kernel's constants, and what its inner loop reads: tiles of `rows` rows of one head."""
        device = tensors[0].device
        stages = tile.stages if tensors[0].dtype.itemsize < 4 else 1  # tiles of float32 are twice as large
        tma = tile.tma and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
        constants = {
            "N": self.n, "G": self.g, "D": self.d, "BM": tile.rows, "BN": tile.keys, "PRECISION": self._precision,
            "TMA": tma, "num_warps": tile.warps, "num_stages": stages,
        }  # fmt: skip
        if tma:
            return constants, [TensorDescriptor.from_tensor(x.flatten(1), [rows, self.d]) for x in tensors]
        return constants, list(tensors)
