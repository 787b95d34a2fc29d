"""Replayed rounds as rows of the report: over all held-out samples, and of every source."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from draftsmith.core.config import Config
from draftsmith.core.replay import bootstrap_lengths, conversation_of, interval, table_figures
from draftsmith.eval.offline import Replay


def replay_rows(config: Config, replayed: Replay) -> list[dict[str, Any]]:
    """`replay` of the report."""
    return _rows(config, replayed, np.arange(len(replayed.sample_ids)))


def source_rows(config: Config, replayed: Replay, sources: Mapping[str, str]) -> list[dict[str, Any]]:
    """`replay_by_source` of the report.

    Args:
        config: the run's config.
        replayed: the rounds.
        sources: source of every sample.
    """
    of = np.array([sources[i] for i in replayed.sample_ids])
    return [
        {"source": name, **row}
        for name in sorted(set(of.tolist()))
        for row in _rows(config, replayed, np.flatnonzero(of == name))
    ]


def _rows(config: Config, replayed: Replay, chosen: np.ndarray) -> list[dict[str, Any]]:
    keys = list(replayed.tables)
    tables = [replayed.tables[key][chosen] for key in keys]
    groups = [conversation_of(replayed.sample_ids[i]) for i in chosen]
    draws = bootstrap_lengths(groups, tables, config.eval.bootstrap, config.run.seed)
    return [
        {
            "k": k,
            "temperature": temperature,
            **table_figures(table),
            "ci95": interval(lengths),
            "samples": len(chosen),
            "method": replayed.methods[temperature],
            "exact": replayed.methods[temperature] == "exact",
        }
        for (k, temperature), table, lengths in zip(keys, tables, draws.T, strict=True)
    ]
