"""Does a draft lose anything when it is trained from states in fp8? The same training twice, from the same states.

    draftsmith prepare/capture/train ... run.name=bf16            # a trained run with capture.storage bf16
    python benchmarks/capture/fp8_draft.py runs/bf16 --into runs/compared --out fp8.json

Encodes the run's store into a store in fp8 of a new run, trains that as the first was trained, and replays both drafts
on the held-out samples' states in bf16, which are closer to what the server feeds. Prints one JSON object.
"""

import argparse
import itertools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file

from draftsmith.core.checkpoint import Checkpoint, build_objective, final_checkpoint, read_checkpoint
from draftsmith.core.config import Config
from draftsmith.core.config_io import load_config
from draftsmith.core.fp8_states import decode, encode
from draftsmith.core.manifest import package_versions, write_manifest
from draftsmith.core.replay import (
    SampleRounds,
    acceptance,
    bootstrap_lengths,
    chain_matches,
    conversation_of,
    interval,
    tally,
    walk,
)
from draftsmith.core.run import RunFolder
from draftsmith.core.store import INDEX, INDEX_SCHEMA, shard_name
from draftsmith.core.target import resolve_target
from draftsmith.data.batching import collate, plan_batches
from draftsmith.hidden_state_capture.reader import HiddenStateStore


def encoded(store: HiddenStateStore, folder: Path) -> None:
    """The same samples in fp8: what a capture in fp8 would have stored, in one shard and without checksums."""
    folder.mkdir()
    parts = [store.stored(number) for number in range(len(store.index))]
    starts, lasts = ([0, *itertools.accumulate(row[k] for row in store.index)] for k in ("length", "last_length"))
    tensors = {name: torch.cat([p[name] for p in parts]) for name in ("input_ids", "loss_mask")}
    for name in ("aux", "last"):
        coded = [encode(p[f"{name}_states"]) for p in parts]
        tensors |= {f"{name}_{kind}": torch.cat([c[i] for c in coded]) for i, kind in enumerate(("states", "scales"))}
    tensors["last_rows"] = torch.cat([p["last_rows"] + start for p, start in zip(parts, starts, strict=False)])
    tensors["sample_offsets"] = torch.tensor(starts)
    save_file(tensors, folder / shard_name(0))
    places = ({"shard": 0, "row": i, "start": starts[i], "last_start": lasts[i]} for i in range(len(parts)))
    rows = [{**row, **place, "sha256": ""} for row, place in zip(store.index, places, strict=True)]
    pq.write_table(pa.Table.from_pylist(rows, schema=INDEX_SCHEMA), folder / INDEX)
    size = (folder / shard_name(0)).stat().st_size
    shard = {"file": shard_name(0), "sha256": "", "bytes": size, "samples": len(rows), "tokens": starts[-1]}
    kept = {k: v for k, v in store.manifest.items() if k not in ("stage", "created", "inputs", "versions")}
    inputs = {**store.manifest["inputs"], "storage": "fp8"}
    write_manifest(folder, "capture", inputs, {**kept, "storage": "fp8", "shards": [shard]})


def trained(config: Config, into: Path, storage: str, overrides: list[str]) -> Config:
    """A run like the first, its samples and states the same but for their format."""
    from draftsmith.train.stage import train

    first = RunFolder.of(config)
    settings = [f"run.dir={into}", f"run.name={storage}", f"capture.storage={storage}", *overrides]
    second = load_config(first.root / "config.yaml", settings)
    run = RunFolder.of(second)
    if not (run.hidden_states / "manifest.json").exists():
        shutil.rmtree(run.root, ignore_errors=True)
        shutil.copytree(first.samples, run.samples)
        shutil.copy(first.vocab_mapping, run.vocab_mapping)
        if storage == "bf16":
            run.hidden_states.symlink_to(first.hidden_states.resolve())
        else:
            encoded(HiddenStateStore(first.hidden_states), run.hidden_states)
    train(second)
    return second


@torch.no_grad()
def judged(config: Config, checkpoint: Checkpoint, store: HiddenStateStore) -> dict[str, Any]:
    """Loss and replayed acceptance of a checkpoint on the held-out samples of a store."""
    target, numbers = resolve_target(config.target), store.numbers("eval")
    objective = build_objective(target, checkpoint.shape, checkpoint.target_ids, checkpoint.norm_form)
    objective.draft.load_state_dict(checkpoint.tensors)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    objective.to(device).eval()
    steps, k = config.train.ttt_steps, min(3, config.train.ttt_steps)
    rounds: list[SampleRounds] = []
    loss, rows = torch.zeros(2, steps, dtype=torch.float64)
    for batch_numbers in plan_batches(store.lengths(numbers), config.train.tokens_per_batch):
        batch = collate(store, [numbers[i] for i in batch_numbers]).to(device)
        leading, sums = chain_matches(objective, batch, steps)
        rounds += walk(batch, leading, k)
        loss, rows = loss + sums.loss_J, rows + sums.rows_J
    per_step = (loss / rows).tolist()
    decayed = sum(config.train.step_decay**j * x for j, x in enumerate(per_step))
    groups = [conversation_of(r.sample_id) for r in rounds]
    lengths = bootstrap_lengths(groups, [tally(rounds, k)], 1000, 0)[:, 0]
    return {"loss": decayed, "loss_per_step": per_step, **acceptance(rounds, k), "ci95": interval(lengths)}


def state_errors(store: HiddenStateStore) -> list[float]:
    """Mean relative error of a token's state after the round trip, by layer, the last one at the end."""
    errors = []
    for number in store.numbers("eval"):
        sample = store[number]
        layers = [*sample.aux_states_TAH.unbind(1), sample.last_states_MH]
        errors.append([_error(layer) for layer in layers if len(layer)])
    return torch.tensor(errors).mean(0).tolist()


def _error(states_TH: torch.Tensor) -> float:
    exact = states_TH.double()
    return float(((decode(*encode(states_TH)).double() - exact).norm(dim=-1) / exact.norm(dim=-1)).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a trained run in bf16")
    parser.add_argument("overrides", nargs="*", help="section.key=value: both drafts are trained anew with these")
    parser.add_argument("--into", type=Path, required=True, help="folder of the new runs")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    config = load_config(args.run / "config.yaml", [f"run.dir={args.run.parent}", f"run.name={args.run.name}"])
    runs = {
        "bf16": trained(config, args.into, "bf16", args.overrides) if args.overrides else config,
        "fp8": trained(config, args.into, "fp8", args.overrides),
    }
    stores = {name: HiddenStateStore(RunFolder.of(c).hidden_states) for name, c in runs.items()}
    found = {
        name: judged(c, read_checkpoint(final_checkpoint(RunFolder.of(c), "fp8_draft")), stores["bf16"])
        for name, c in runs.items()
    }
    sizes = {name: sum(s["bytes"] for s in store.manifest["shards"]) for name, store in stores.items()}
    result = {
        "target": config.target.path, "steps": config.train.ttt_steps, "epochs": runs["fp8"].train.epochs, **found,
        "loss_ratio": found["fp8"]["loss"] / found["bf16"]["loss"],
        "acceptance_ratio": found["fp8"]["acceptance_length"] / found["bf16"]["acceptance_length"],
        "bytes": sizes, "bytes_ratio": sizes["fp8"] / sizes["bf16"],
        "state_errors": state_errors(stores["bf16"]), "cpus": os.cpu_count(), "versions": package_versions(),
    }  # fmt: skip
    text = json.dumps(result, indent=2)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
