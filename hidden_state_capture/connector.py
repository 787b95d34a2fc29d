"""vLLM KV connector that takes finished requests' hidden states out of the cache layer and hands them to the writer.

vLLM's `extract_hidden_states` method keeps the states of every scheduled token in a cache layer of its own. When a
request finishes, the scheduler side notes its blocks and whose sample it is; the worker side starts their way to the
host (`gather.py`) and lets the blocks go once the copy is done.

Works with vLLM 0.24 to 0.33. Import nothing heavy here beyond vLLM: every engine process loads this module.
"""

from collections import deque
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

from draftsmith.core.atomic import write_json
from draftsmith.hidden_state_capture.gather import Gatherer, Held, SampleRows
from draftsmith.hidden_state_capture.shard import next_number, remove_uncommitted
from draftsmith.hidden_state_capture.spool_writer import SpoolWriter
from draftsmith.hidden_state_capture.writer import CONNECTOR, ShardWriter, WriterConfig


@dataclass
class FinishedRequests(KVConnectorMetadata):
    """Metadata of one engine step: what has finished, on its way from the scheduler to the worker."""

    requests: list[Held] = field(default_factory=list)


class HiddenStatesConnector(KVConnectorBase_V1, SupportsHMA):
    """Producer only. `kv_transfer_params` of a request: sample_id, loss_spans, and save_to for a probe."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        if vllm_config.cache_config.enable_prefix_caching:
            raise ValueError("prefix caching is on: cached tokens would have no states (--no-enable-prefix-caching)")
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._folder, self._extra = Path(extra["folder"]), extra
        self._num_states = len(extra["layer_ids"])
        self._group = _states_group(kv_cache_config)
        self._finished: list[Held] = []
        # Worker side; only TP rank 0 has them.
        self.writer: ShardWriter | None = None
        self._gatherer: Gatherer | None = None
        self._copies: deque[tuple[list[str], Any]] = deque()

    # ---- scheduler side -------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Nothing is ever loaded."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing is ever loaded."""

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Note the request and keep its blocks until the worker has copied them."""
        params, ids = request.kv_transfer_params, request.prompt_token_ids
        # An aborted request has not been computed to its end: its blocks hold some other request's states.
        if not params or "sample_id" not in params or request.num_computed_tokens < len(ids):
            return False, None
        rows = SampleRows.of(params["sample_id"], ids, params["loss_spans"], params.get("save_to"), params.get("slot"))
        self._finished.append(Held(request.request_id, list(block_ids), rows))
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
        requests, self._finished = self._finished, []
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
        cache = kv_caches[layers[0]]
        # [blocks, states, block, hidden] from 0.32 on, [blocks, block, states, hidden] before.
        fits = [axis for axis in (1, 2) if cache.shape[3 - axis] == self._num_states]
        if cache.dim() != 4 or not fits:
            raise RuntimeError(f"unknown layout of the hidden-states cache: {tuple(cache.shape)}")
        if get_tensor_model_parallel_rank() != 0:
            return
        if self._extra["served"]:
            remove_uncommitted(self._folder)
        config = dict(self._extra["writer"])
        config.setdefault("first", next_number(self._folder))
        kind = SpoolWriter if self._extra["spool"] else ShardWriter
        self.writer = kind(self._folder, WriterConfig(**config))
        self._gatherer = Gatherer(
            cache.transpose(1, 2) if fits[-1] == 2 else cache,
            config["storage"],
            config["pending_bytes"],
            self._extra["gather_bytes"],
        )
        if self._extra["served"]:
            told = {"layer_ids": self._extra["layer_ids"], "storage": config["storage"], "dtype": str(cache.dtype)}
            write_json(self._folder / CONNECTOR, told)

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
        if self.writer is None or self._gatherer is None:
            return None, None
        if self.has_connector_metadata():
            metadata = self._get_connector_metadata()
            assert isinstance(metadata, FinishedRequests)
            for requests, batch, event in self._gatherer.take(metadata.requests):
                self._copies.append(([r.request_id for r in requests], event))
                self.writer.put(batch)
        done: set[str] = set()
        while self._copies and (self._copies[0][1] is None or self._copies[0][1].query()):
            done.update(self._copies.popleft()[0])  # they end in the order in which they were started
        return done or None, None


def _states_group(kv_cache_config: Any) -> int:
    """Index of the cache group that holds the states."""
    groups = getattr(kv_cache_config, "kv_cache_groups", None) or []
    found = [i for i, g in enumerate(groups) if type(g.kv_cache_spec).__name__ == "HiddenStateCacheSpec"]
    if len(found) > 1 or (not found and len(groups) > 1):
        raise RuntimeError(
            "the hidden-states cache layer is not alone in its group; this target is not supported by vLLM's capture"
        )
    return found[0] if found else 0
