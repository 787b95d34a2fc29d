"""`store stats`: what a store holds, from its index, and how large its states are, from some of its samples."""

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.hidden_state_capture.reader import HiddenStateStore


def store_stats(folder: Path, probed: int) -> dict[str, Any]:
    """Figures of a complete store.

    Args:
        folder: the store.
        probed: samples whose states are read for the rms of every layer, evenly spread; 0: none.

    Returns:
        JSON-serialisable: samples, tokens, supervised_tokens, bytes, bytes_per_token, storage, shards, `groups`
        [{source, split, samples, tokens, supervised_tokens}], `lengths` {min, median, max}, rejected, and `layers`
        [{layer_id, rms, rms_first_tokens, rms_other_tokens, largest}], the last one before
        the final norm.
    """
    store = HiddenStateStore(folder, "store stats")
    groups: dict[tuple[str, str], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for row in store.index:
        group = groups[row["source"], row["split"]]
        group["samples"] += 1
        group["tokens"] += row["length"]
        group["supervised_tokens"] += row["supervised_tokens"]
    lengths = sorted(row["length"] for row in store.index)
    totals = {k: sum(g[k] for g in groups.values()) for k in ("samples", "tokens", "supervised_tokens")}
    size = sum(shard["bytes"] for shard in store.manifest["shards"])
    return {
        **totals,
        "bytes": size,
        "bytes_per_token": size / max(1, totals["tokens"]),
        "storage": store.manifest["storage"],
        "shards": len(store.manifest["shards"]),
        "groups": [{"source": a, "split": b, **g} for (a, b), g in sorted(groups.items())],
        "lengths": {"min": lengths[0], "median": lengths[len(lengths) // 2], "max": lengths[-1]} if lengths else {},
        "rejected": len(store.manifest["rejected"]),
        "layers": _layers(store, probed),
    }


def _layers(store: HiddenStateStore, probed: int) -> list[dict[str, float]]:
    count = min(probed, len(store.index))
    if not count:
        return []
    chosen = [store[i * len(store.index) // count] for i in range(count)]
    # Every state of a sample, and which token each row is: of the last layer only some rows are kept.
    columns = [
        (layer_id, [(s.aux_states_TAH[:, i], torch.arange(len(s.input_ids_T))) for s in chosen])
        for i, layer_id in enumerate(store.manifest["layer_ids"])
    ]
    columns.append((store.manifest["last_state"]["layer_id"], [(s.last_states_MH, s.last_rows_M) for s in chosen]))
    return [_layer(layer_id, parts) for layer_id, parts in columns]


def _layer(layer_id: int, parts: list[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """First tokens apart too: their activations are huge in many targets, and are most of what the first rms tells."""
    return {
        "layer_id": layer_id,
        "rms": _rms([states for states, _ in parts]),
        "rms_first_tokens": _rms([states[tokens == 0] for states, tokens in parts]),
        "rms_other_tokens": _rms([states[tokens > 0] for states, tokens in parts]),
        "largest": max((float(states.abs().max()) for states, _ in parts if states.numel()), default=0.0),
    }


def _rms(parts: list[Tensor]) -> float:
    """0 where there is nothing."""
    squares = [float(p.float().pow(2).sum(dtype=torch.float64)) for p in parts]
    return math.sqrt(sum(squares) / max(1, sum(p.numel() for p in parts)))
