"""The benchmarks still fit the code that they measure: they import, and training on a CPU takes a step."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# They import the peers that they measure.
PEERS = {"peers.py", "peer_speculators.py", "peer_specforge.py", "speculators_baseline.py", "store_dataset.py"}
IMPORT_ALL = """
import importlib.util, pathlib, sys
for path in map(pathlib.Path, sys.argv[1:]):
    sys.path[:] = [str(path.parent), *sys.path]
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise SystemExit(f"{path}: {error!r}")
    sys.path.pop(0)
"""


@pytest.mark.slow
def test_every_script_imports():
    scripts = sorted(str(p) for p in BENCHMARKS.rglob("*.py") if p.name not in PEERS)
    assert len(scripts) > 15
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL, *scripts], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_training_on_a_cpu_is_measured():
    command = [sys.executable, str(BENCHMARKS / "training" / "cpu.py"), "--threads", "1", "--steps", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1])["tokens_per_cpu_second"] > 0
