"""vLLM KV connector that takes finished requests' hidden states out of the cache layer and hands them to the writer.

vLLM's `extract_hidden_states` method keeps the states of every scheduled token in a cache layer of its own. When a
request finishes, the scheduler side notes its blocks and whose sample it is; the worker side copies those blocks to
the host (on CUDA: on a side stream, into pinned memory) and lets the blocks go once the copy is done.

Works with vLLM 0.24 to 0.33. Import nothing heavy here beyond vLLM: every engine process loads this module.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer

from draftsmith.hidden_state_capture.spool_writer import SpoolWriter
from draftsmith.hidden_state_capture.writer import SampleStates, ShardWriter


@dataclass
class Finished:
    """A finished request on its way from the scheduler to the worker."""

    request_id: str
    input_ids: list[int]
    block_ids: list[int]
    params: dict[str, Any]


@dataclass
class FinishedRequests(KVConnectorMetadata):
    """Metadata of one engine step."""

    requests: list[Finished] = field(default_factory=list)


class HiddenStatesConnector(KVConnectorBase_V1, SupportsHMA):
    """Producer only. `kv_transfer_params` of a request: sample_id, loss_spans, and save_to for a probe."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        bounds = int(extra["shard_bytes"]), int(extra["pending_bytes"])
        self._writer_args = (Path(extra["folder"]), *bounds, str(extra["storage"]))
        self._writer_kind = SpoolWriter if extra.get("spool") else ShardWriter
        self._num_states = int(extra["num_states"])
        self._group = _states_group(kv_cache_config)
        self._finished: dict[str, Finished] = {}
        # Worker side.
        self.writer: ShardWriter | None = None
        self._cache: torch.Tensor | None = None
        self._block_axis = 0
        self._stream: Any = None
        self._copies: dict[str, Any] = {}
        self._to_release: set[str] = set()

    # ---- scheduler side -------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Nothing is ever loaded."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing is ever loaded."""

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Note the request and keep its blocks until the worker has copied them."""
        params = request.kv_transfer_params
        if not params or "sample_id" not in params:
            return False, None
        ids = list(request.prompt_token_ids)
        self._finished[request.request_id] = Finished(request.request_id, ids, list(block_ids), dict(params))
        return True, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`, where the engine keeps several cache groups."""
        if self._group >= len(block_ids):
            return False, None
        return self.request_finished(request, block_ids[self._group])

    def build_connector_meta(self, scheduler_output: Any) -> FinishedRequests:
        """Hand over what has finished since the last step."""
        requests, self._finished = list(self._finished.values()), {}
        return FinishedRequests(requests)

    def get_finished_count(self) -> int:
        """Only TP rank 0 writes, so one worker reports each request."""
        return 1

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """The layout that vLLM's own connector asks for; its name differs between releases."""
        layout: str | None = ExampleHiddenStatesConnector.get_required_kvcache_layout(vllm_config)
        return layout

    # ---- worker side ----------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Find the cache layer and which of its axes counts tokens in a block."""
        layers = list(get_layers_from_vllm_config(self._vllm_config, CacheOnlyAttentionLayer, list(kv_caches)))
        if len(layers) != 1:
            raise RuntimeError(f"expected one hidden-states cache layer, found {layers}")
        self._cache = kv_caches[layers[0]]
        # [blocks, states, block, hidden] from 0.32 on, [blocks, block, states, hidden] before.
        fits = [axis for axis in (1, 2) if self._cache.shape[3 - axis] == self._num_states]
        if self._cache.dim() != 4 or not fits:
            raise RuntimeError(f"unknown layout of the hidden-states cache: {tuple(self._cache.shape)}")
        self._block_axis = fits[-1]
        if get_tensor_model_parallel_rank() == 0:
            self.writer = self._writer_kind(*self._writer_args)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is ever loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is ever loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """The engine itself has put the states into the cache layer."""

    def wait_for_save(self) -> None:
        """Copies are awaited per request, in `get_finished`."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Start the copies of newly finished requests; report those whose copy is done."""
        if self.writer is None:
            return None, None
        if self.has_connector_metadata():
            metadata = self._get_connector_metadata()
            assert isinstance(metadata, FinishedRequests)
            for request in metadata.requests:
                self._copy(request)
        self._to_release |= finished_req_ids & self._copies.keys()
        done = {r for r in self._to_release if self._copies[r] is None or self._copies[r].query()}
        self._to_release -= done
        for request_id in done:
            del self._copies[request_id]
        return done or None, None

    def _copy(self, request: Finished) -> None:
        assert self._cache is not None and self.writer is not None
        if self._cache.is_cuda:
            states, event = self._copy_on_side_stream(request)
        else:
            states, event = self._gather(request), None
        self._copies[request.request_id] = event
        self.writer.put(
            SampleStates(
                sample_id=request.params["sample_id"],
                input_ids=request.input_ids,
                loss_spans=request.params["loss_spans"],
                states_TLH=states,
                ready=event.synchronize if event else _already,
                save_to=request.params.get("save_to"),
                slot=request.params.get("slot"),
            )
        )

    def _copy_on_side_stream(self, request: Finished) -> tuple[torch.Tensor, Any]:
        """Gather and copy without holding up the engine; torch's host allocator reuses the pinned buffers."""
        assert self._cache is not None
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._cache.device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(self._cache.device))
        with torch.cuda.stream(self._stream):
            on_device = self._gather(request)
            states = torch.empty(on_device.shape, dtype=on_device.dtype, pin_memory=True)
            states.copy_(on_device, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return states, event

    def _gather(self, request: Finished) -> torch.Tensor:
        """[T, A + 1, H] of one request, in token order, on the cache's device."""
        assert self._cache is not None
        blocks = torch.tensor(request.block_ids, device=self._cache.device)
        taken = self._cache[blocks]
        if self._block_axis == 2:
            taken = taken.transpose(1, 2)
        return taken.flatten(0, 1)[: len(request.input_ids)].clone(memory_format=torch.contiguous_format)


def _already() -> None:
    """A copy on the CPU is done when it returns."""


def _states_group(kv_cache_config: Any) -> int:
    """Index of the cache group that holds the states."""
    groups = getattr(kv_cache_config, "kv_cache_groups", None) or []
    found = [i for i, g in enumerate(groups) if type(g.kv_cache_spec).__name__ == "HiddenStateCacheSpec"]
    if len(found) > 1 or (not found and len(groups) > 1):
        raise RuntimeError(
            "the hidden-states cache layer is not alone in its group; this target is not supported by vLLM's capture"
        )
    return found[0] if found else 0
