"""Run folders that share the samples and the states of one run, and what became of a training in them.

A derived run links what its settings leave alone: a share of the training samples is another index of the store, and
another draft vocabulary is made by training itself.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from draftsmith.core.atomic import write_json
from draftsmith.core.checkpoint import Checkpoint, chosen_checkpoint, read_checkpoint
from draftsmith.core.config import Config
from draftsmith.core.draft_folder import DraftFolder
from draftsmith.core.engine import has_cuda
from draftsmith.core.manifest import MANIFEST
from draftsmith.core.replay import conversation_of
from draftsmith.core.run import RunFolder
from draftsmith.core.store import INDEX
from draftsmith.core.target import resolve_target
from draftsmith.eval.columns import captured_for
from draftsmith.eval.offline import replay
from draftsmith.eval.replay_rows import replay_rows
from draftsmith.hidden_state_capture.reader import HiddenStateStore


def derive(base: RunFolder, root: Path, share: float) -> None:
    """Make the folder of a run that trains on the base's samples and states; what is there already stays.

    Args:
        base: a run that is prepared and captured.
        root: folder of the new run.
        share: of the training tokens; samples of one conversation stay together, and a smaller share is part of a
            larger one.
    """
    root.mkdir(parents=True, exist_ok=True)
    new = RunFolder(root)
    link(new.samples, base.samples)
    if share < 1:
        _part_of_store(new.hidden_states, base.hidden_states, share)
    else:
        link(new.hidden_states, base.hidden_states)
    link(new.vocab_mapping, base.vocab_mapping)  # training puts one of its own there, where that is of another size


def link(new: Path, old: Path) -> None:
    """A relative link, so that the folder of all runs can be moved."""
    if not new.is_symlink() and not new.exists():
        beside = new.parent.parent.resolve() == old.parent.parent.resolve()
        new.symlink_to(Path("..") / old.parent.name / old.name if beside else old.resolve())


def _part_of_store(new: Path, old: Path, share: float) -> None:
    """The same shards under an index that knows only part of the training samples, and all that are held out."""
    if (new / MANIFEST).is_file():
        return
    new.mkdir(exist_ok=True)
    table = pq.read_table(old / INDEX)
    kept = chosen(table.to_pylist(), share)
    pq.write_table(table.filter(pa.array(kept)), new / INDEX)
    for shard in old.glob("shard-*"):
        if not (new / shard.name).exists():
            (new / shard.name).symlink_to(shard.resolve())
    manifest = json.loads((old / MANIFEST).read_text(encoding="utf-8"))
    write_json(new / MANIFEST, {**manifest, "train_share": share})


def chosen(index: Sequence[dict[str, Any]], share: float) -> list[bool]:
    """Which rows of a store's index belong to a share of the training tokens, to the nearest conversation."""
    tokens: dict[str, int] = {}
    for row in index:
        if row["split"] == "train":
            name = conversation_of(row["sample_id"])
            tokens[name] = tokens.get(name, 0) + row["length"]
    wanted, kept = share * sum(tokens.values()), set()
    for name in sorted(tokens, key=lambda name: hashlib.sha256(name.encode()).hexdigest()):
        if tokens[name] > 2 * wanted:  # more of it would lie outside than inside
            break
        kept.add(name)
        wanted -= tokens[name]
    return [row["split"] != "train" or conversation_of(row["sample_id"]) in kept for row in index]


def train_tokens(store: HiddenStateStore) -> int:
    """Tokens of the training samples, one epoch."""
    return sum(store.lengths(store.numbers("train")))


def as_folder(checkpoint: Checkpoint) -> DraftFolder:
    """A checkpoint of ours as replay takes a draft."""
    c = checkpoint
    return DraftFolder(c.shape, c.tensors, c.target_ids, c.layer_ids, {}, "hf")


def replayed(config: Config, draft: DraftFolder, store: HiddenStateStore, name: str) -> list[dict[str, Any]] | None:
    """Replayed acceptance at every K and temperature of the config, on a store's held-out samples."""
    batches = captured_for(config, store, name, draft)
    if batches is None:
        return None
    done = replay(config, resolve_target(config.target), draft, store.manifest["last_state"]["norm_form"], batches)
    return replay_rows(config, done)


def lengths(rows: Iterable[dict[str, Any]], temperature: float = 0.0) -> dict[str, float]:
    """Acceptance length by K."""
    return {str(r["k"]): round(r["acceptance_length"], 4) for r in rows if r["temperature"] == temperature}


def trained(config: Config, store: HiddenStateStore) -> dict[str, Any]:
    """What a finished training reached: replay of the last checkpoint, and of the best where that is another one."""
    run = RunFolder.of(config)
    lines = [json.loads(line) for line in run.metrics.read_text(encoding="utf-8").splitlines()]
    last = chosen_checkpoint(run, "last", "the ablation")
    result: dict[str, Any] = {
        "checkpoint": last.name,
        "steps": lines[-1]["step"],
        **speed(lines),
        "curve": curve(lines),
    }
    for which, folder in {"last": last, "best": chosen_checkpoint(run, "best", "the ablation")}.items():
        if which == "best" and folder == last:
            continue
        checkpoint = read_checkpoint(folder)
        rows = replayed(config, as_folder(checkpoint), store, run.root.name)
        if rows is None:  # other layers than the base's: their own states of the same samples
            rows = replayed(config, as_folder(checkpoint), HiddenStateStore(run.hidden_states), run.root.name) or []
        five = next((r for r in rows if r["k"] == 5 and r["temperature"] == 0.0), rows[-1])
        result[f"replay_{which}"] = lengths(rows)
        for other in sorted({r["temperature"] for r in rows} - {0.0}):
            result[f"replay_{which}_t{other:g}"] = lengths(rows, other)
        result[f"ci95_{which}"] = [round(x, 4) for x in five["ci95"]]
        result[f"ci95_{which}_k"] = five["k"]
    result["parameters"] = sum(t.numel() for t in read_checkpoint(last).tensors.values())
    return result


def speed(lines: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Steps a second between log lines, and seconds from the first one to the last, evaluations among them."""
    logged = [line for line in lines if "tokens_per_second" in line]
    rates = [
        (b["step"] - a["step"]) / (b["time"] - a["time"])
        for a, b in itertools.pairwise(logged)
        if b["time"] > a["time"]
    ]
    seconds = lines[-1]["time"] - logged[0]["time"] if logged else 0.0
    return {"steps_per_second": round(statistics.median(rates), 2) if rates else 0.0, "seconds": round(seconds, 1)}


def curve(lines: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """Replayed acceptance length at K = J while training ran: step, seconds since the first log line, length."""
    began = next((line["time"] for line in lines), 0.0)
    return [
        {"step": r["step"], "seconds": round(r["time"] - began, 1), "acceptance_length": r["eval_acceptance_length"]}
        for r in lines
        if "eval_acceptance_length" in r
    ]


def machine() -> str:
    """What trains here."""
    import torch

    return torch.cuda.get_device_name() if has_cuda() else f"{torch.get_num_threads()} CPU threads"
