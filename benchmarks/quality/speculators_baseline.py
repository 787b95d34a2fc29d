"""speculators 0.9.0's Eagle3 draft, trained on a run of ours: its `speculators train`, reading our store.

    python3 benchmarks/quality/speculators_baseline.py --config FILE [section.key=value ...] --out runs/speculators \
        [-- --its-own flags]

What runs is its command line's own `main`: its defaults, its draft, its optimizer, its loader and sampler, its
checkpoints. Ours are the target and its layers, the samples with their states (through `store_dataset.py`), the epochs,
the seed and, unless --vocabulary full, the draft vocabulary. After `--`, any flag of `speculators train`.
OUT/EPOCH is a draft folder in its format; every one is replayed, and OUT/result.json says what came of it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from runs import lengths, machine, replayed, train_tokens
from store_dataset import REPLACED, loader, speculators_cli

from draftsmith.core.atomic import sha256_file, write_json
from draftsmith.core.config import Config
from draftsmith.core.config_io import load_config
from draftsmith.core.draft_folder import read_draft_folder
from draftsmith.core.run import RunFolder
from draftsmith.core.target import resolve_target
from draftsmith.core.vocab import load_mapping
from draftsmith.hidden_state_capture.reader import HiddenStateStore

CPU_FLAGS = ["--draft-attn-impl", "eager", "--loss-implementation", "eager", "--num-workers", "0"]


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, required=True, help="of a run that is prepared and captured")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoints")
    parser.add_argument("--vocabulary", choices=("ours", "full"), default="ours")
    parser.add_argument("--replay-only", action="store_true", help="of checkpoints that are there")
    return parser


def command_line(config: Config, out: Path, vocabulary: str, theirs: list[str]) -> list[str]:
    """Flags of `speculators train`."""
    run, target = RunFolder.of(config), resolve_target(config.target)
    store = HiddenStateStore(run.hidden_states, "speculators")
    flags = ["--verifier-name-or-path", str(target.local_path), "--save-path", str(out)]
    flags += ["--data-path", str(out), "--log-dir", str(out / "logs"), "--log-freq", "1000000"]
    flags += ["--target-layer-ids", *map(str, store.manifest["layer_ids"])]
    flags += ["--epochs", str(config.train.epochs), "--seed", str(config.run.seed)]
    mapping = load_mapping(run.vocab_mapping)
    if vocabulary == "ours" and not mapping.is_full:
        for name, array in (("d2t", mapping.d2t), ("t2d", mapping.t2d)):
            np.save(out / f"{name}.npy", array)
            flags += [f"--{name}-path", str(out / f"{name}.npy")]
    return [*flags, *([] if torch.cuda.is_available() else CPU_FLAGS), *theirs]


class Watched(speculators_cli.Trainer):
    """Its Trainer with a clock: one record an epoch, taken before the checkpoint is written."""

    log: list[dict[str, Any]]
    began: float

    def train_epoch(self, epoch: int, **named: Any) -> None:
        if epoch == self.current_epoch:
            type(self).log, type(self).began = [], time.monotonic()
            self.losses: list[torch.Tensor] = []
            self.model.register_forward_hook(lambda _m, _a, output: self.losses.append(output[1].detach()))
        if not torch.cuda.is_available():
            self.device_type = "cpu"
            self.global_step += not self.global_step  # at a step 0 it waits for the accelerator that there is not
        self.losses.clear()
        super().train_epoch(epoch, **named)
        values = torch.stack(self.losses).tolist()
        quarter = max(1, len(values) // 4)
        self.log.append(
            {
                "epoch": epoch,
                "steps": len(values),
                "seconds": round(time.monotonic() - self.began, 2),  # .tolist() has waited for the device
                "loss_first": round(sum(values[:quarter]) / quarter, 4),
                "loss_last": round(sum(values[-quarter:]) / quarter, 4),
            }
        )


def give_each_kernel_its_own_configs() -> None:
    """Its two loss kernels share one list of autotuner configs, which torch 2.11's compiler changes in place."""
    import copy

    from speculators.losses import fused

    for kernel in (fused.loss_forward_kernel, fused.loss_backward_kernel):
        if hasattr(kernel, "configs"):
            kernel.configs = copy.deepcopy(kernel.configs)


def train(config: Config, out: Path, flags: list[str]) -> dict[str, Any]:
    """Run its command line; its own seconds, start and compilation included, and the log of the epochs."""
    states = RunFolder.of(config).hidden_states

    def loaders(**named: Any) -> tuple[Any, None]:
        wanted = ("total_seq_len", "hidden_size", "num_target_layers", "num_workers", "prefetch_factor", "preprocess")
        return loader(states, "train", seed=named["seed"], **{k: named[k] for k in wanted}), None

    speculators_cli.create_train_val_loaders, speculators_cli.Trainer = loaders, Watched
    if not torch.cuda.is_available():
        import speculators.train.trainer as trainer_module

        trainer_module.get_local_rank = lambda: torch.device("cpu")
    give_each_kernel_its_own_configs()
    resolved = speculators_cli.TrainConfig.resolve(flags)
    began = time.monotonic()
    speculators_cli.main(resolved)
    flat = resolved.flatten()
    return {
        "wall_seconds": round(time.monotonic() - began, 1),
        "process_seconds": round(time.time() - psutil.Process().create_time(), 1),
        "epochs": Watched.log,
        "settings": {k: v for k, v in flat.items() if isinstance(v, str | int | float | bool | list | None)},
    }


def main() -> None:
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    given, theirs = arguments().parse_args(words[:split]), words[split + 1 :]
    config = load_config(given.config, given.overrides)
    given.out.mkdir(parents=True, exist_ok=True)
    result_file = given.out / "result.json"
    store = HiddenStateStore(RunFolder.of(config).hidden_states, "speculators")
    result: dict[str, Any] = {"kind": "peer", "name": given.out.name}
    if result_file.exists() and not given.replay_only:
        raise SystemExit(f"{result_file} is there already: choose another --out, or --replay-only.")
    if given.replay_only:
        result = json.loads(result_file.read_text(encoding="utf-8"))
    else:
        flags = command_line(config, given.out, given.vocabulary, theirs)
        result |= train(config, given.out, flags)
        tokens = train_tokens(store)
        result |= {"flags": flags, "train_tokens": tokens, "tokens_seen": tokens * len(result["epochs"])}
        result["interrupted"] = (
            len(result["epochs"]) < result["settings"]["epochs"]
        )  # a signal makes it save and end in peace
        result |= {"machine": machine(), "replaced_imports": REPLACED}
        result["versions"] = {name: version(name) for name in ("speculators", "torch", "transformers")}
        write_json(result_file, result)  # the replay may fail; the training is not lost then
    target = resolve_target(config.target)
    for line in result["epochs"]:
        folder = given.out / str(line["epoch"])
        if not (folder / "config.json").is_file():  # --checkpoint-freq leaves epochs out
            continue
        rows = replayed(config, read_draft_folder(folder, target), store, given.out.name) or []
        line["replay"] = lengths(rows)
        line["folder"] = str(folder)
    result["weights_sha256"] = sha256_file(folder / "model.safetensors")
    write_json(result_file, result)
    print(json.dumps({k: result[k] for k in ("name", "wall_seconds", "tokens_seen", "epochs")}))
    raise SystemExit(1 if result["interrupted"] else 0)


if __name__ == "__main__":  # its loader's workers import this file again
    main()
