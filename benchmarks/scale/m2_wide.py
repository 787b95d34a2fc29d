"""A MiniMax-M2.5 of true width and random weights through the whole pipeline, in one command; plan against measured.

    python benchmarks/scale/m2_wide.py --out m2-wide.json [--layers 4] [--weights fp8] [section.key=value ...]

makes the checkpoint (m2_checkpoint.py), then runs prepare (the target writes the replies), capture, train, export
(proven on vLLM) and eval (replay, and vLLM with the draft and without), each as a command of its own, and prints the
seconds of each, and the planner's bytes, memory and rates beside what was measured. `--tiny` is the same on two CPU
cores. `--weights bf16 --compare` also compares the captured states with transformers' at every layer, in host memory.
Needs the package on PYTHONPATH, or installed.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from draftsmith.core.config import Config
from draftsmith.core.config_io import dump_config, load_config
from draftsmith.core.estimate import amount_of
from draftsmith.core.manifest import package_versions, read_manifest
from draftsmith.core.plan import make_plan
from draftsmith.core.plan_hours import Rates
from draftsmith.core.run import RunFolder

STAGES = ("prepare", "capture", "train", "export", "eval")
# Training as its stage runs it, and what it held at its peak.
TRAIN = """
import sys, torch
from draftsmith.core.cli import main
sys.argv = ["draftsmith", "train", "--config", sys.argv[1]]
try:
    main()
finally:
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    open(sys.argv[-1] + ".peak", "w").write(str(peak))
"""


def settings(args: argparse.Namespace, target: Path) -> list[str]:
    """Overrides of the run: the recipe's draft, a small amount of data."""
    tiny, dtype = args.tiny, "auto" if args.tiny else "bfloat16"
    return [
        "run.name=m2-wide", f"run.dir={args.folder / 'runs'}", f"target.path={target}", f"target.dtype={dtype}",
        # No speed of the engine is measured here, so none of its five starts compiles.
        "target.engine_args={gpu_memory_utilization: 0.45, enforce_eager: true}",
        f"data.sources=[{{path: demo-prompts, limit: {16 if tiny else args.prompts}}}]",
        f"data.sampling={{temperature: 0.0, max_tokens: {16 if tiny else args.tokens}}}",
        "data.max_length=1024", f"data.draft_vocab_size={1024 if tiny else 32000}", "data.eval_share=0.2",
        f"capture.probe.transformers_max_bytes={10**13 if args.compare else 0}",
        "draft.fc_norm=true", "draft.norm_output=true",
        *(["draft.num_kv_heads=4", "draft.intermediate_size=768"] if tiny else
          ["draft.num_heads=48", "draft.num_kv_heads=48", "draft.head_dim=128", "draft.intermediate_size=9216"]),
        f"train.ttt_steps={2 if tiny else 7}", f"train.tokens_per_batch={512 if tiny else 8192}",
        f"train.epochs={2 if tiny else 4}",
        "train.log_interval=1", "train.learning_rate=5.0e-4", "eval.tolerance=0.1",
        "eval.k=[3]", f"eval.concurrency=[{4 if tiny else 16}]", f"eval.max_prompts={4 if tiny else 32}",
    ]  # fmt: skip


def run_stages(file: Path) -> dict[str, float]:
    """Seconds of every stage.

    Raises:
        SystemExit: one failed; with its exit code.
    """
    # The plain kernels, which need nothing but vLLM's wheel.
    env = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_DEEP_GEMM": "0", **os.environ}
    took = {}
    for stage in STAGES:
        cli = (
            ["-c", TRAIN, str(file)]
            if stage == "train"
            else ["-m", "draftsmith.core.cli", stage, "--config", str(file)]
        )
        began = time.monotonic()
        done = subprocess.run([sys.executable, *cli], env=env)
        took[stage] = round(time.monotonic() - began, 1)
        print(f"== {stage}: {took[stage]} s", flush=True)
        if done.returncode:
            sys.exit(done.returncode)
    return took


def compare(config: Config, file: Path) -> dict[str, Any]:
    """The planner's figures beside the run's own: planned, measured, and their ratio."""
    run = RunFolder.of(config)
    plan = make_plan(config, amount_of(config, run), Rates(gpus=1))
    states, trained = read_manifest(run.hidden_states), read_manifest(run.checkpoints)
    assert states and trained
    written = sum(f.stat().st_size for f in run.hidden_states.glob("shard-*.safetensors"))
    checkpoints = sum(f.stat().st_size for f in run.checkpoints.rglob("*") if f.is_file())
    each = checkpoints / max(1, len(run.complete_checkpoints()))
    weights = sum(f.stat().st_size for f in Path(config.target.path).glob("*.safetensors"))
    rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    rates = [r["tokens_per_second"] for r in rows if "tokens_per_second" in r]
    steady = sorted(rates[len(rates) // 4 :])
    peak = int(Path(f"{file}.peak").read_text())
    held = {k: v for k, v in plan["gpu"]["training"].items() if k != "CUDA"}  # of torch's own tensors
    draft = json.loads((run.export / "config.json").read_text())
    pairs: dict[str, tuple[float, float]] = {
        "bytes of states": (plan["disk"]["states"][config.capture.storage], written),
        "bytes of a checkpoint": (plan["disk"]["checkpoints"] / (config.train.keep_checkpoints + 1), each),
        "bytes of the target": (_target_bytes(config), weights),
    }
    if torch.cuda.is_available():
        pairs["bytes of training on the GPU"] = sum(held.values()), peak
        pairs["training tokens/s"] = plan["hours"]["train_rate"], steady[len(steady) // 2] if steady else 0
    return {
        "planned_and_measured": {
            name: {"planned": p, "measured": m, "ratio": round(m / p, 3)}
            for name, (p, m) in pairs.items()
        },
        "samples": plan["amount"]["samples"], "tokens": plan["amount"]["tokens"],
        "layer_ids": states["layer_ids"], "probe": states["probe"],
        "draft": {k: draft[k] for k in ("architectures", "hidden_size", "draft_vocab_size")},
        "loss": [next(r["loss"] for r in rows if "loss" in r), [r["loss"] for r in rows if "loss" in r][-1]],
    }  # fmt: skip


def _target_bytes(config: Config) -> int:
    """What the planner says of the target where its weights are not there."""
    from draftsmith.core.plan import target_shape
    from draftsmith.core.sizes import target_bytes

    hf = target_shape(config.target).hf_config
    return target_bytes(hf, (getattr(hf, "quantization_config", None) or {}).get("quant_method"))


def report_of(run: RunFolder) -> dict[str, Any]:
    """What evaluation found: replayed and served acceptance length at K = 3."""
    report = json.loads((run.eval / "report.json").read_text())
    replayed = next(r for r in report["replay"] if r["k"] == 3)
    served = report["served"][0]
    return {
        "replayed": replayed["acceptance_length"], "served": served["acceptance_length"], "drafts": served["drafts"],
        "tokens_per_second": served["tokens_per_second"], "without": served["baseline_tokens_per_second"],
        "identical_replies": served["identical_replies"], "export": json.loads(
            (run.export / "verification.json").read_text())["passed"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", type=Path, default=Path("runs/m2-wide-bench"))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--weights", choices=("fp8", "bf16"), default="fp8")
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=256, help="longest reply")
    parser.add_argument("--template", type=Path, help="chat template; else a short one with M2.5's markers")
    parser.add_argument("--compare", action="store_true", help="compare states with transformers, in host memory")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    args.folder = args.folder.absolute()
    fp8 = args.weights == "fp8" and not args.tiny
    began, target = time.monotonic(), args.folder / "target"
    # In a process of its own, whose GPU memory is free again when the stages begin.
    make = [
        sys.executable,
        str(Path(__file__).with_name("m2_checkpoint.py")),
        str(target),
        "--layers",
        str(args.layers),
    ]
    make += (["--fp8"] if fp8 else []) + (["--tiny"] if args.tiny else [])
    subprocess.run(make + (["--template", str(args.template)] if args.template else []), check=True)
    took = {"checkpoint": round(time.monotonic() - began, 1)}
    file = args.folder / "m2-wide.yaml"
    file.write_text("")
    config = load_config(file, [*settings(args, target), *args.overrides])
    file.write_text(dump_config(config))
    took |= run_stages(file)
    found = {
        "seconds": {**took, "all": round(sum(took.values()), 1)},
        **compare(config, file),
        "evaluation": report_of(RunFolder.of(config)),
        "settings": {k: str(v) for k, v in vars(args).items() if k not in ("out", "folder")},
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "versions": package_versions(),
    }
    args.out.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
