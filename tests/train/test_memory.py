"""What a plan says that every engine holds of a draft, against what it holds on two processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from draftsmith.core.config import Config
from draftsmith.core.draft_shape import DraftShape
from draftsmith.core.estimate import stated
from draftsmith.core.plan_memory import memory_parts
from draftsmith.core.sizes import draft_parameters

SHAPE = DraftShape(128, 3, 4, 4, 32, 256, 4096, 1024, 1e-6, 4096)  # as held.py's


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "before", "after"),  # gradients are there before a step, and dropped after it; ZeRO-3 keeps their place
    [("ddp", 4, 3), ("fsdp2", 2, 1.5), ("zero1", 3, 2.5), ("zero2", 3, 2.5), ("zero3", 2.5, 2.5)],
)
def test_an_engine_holds_what_the_plan_says(tmp_path, name, before, after):
    options = {"shard": "fsdp2"} if name == "fsdp2" else {}
    if name.startswith("zero"):
        own = {"stage": int(name[4]), "reduce_bucket_size": 1000, "allgather_bucket_size": 1000}
        (tmp_path / "own.json").write_text(json.dumps({"zero_optimization": own}))
        options = {"engine": "deepspeed", "deepspeed_config": str(tmp_path / "own.json")}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script, out = Path(__file__).with_name("held.py"), tmp_path / "held.json"
    done = subprocess.run([*command, script, out, json.dumps(options)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())
    whole = 4 * sum(draft_parameters(SHAPE).values())
    assert found["bytes"] == whole
    assert found["before"] / whole == pytest.approx(before, abs=0.02)
    assert found["after"] / whole == pytest.approx(after, abs=0.02)
    config = Config.model_validate({"train": options})
    planned = memory_parts(config, stated(config, 10**6, 1000, 0.5), SHAPE, 2)["weights and optimizer"]
    assert planned / whole - 0.5 == pytest.approx(before, abs=0.02)  # half: the copy in bfloat16 of a GPU
