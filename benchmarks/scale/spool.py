"""Capture and training at once over a spool, for a given time: who waits for whom, bytes in flight, tokens/s.

    python benchmarks/scale/spool.py --out FILE --capture-gpus 0,1,2,3 --train-processes 4 [section.key=value ...]

Samples are random ids of the given lengths. `--target` is the embedded one, a checkpoint's folder, or `minimax-m2.5`:
its full shape in FP8, with dummy weights in the engine. Without `--capture-gpus` both sides share all GPUs (give the
engine its part: target.engine_args={gpu_memory_utilization: 0.4}). Needs the package on PYTHONPATH, or installed.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from draftsmith.core.atomic import sha256_file
from draftsmith.core.config import Config
from draftsmith.core.config_io import dump_config, load_config
from draftsmith.core.manifest import package_versions, write_manifest
from draftsmith.core.run import RunFolder
from draftsmith.core.samples import Sample, write_samples
from draftsmith.core.spool import folder_bytes
from draftsmith.core.target import resolve_target
from draftsmith.core.vocab import build_mapping, count_tokens, save_mapping
from draftsmith.data.stage import prepare_inputs

# MiniMax-M2.5's config.json, without its tokenizer's part.
M2_5 = {
    "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "hidden_size": 3072,
    "intermediate_size": 1536, "num_hidden_layers": 62, "num_attention_heads": 48, "num_key_value_heads": 8,
    "head_dim": 128, "rotary_dim": 64, "rope_theta": 5000000, "vocab_size": 200064, "num_experts_per_tok": 8,
    "num_local_experts": 256, "scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True,
    "qk_norm_type": "per_layer", "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 196608,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "fp8", "fmt": "float8_e4m3fn", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
    },
}  # fmt: skip
DUMMY = ["target.engine_args={load_format: dummy, skip_tokenizer_init: true, gpu_memory_utilization: 0.94}"]


def write_m2_5(folder: Path, layers: int) -> None:
    """A checkpoint of what training reads (embedding, norm, lm_head); the engine's weights are dummies."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**M2_5, "num_hidden_layers": layers}))
    vocab, hidden = M2_5["vocab_size"], M2_5["hidden_size"]
    names = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    torch.manual_seed(0)
    tensors = {name: torch.randn(size).mul_(0.02).to(torch.bfloat16) for name, size in names.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def write_inputs(config: Config, samples: int, tokens: tuple[int, int]) -> None:
    """`samples/` and the vocabulary mapping of random ids, as `prepare` would leave them."""
    run, target = RunFolder.of(config), resolve_target(config.target)
    run.samples.mkdir(parents=True, exist_ok=True)
    draw, made = random.Random(0), []
    for i in range(samples):
        length = draw.randint(*tokens)
        ids = [draw.randrange(1, target.vocab_size) for _ in range(length)]
        span = [(length // 4, length)]
        made.append(Sample(f"s-{i:06d}/0", ids, span, "random", "stop", "eval" if i < 8 else "train"))
    write_samples(run.samples, made)
    counts = count_tokens([s.input_ids for s in made], target.vocab_size)
    save_mapping(run.vocab_mapping, build_mapping(counts, [0], config.data.draft_vocab_size), {})
    outputs = {"counts": {"train": samples - 8, "eval": 8}, "vocab_mapping_sha256": sha256_file(run.vocab_mapping)}
    write_manifest(run.samples, "prepare", prepare_inputs(config, target), outputs)


def measure(config: Config, file: Path, processes: int, seconds: float) -> dict[str, Any]:
    """Run `draftsmith train` until the time is up; the clock starts with the first optimizer step."""
    run = RunFolder.of(config)
    launch = ["-m", "torch.distributed.run", f"--nproc-per-node={processes}"] if processes > 1 else []
    command = [sys.executable, *launch, "-m", "draftsmith.core.cli", "train", "--config", str(file)]
    began, first, most, looks = time.monotonic(), None, 0, 0
    process = subprocess.Popen(command, start_new_session=True)
    try:
        while process.poll() is None and (first is None or time.monotonic() - first < seconds):
            if first is None and run.metrics.is_file() and run.metrics.read_text():
                first = time.monotonic()
            if run.spool.is_dir():
                most, looks = max(most, folder_bytes(run.spool)), looks + 1
            time.sleep(0.02)
        code = process.poll()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)  # training saves, and ends with its capture
        process.wait(300)
    rows = [json.loads(line) for line in run.metrics.read_text().splitlines() if line.endswith("}")]
    rows = [r for r in rows if "data_wait_seconds" in r]
    return {
        "seconds_to_first_step": round((first or began) - began, 1),
        "ended_by_itself": code,
        "spool_bytes_seen": most,
        "spool_looks": looks,
        "spool_bytes_bound": config.capture.spool_bytes,
        **steady_state(rows),
    }


def steady_state(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures of the last three quarters of the time; waits as shares of it."""
    start = next(r for r in rows if r["time"] >= rows[0]["time"] + 0.25 * (rows[-1]["time"] - rows[0]["time"]))
    end, later = rows[-1], [r for r in rows if r["step"] > start["step"]]
    span = end["time"] - start["time"]
    return {
        "steps": end["step"],
        "steady_seconds": round(span, 1),
        "tokens_per_second": round(sum(r["tokens_per_second"] for r in later) / len(later), 1),
        "training_waited_share": round((end["data_wait_seconds"] - start["data_wait_seconds"]) / span, 4),
        "capture_waited_share": round((end["capture_wait_seconds"] - start["capture_wait_seconds"]) / span, 4),
        "spool_peak_bytes": end["spool_peak_bytes"],
        "loss": [rows[0]["loss"], end["loss"]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", type=Path, default=Path("runs"))
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--layers", type=int, default=62, help="of minimax-m2.5")
    parser.add_argument("--capture-gpus", default="")
    parser.add_argument("--train-processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--tokens", type=int, nargs=2, default=(512, 2048), help="least and most of a sample")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    gpus, shape = [int(g) for g in args.capture_gpus.split(",") if g], args.target
    wanted = [
        "run.name=spool-bench", f"run.dir={args.folder}", "target.dtype=auto", f"data.max_length={args.tokens[1]}",
        "data.sampling.max_tokens=2", "capture.mode=spool", "capture.spool_bytes=34359738368",
        "capture.probe={min_argmax_agreement: 0.0, transformers_max_bytes: 0}", "train.epochs=1000",
        "train.log_interval=5", "train.eval_interval=1000000", "train.save_interval=1000000",
    ]  # fmt: skip
    if shape == "minimax-m2.5":
        write_m2_5(args.folder / "target", args.layers)
        shape, wanted = str(args.folder / "target"), [*wanted, *DUMMY, "data.draft_vocab_size=32000"]
    if gpus:
        wanted += [f"capture.spool_gpus={gpus}", f"target.tensor_parallel={len(gpus)}"]
    file = args.folder / "spool-bench.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("")
    config = load_config(file, [*wanted, f"target.path={shape}", *args.overrides])
    file.write_text(dump_config(config))
    write_inputs(config, args.samples, tuple(args.tokens))
    found = measure(config, file, args.train_processes, args.seconds)
    settings = {k: v for k, v in vars(args).items() if k not in ("out", "folder")}
    found = {**found, "settings": settings, "versions": package_versions()}
    args.out.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
