"""Measured passes as rows of the report, and how they agree with replay."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from draftsmith.core.config import Config
from draftsmith.core.replay import bootstrap_lengths, conversation_of, interval, table_figures
from draftsmith.eval.offline import Replay
from draftsmith.eval.passes import Pass
from draftsmith.eval.prompts import HELD_OUT
from draftsmith.eval.sweep import Measured


def served_row(config: Config, measured: Measured) -> dict[str, Any]:
    """One row of `served`: a pass beside its baseline."""
    job, done, base = measured.job, measured.done, measured.baseline
    speed = done.tokens / done.seconds
    base_speed = base.tokens / base.seconds if base else None
    differences = first_differences(done, base) if base and job.temperature == 0 else None
    return {
        "set": job.set,
        "k": measured.variant.k,
        "temperature": job.temperature,
        "concurrency": job.concurrency,
        "prompts": len(job.prompts),
        "acceptance_length": done.acceptance_length,
        "ci95": _interval(config, measured),
        "per_position": [n / max(1, done.counters.drafts) for n in done.counters.per_position],
        "drafts": done.counters.drafts,
        "accepted": done.counters.accepted,
        "tokens": done.tokens,
        "tokens_per_second": speed,
        "first_token_ms": _median_ms(done.first_token),
        "inter_token_ms": _median_ms(done.between_tokens),
        "baseline_tokens_per_second": base_speed,
        "baseline_first_token_ms": _median_ms(base.first_token) if base else None,
        "baseline_inter_token_ms": _median_ms(base.between_tokens) if base else None,
        "speedup": speed / base_speed if base_speed else None,
        "interleaved": measured.interleaved,
        # At temperature 0 a draft changes nothing but the speed, near-ties in batched arithmetic apart.
        "identical_replies": len(job.prompts) - len(differences) if differences is not None else None,
        "first_differences": differences,
    }


def first_differences(done: Pass, base: Pass) -> list[int]:
    """Of every reply that differs from the baseline's, the position of its first other token."""
    found = []
    for ours, theirs in zip(done.replies, base.replies, strict=True):
        if ours != theirs:
            same = (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
            found.append(next(same, min(len(ours), len(theirs))))
    return found


def agreement_rows(config: Config, replayed: Replay, served: Sequence[Measured]) -> list[dict[str, Any]]:
    """`agreement` of the report: replay beside serving, over the very same held-out samples."""
    at = {sample_id: i for i, sample_id in enumerate(replayed.sample_ids)}
    rows = []
    for measured in served:
        job, done = measured.job, measured.done
        table = replayed.tables.get((measured.variant.k, job.temperature))
        if job.set != HELD_OUT or table is None:
            continue
        # A later turn of a sample is ID#TURN (prompts.py), and an id may hold a # itself.
        chosen = sorted({at[p.id if p.id in at else p.id.rpartition("#")[0]] for p in job.prompts})
        predicted = float(str(table_figures(table[chosen])["acceptance_length"]))
        length = done.acceptance_length
        rows.append(
            {
                "k": measured.variant.k,
                "temperature": job.temperature,
                "concurrency": job.concurrency,
                "method": replayed.methods[job.temperature],
                "replayed": predicted,
                "served": length,
                "difference": length / predicted - 1.0,
                # An estimate along greedy replies is too high for sampled ones, which are harder: no fault of a draft.
                "falls_short": replayed.methods[job.temperature] != "expected"
                and length < predicted * (1.0 - config.eval.tolerance),
            }
        )
    return rows


def _interval(config: Config, measured: Measured) -> list[float]:
    groups = [conversation_of(p.id) for p in measured.job.prompts]
    return interval(bootstrap_lengths(groups, [measured.done.table], config.eval.bootstrap, config.run.seed)[:, 0])


def _median_ms(seconds: Sequence[float]) -> float | None:
    values = [s for s in seconds if s == s]
    return 1000.0 * float(np.median(values)) if values else None
