"""Real engines killed at random moments of a capture until enough have been; then the store is checked.

    python benchmarks/capture/kills.py --kills 50 --scratch /tmp/draftsmith-kills

A tiny random Llama, float32; every capture is a process of its own, killed before or after its first shards, while
it starts, writes, seals or finishes. A finished store is compared with one that nobody killed, and the next is begun.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.core.manifest import write_manifest
from draftsmith.core.samples import Sample, write_samples
from draftsmith.hidden_state_capture.reader import HiddenStateStore

STAGE = (
    "import sys; from draftsmith.core.config_io import load_config\n"
    "from draftsmith.hidden_state_capture.stage import capture\n"
    "capture(load_config(sys.argv[1]))"
)


def make_target(folder: Path) -> None:
    config = LlamaConfig(
        num_hidden_layers=6, hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, vocab_size=512, max_position_embeddings=512, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=1, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.lm_head.weight.data *= 10
    model.save_pretrained(folder)


def prepare(scratch: Path, name: str, count: int) -> Path:
    """A run of `count` samples, the same for every name; its config file."""
    draw = random.Random(0)
    lengths = [draw.randrange(20, 200) for _ in range(count)]
    samples = [
        Sample(f"s{i:03d}", [draw.randrange(2, 512) for _ in range(n)], [(n // 2, n)], "random", "stop", "train")
        for i, n in enumerate(lengths)
    ]
    (scratch / name / "samples").mkdir(parents=True)
    write_samples(scratch / name / "samples", samples)
    write_manifest(scratch / name / "samples", "prepare", {}, {})
    sections = {
        "run": {"name": name, "dir": str(scratch)},
        "target": {"path": str(scratch / "tiny"), "dtype": "float32", "engine_args": {"skip_tokenizer_init": True}},
        "data": {"max_length": 256, "sampling": {"max_tokens": 16}},
        # Prompts one by one: the sums of a batch depend on what else is in it, and bytes are compared.
        "capture": {"shard_bytes": 100_000, "max_num_seqs": 1},
    }
    file = scratch / f"{name}.yaml"
    file.write_text(json.dumps(sections))
    return file


def capture(file: Path, seconds: float | None) -> tuple[bool, float]:
    """Run it, and kill it after so many seconds; whether it was killed, and what it took."""
    begin = time.monotonic()
    said = file.with_suffix(".log")
    with said.open("wb") as log:
        process = subprocess.Popen([sys.executable, "-c", STAGE, str(file)], stdout=log, stderr=log)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            time.sleep(1.5)  # its engine notices, and ends too
    if process.returncode not in (0, -signal.SIGKILL):
        print(said.read_text(errors="replace")[-3000:])
        raise SystemExit(f"a capture failed with {process.returncode}; run it by hand: {file}")
    return process.returncode != 0, time.monotonic() - begin


def hashes(run: Path) -> dict[str, str]:
    store = HiddenStateStore(run / "hidden_states")
    found = {row["sample_id"]: row["sha256"] for row in store.index}
    assert len(found) == len(store.index), "a sample is there twice"
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--samples", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scratch", type=Path, required=True)
    args = parser.parse_args()
    shutil.rmtree(args.scratch, ignore_errors=True)
    args.scratch.mkdir(parents=True)
    make_target(args.scratch / "tiny")
    draw = random.Random(args.seed)
    _, whole = capture(prepare(args.scratch, "whole", args.samples), None)
    expected = hashes(args.scratch / "whole")
    print(f"uninterrupted: {len(expected)} samples in {whole:.1f} s", flush=True)
    killed = stores = with_shards = 0
    while killed < args.kills:
        name = f"killed-{stores}"
        file = args.scratch / f"{name}.yaml"
        if not file.exists():
            prepare(args.scratch, name, args.samples)
        was_killed, _ = capture(file, draw.uniform(0.3 * whole, 1.05 * whole))
        killed += was_killed
        shards = len(list((args.scratch / name / "hidden_states").glob("shard-*.json")))
        with_shards += was_killed and shards > 0
        print(f"{name}: killed {killed}, {shards} shards are whole", flush=True)
        if not was_killed:
            assert hashes(args.scratch / name) == expected
            stores += 1
    capture(file, None)
    assert hashes(args.scratch / name) == expected
    print(json.dumps({"kills": killed, "with_shards_on_disk": with_shards, "stores": stores + 1, "equal": True}))


if __name__ == "__main__":
    main()
