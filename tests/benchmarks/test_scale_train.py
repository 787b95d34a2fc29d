"""The benchmark of training on several GPUs, on CPU processes: every engine takes the same steps."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "scale" / "train.py"


@pytest.mark.slow
def test_every_cell_is_measured_and_every_engine_takes_ddps_steps(tmp_path):
    out = tmp_path / "found.json"
    command = [sys.executable, str(SCRIPT), "--out", str(out), "--shape", "tiny", "--tokens", "64", "--ttt", "3"]
    command += ["--processes", "1", "2", "--engines", "ddp", "fsdp2", "zero3", "--warmup", "1", "--steps", "3"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "--seconds", "500"], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(out.read_text())
    assert not found["left_out"] and len(found["cells"]) == 6
    for cell in found["cells"]:
        assert "failed" not in cell, cell["said"]
        assert len(cell["ranks"]) == cell["processes"] and cell["speedup"] > 0 and cell["peak_gb"] > 0
        plain = next(c for c in found["cells"] if c["processes"] == cell["processes"] and c["engine"] == "ddp")
        for key in ("losses", "grad_norms"):
            here, there = cell["ranks"][0][key], plain["ranks"][0][key]
            assert len(here) == 4 and here == pytest.approx(there, rel=2e-3), (cell["engine"], key)


@pytest.mark.slow
def test_a_cell_that_fails_is_told_and_one_without_time_is_left_out(tmp_path):
    out = tmp_path / "found.json"
    command = [sys.executable, str(SCRIPT), "--out", str(out), "--shape", "tiny", "--engines", "ddp", "fsdp2"]
    command += ["--kernels", "fused", "--seconds", "31"]  # fused needs a GPU; a cell has thirty seconds at least
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    found = json.loads(out.read_text())
    assert done.returncode == 0 and found["left_out"] == [[1, "fsdp2"]]
    assert found["cells"][0]["failed"] == "exit 1" and "there is no GPU here" in found["cells"][0]["said"]
