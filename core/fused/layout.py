"""Where every row of a packed batch goes, worked out on the host while the step before it runs.

R, the rows of a batch, are those supervised at step 1. All J steps compute the same R rows: the last rows of a reply
have no label at deeper steps, their loss and so their gradient is zero there. That costs J - 1 rows a reply and spares
every gather, so a step is a handful of dense products.

Shape suffixes: T packed tokens, R rows, M label rows, P (step, row) pairs with a label, ordered by label row.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftsmith.core.batch import Batch, moved
from draftsmith.core.fused import tiles
from draftsmith.core.fused.tiles import Tiles
from draftsmith.core.fused.whole import Whole, choose
from draftsmith.core.unroll import reply_runs

_ENDLESS = 1 << 30  # leaves room for sums in int32


@dataclass(frozen=True)
class Chunk:
    """A slice of the loss: label rows m0..m1 and the pairs p0..p1 that use them."""

    m0: int
    m1: int
    p0: int
    p1: int


@dataclass(frozen=True)
class Layout:
    """Index tensors of one batch; int32 unless said otherwise.

    Attributes:
        steps: J.
        positions: rotary positions that occur, 0 .. positions - 1.
        window: positions that attention looks back over; more than there are where it looks back over all.
        rows_R: packed row of every computed row, ascending.
        documents_R: first packed row of its document; in whole documents the row after it, so that our kernels see none
            of their keys.
        row_of_T: the computed row at every packed row, -1 where there is none.
        positions_T: rotary position of every packed row at step 1.
        forward_tiles, grad_q_tiles: [tiles, 4] key ranges of every tile of rows: first, first that all rows see, the
            end of those, end.
        grad_kv_tiles: [tiles, 4] the same for rows, of every tile of keys.
        pairs_P: int64, (j - 1) * R + row.
        labels_P: label row, an index into the batch's last_MH.
        truth_P: int64, the packed row that holds the pair's true token.
        chunks: the pairs, cut by label rows.
        whole: documents whose step-1 keys cuDNN takes.
    """

    steps: int
    positions: int
    window: int
    rows_R: Tensor
    documents_R: Tensor
    row_of_T: Tensor
    positions_T: Tensor
    forward_tiles: Tensor
    grad_q_tiles: Tensor
    grad_kv_tiles: Tensor
    pairs_P: Tensor
    labels_P: Tensor
    truth_P: Tensor
    chunks: tuple[Chunk, ...]
    whole: tuple[Whole, ...]

    def to(self, device: torch.device) -> "Layout":
        """The same layout on a device."""
        return moved(self, device)

    @property
    def all_whole(self) -> bool:
        """Whether every computed row is of a whole document."""
        return sum(w.r1 - w.r0 for w in self.whole) == self.num_rows

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.rows_R)


def lay_out(batch: Batch, steps: int, label_rows: int, window: int | None = None, whole: bool = False) -> Layout:
    """Lay out a batch that is still in host memory.

    Args:
        batch: packed documents on the CPU.
        steps: J.
        label_rows: label rows of one chunk of the loss.
        window: positions that attention looks back over, its own included; None: all.
        whole: whether cuDNN may take long documents.
    """
    by_cudnn = whole and window is None
    window = window or _ENDLESS
    runs_T = reply_runs(batch).numpy()
    rows = np.flatnonzero(runs_T >= 2).astype(np.int32)
    starts = np.arange(batch.num_tokens, dtype=np.int32) - batch.positions_T.numpy().astype(np.int32)
    documents, chosen = starts[rows], choose(batch.offsets, rows) if by_cudnn else ()
    for w in chosen:
        documents[w.r0 : w.r1] = rows[w.r0 : w.r1] + 1
    row_of = np.full(batch.num_tokens, -1, dtype=np.int32)
    row_of[rows] = np.arange(len(rows), dtype=np.int32)
    pairs, labels, truth = _pairs(batch, runs_T, rows, steps)
    # The first key that a row sees at step 1, and at step J, whose query is J - 1 positions further on.
    first = np.maximum(documents, rows - (window - 1))
    last = np.maximum(documents, rows + (steps - window))
    positions = int(batch.positions_T.max()) + steps if batch.num_tokens else steps
    arrays = {
        "rows_R": rows,
        "documents_R": documents,
        "row_of_T": row_of,
        "positions_T": batch.positions_T.numpy().astype(np.int32),
        "forward_tiles": _key_ranges(rows, first, last, tiles.FORWARD),
        "grad_q_tiles": _key_ranges(rows, first, last, tiles.GRAD_Q),
        "grad_kv_tiles": _row_ranges(rows, first, last, batch.num_tokens, tiles.GRAD_KV),
        "pairs_P": pairs,
        "labels_P": labels,
        "truth_P": truth,
    }
    tensors = {k: torch.from_numpy(v) for k, v in arrays.items()}
    chunks = _chunks(labels, len(batch.last_rows_M), label_rows)
    return Layout(steps=steps, positions=positions, window=window, chunks=chunks, whole=chosen, **tensors)


def _pairs(batch: Batch, runs_T: np.ndarray, rows: np.ndarray, steps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every (step, row) with a label: flat number, label row, row of its true token; ordered by label row.

    Raises:
        UserError: the last state of a label is missing; it names the sample.
    """
    kept = batch.last_rows_M.numpy()
    missing = rows[~np.isin(rows + 1, kept)]  # labels of step 1; deeper steps' are among them
    if len(missing):
        raise batch.lacks_label(int(missing[0]) + 1)
    flat, label, truth = [], [], []
    for j in range(1, steps + 1):
        r = np.flatnonzero(runs_T[rows] >= j + 1)
        flat.append((j - 1) * len(rows) + r)
        label.append(np.searchsorted(kept, rows[r] + j))
        truth.append(rows[r].astype(np.int64) + j + 1)
    labels_P = np.concatenate(label).astype(np.int32)
    order = np.argsort(labels_P, kind="stable")
    return np.concatenate(flat)[order].astype(np.int64), labels_P[order], np.concatenate(truth)[order]


def _chunks(labels_P: np.ndarray, label_rows: int, size: int) -> tuple[Chunk, ...]:
    count = -(-label_rows // size)
    edges = [label_rows * i // max(1, count) for i in range(count + 1)]  # of one size: no small one at the end
    cuts = np.searchsorted(labels_P, edges).tolist()
    spans = zip(edges[:-1], edges[1:], cuts[:-1], cuts[1:], strict=True)
    return tuple(Chunk(*span) for span in spans if span[3] > span[2])


def _key_ranges(rows: np.ndarray, first: np.ndarray, last: np.ndarray, tile: Tiles) -> np.ndarray:
    """int32 [tiles, 4]; a row sees keys from first[r] on at step 1, from last[r] on at all steps, up to rows[r]."""
    out = []
    for start in range(0, len(rows), tile.rows):
        here = slice(start, start + tile.rows)
        begin, end = int(first[here].min()), int(rows[here][-1]) + 1
        seen = int(last[here].max())
        whole = max(0, int(rows[here][0]) + 1 - seen) // tile.keys
        seen = seen if whole else begin
        out.append((begin, seen, seen + whole * tile.keys, end))
    return np.array(out, dtype=np.int32).reshape(-1, 4)


def _row_ranges(rows: np.ndarray, first: np.ndarray, last: np.ndarray, tokens: int, tile: Tiles) -> np.ndarray:
    """int32 [tiles, 4]: rows that see a key of the tile, and among them the whole tiles of rows that see all of it."""
    key = np.arange(0, tokens, tile.keys)
    begin = np.searchsorted(rows, key)
    end = np.maximum(np.searchsorted(first, key + tile.keys), begin)
    seen = np.searchsorted(rows, key + tile.keys - 1)
    whole = np.maximum(0, np.searchsorted(last, key, side="right") - seen) // tile.rows
    seen = np.where(whole > 0, seen, begin)
    return np.stack([begin, seen, seen + whole * tile.rows, end], axis=1).astype(np.int32)
