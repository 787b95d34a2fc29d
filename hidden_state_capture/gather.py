"""Rows of the engine's cache -> the store's tensors on the host: gathered and judged on the device, a batch at a time.

Legend: B blocks, K tokens of a block, S states of a token (auxiliary ones, then the last), A = S - 1, H hidden size,
N tokens of a batch, M those of them with a label.

On CUDA the gather and the copies run on a side stream, into pinned memory that is reused; nothing here waits for the
device. Only rows with a label bring their last state along.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from draftsmith.core.fp8_states import encode
from draftsmith.hidden_state_capture.ring import HostRing

_ALIGN = 64


@dataclass(frozen=True)
class SampleRows:
    """What is known of a sample before its states are.

    Attributes:
        sample_id: whose states these are.
        input_ids_T: int32.
        loss_mask_T: uint8, 1 on reply tokens.
        last_rows_M: int64, rows whose next token is a reply token.
        save_to: write this sample alone to a file instead of into a shard (the probe).
        slot: its place in a spool (see `SpoolWriter`).
    """

    sample_id: str
    input_ids_T: np.ndarray
    loss_mask_T: np.ndarray
    last_rows_M: np.ndarray
    save_to: str | None = None
    slot: dict[str, Any] | None = None

    @classmethod
    def of(cls, sample_id: str, input_ids: list[int], loss_spans: Any, save_to: Any = None, slot: Any = None) -> Self:
        """From token ids and the [start, end) of every reply."""
        mask = np.zeros(len(input_ids), dtype=np.uint8)
        for start, end in loss_spans:
            mask[start:end] = 1
        ids = np.array(input_ids, dtype=np.int32)
        return cls(sample_id, ids, mask, np.flatnonzero(mask[1:]), save_to, slot)


@dataclass
class Batch:
    """Samples whose rows lie one after another in the tensors of `collect()`.

    Attributes:
        samples: in order.
        nbytes: host memory that the batch holds.
        collect: waits for the copies; the tensors of `store_rows`, on the host.
        release: to be called when they are not needed any more.
    """

    samples: list[SampleRows]
    nbytes: int
    collect: Callable[[], dict[str, Tensor]]
    release: Callable[[], object]


def store_rows(cache_BKSH: Tensor, slots_N: Tensor, last_slots_M: Tensor, storage: str) -> dict[str, Tensor]:
    """Gather a batch out of the cache, on the cache's device.

    Args:
        cache_BKSH: the cache, in any memory layout.
        slots_N: block * K + token within the block, of every row.
        last_slots_M: the same of the rows with a label.
        storage: `capture.storage`.

    Returns:
        The states as `coded` gives them, and what is needed to judge them: aux_peaks [N, A] and
        last_peaks [M], the largest magnitude of every state (NaN where one is NaN).
    """
    per_block, dtype = cache_BKSH.shape[1], cache_BKSH.dtype
    block_N, block_M = (torch.div(s, per_block, rounding_mode="floor") for s in (slots_N, last_slots_M))
    words = cache_BKSH.view(torch.int64)  # fewer, larger elements: the gather is four times as fast
    aux_NAH = words[:, :, :-1][block_N, slots_N % per_block].view(dtype).to(torch.bfloat16)
    last_MH = words[:, :, -1][block_M, last_slots_M % per_block].view(dtype).to(torch.bfloat16)
    return {
        **coded(aux_NAH, last_MH, storage),
        "aux_peaks": _peaks(aux_NAH),
        "last_peaks": _peaks(last_MH),
    }


def coded(aux_NAH: Tensor, last_MH: Tensor, storage: str) -> dict[str, Tensor]:
    """The states as they lie on disk; on a GPU half as many bytes then travel to the host."""
    if storage == "bf16":
        return {"aux_states": aux_NAH, "last_states": last_MH}
    (aux, aux_scales), (last, last_scales) = encode(aux_NAH), encode(last_MH)
    return {"aux_states": aux, "aux_scales": aux_scales, "last_states": last, "last_scales": last_scales}


def _peaks(states: Tensor) -> Tensor:
    # aminmax passes NaN on; abs() would make a copy of everything.
    low, high = states.aminmax(dim=-1)
    return torch.maximum(high, -low)


@dataclass(frozen=True)
class Held:
    """A finished request whose rows are still in the cache."""

    request_id: str
    block_ids: list[int]
    rows: SampleRows


class Gatherer:
    """Takes requests' rows out of one cache."""

    def __init__(self, cache_BKSH: Tensor, storage: str, ring_bytes: int, batch_bytes: int) -> None:
        """Bind to a cache.

        Args:
            cache_BKSH: the cache, in any memory layout.
            storage: `capture.storage`.
            ring_bytes: pinned memory; on CUDA only.
            batch_bytes: device memory that one gather may take.
        """
        self._cache, self._storage, self._batch_bytes = cache_BKSH, storage, batch_bytes
        _, self._per_block, states, hidden = cache_BKSH.shape
        self._token_bytes = states * hidden * 2
        self._ring = HostRing(ring_bytes, pinned=True) if cache_BKSH.is_cuda else None
        self._stream = torch.cuda.Stream(cache_BKSH.device) if cache_BKSH.is_cuda else None  # type: ignore[no-untyped-call]

    def take(self, requests: list[Held]) -> Iterator[tuple[list[Held], Batch, Any]]:
        """Start the copies.

        Yields:
            Some of the requests, their batch, and an event that has happened when their blocks are free (None: now).
        """
        if self._stream is not None and requests:
            # The side stream sees what the engine has written so far; the engine never waits for the side stream.
            self._stream.wait_stream(torch.cuda.current_stream(self._cache.device))
        for held in self._groups(requests):
            rows = [h.rows for h in held]
            # The probe is judged by the states themselves, whatever format they are stored in.
            storage = "bf16" if rows[0].save_to else self._storage
            slots = [self._slots(h) for h in held]
            last_slots = [s[h.rows.last_rows_M] for s, h in zip(slots, held, strict=True)]
            yield held, *self._copy(rows, np.concatenate(slots), np.concatenate(last_slots), storage)

    def _groups(self, requests: list[Held]) -> Iterator[list[Held]]:
        """Consecutive requests of one kind whose gather stays within `batch_bytes`; a larger one goes alone."""
        group: list[Held] = []
        tokens = 0
        for held in requests:
            more = len(held.rows.input_ids_T)
            full = (tokens + more) * self._token_bytes > self._batch_bytes
            if group and (full or bool(group[0].rows.save_to) != bool(held.rows.save_to)):
                yield group
                group, tokens = [], 0
            group.append(held)
            tokens += more
        if group:
            yield group

    def _slots(self, held: Held) -> np.ndarray:
        """int64 [T]: where each token's states lie."""
        tokens = len(held.rows.input_ids_T)
        blocks = np.array(held.block_ids, dtype=np.int64)[:, None]
        slots: np.ndarray = (blocks * self._per_block + np.arange(self._per_block)).ravel()[:tokens]
        if len(slots) != tokens:
            raise RuntimeError(f"sample {held.rows.sample_id}: {len(slots)} state rows for {tokens} tokens")
        return slots

    def _copy(
        self, rows: list[SampleRows], slots_N: np.ndarray, last_slots_M: np.ndarray, storage: str
    ) -> tuple[Batch, Any]:
        if self._ring is None or self._stream is None:
            found = store_rows(self._cache, torch.from_numpy(slots_N), torch.from_numpy(last_slots_M), storage)
            return Batch(rows, sum(t.nbytes for t in found.values()), lambda: found, _nothing), None
        index = torch.from_numpy(np.concatenate([slots_N, last_slots_M]))
        # What the states take uncoded is the most that anything takes; it is needed before the device has anything.
        most = index.nbytes + (len(slots_N) + len(last_slots_M)) * (self._token_bytes + 4 * self._cache.shape[2])
        region = self._ring.take(most + 8 * _ALIGN)
        with torch.cuda.stream(self._stream):
            # Indices go through pinned memory too: a copy from pageable memory would wait for the stream.
            pinned = _view(region.bytes_B, 0, index)
            pinned.copy_(index)
            on_device = pinned.to(self._cache.device, non_blocking=True)
            gathered = store_rows(self._cache, on_device[: len(slots_N)], on_device[len(slots_N) :], storage)
            found, at = {}, _padded(index.nbytes)
            for name, tensor in gathered.items():
                found[name] = _view(region.bytes_B, at, tensor)
                found[name].copy_(tensor, non_blocking=True)
                at += _padded(tensor.nbytes)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        ring = self._ring
        ring.trim(region, at)

        def collect() -> dict[str, Tensor]:
            event.synchronize()
            return found

        return Batch(rows, at, collect, lambda: ring.give(region)), event


def _view(bytes_B: Tensor, at: int, like: Tensor) -> Tensor:
    return bytes_B[at : at + like.nbytes].view(like.dtype).view(like.shape)


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _nothing() -> None:
    """Memory of its own is freed by itself."""
