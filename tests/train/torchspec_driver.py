"""Stands where TorchSpec's driver does, for tests of starting, following and ending: no training, real processes.

It starts children as Ray does (sessions of their own, so no group holds them), prints the lines that TorchSpec prints,
and writes checkpoints that were laid ready. Commands come from the environment.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from tqdm import tqdm

MODE = os.environ["DRIVER_MODE"]
READY = Path(os.environ["DRIVER_READY"])


def child(depth):
    """A process in a session of its own, which has one too, and hears no SIGTERM and no SIGINT."""
    code = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "depth = int(sys.argv[1])\n"
        "if depth: subprocess.Popen([sys.executable, '-c', sys.argv[2], str(depth - 1), sys.argv[2]], "
        "start_new_session=True)\n"
        "time.sleep(600)\n"
    )
    subprocess.Popen([sys.executable, "-c", code, str(depth), code], start_new_session=True)


def main():
    config = sys.argv[sys.argv.index("--config") + 1]
    import yaml

    tree = yaml.safe_load(Path(config).read_text())
    folder = Path(tree["output_dir"]) / "checkpoints"
    child(1)
    say = lambda text: print(f"[2026-04-01 10:00:00,000] loop.py:1 INFO {text}", file=sys.stderr, flush=True)  # noqa: E731
    if MODE == "tokenises":
        say("Tokenizing dataset (cache will be saved to /cache/x.pt)")
        time.sleep(600)
    for name in ("train", "eval"):
        say(f"Loading dataset from cache: /cache/{name}.pt")
    if MODE != "unloaded":
        say(f"Loaded model from {tree['training']['load_path']}/iter_0000000/model")
    if MODE == "deaf":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if MODE == "no norm":
        say("Failed to load verifier norm: 'model.norm.weight'. last_hidden_states will be used without normalization.")
    if MODE == "stalls":
        time.sleep(600)
    total, start = int(os.environ["DRIVER_TOTAL"]), 0
    tracker = folder / "latest_checkpointed_iteration.txt"
    if not tree["training"]["continual_training"]:
        start = int(tracker.read_text()) - 1
    bar = tqdm(total=total, desc="Training", unit="step", initial=start)
    for step in range(start + 1, total + 1):
        time.sleep(0.05)
        shown = {"loss": f"{9 / step:.3f}", "acc": "0.100", "acc_len": "0.11", "thru": "1.0", "epoch": "1/2"}
        bar.set_postfix(shown, refresh=False)
        bar.update(1)
        scalars = {f"train/ploss_{i}": 3.0 / step for i in range(3)} | {f"train/acc_{i}": 0.1 for i in range(3)}
        scalars |= {"train/lr": 1e-3, "train/grad_norm": float("nan")}
        print("\nDRAFTSMITH " + json.dumps({"step": step, **scalars}), flush=True)
        ready = READY / f"iter_{step + 1:07d}"
        if ready.is_dir():
            shutil.copytree(ready, folder / ready.name)
            tracker.write_text(str(step + 1))
            say(f"Step {step} eval: loss=4.1000, acc=0.1200, sim_acc_len=0.13")
            say(f"Saved checkpoint to {folder / ready.name}")
        if MODE == "dies" and step == 5:
            raise RuntimeError("Inference engine failed: out of memory")
        if MODE in ("waits", "deaf") and step == 5:
            time.sleep(600)
    bar.close()
    say(f"Training completed: {total} steps in 1.0s | avg inference=1.0 entries/s | avg training=1.0 entries/s")
    if MODE == "hangs at the end":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        time.sleep(600)


main()
