"""`draftsmith plan` as a command: what it prints, its exit codes, and numbers that it refuses."""

import json
import subprocess
import sys

import pytest
import yaml
from typer.testing import CliRunner

from draftsmith.core.cli import app
from draftsmith.core.errors import UserError
from draftsmith.core.estimate import stated
from draftsmith.core.plan import make_plan
from draftsmith.core.plan_hours import Rates

H200 = Rates(gpus=1, gpu_bytes=141e9)


def write(config, tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return str(path)


def test_the_command_prints_and_exits_by_what_fits(minimax, roomy, tmp_path):
    file = write(minimax(), tmp_path)
    args = ["plan", "-c", file, "--tokens", "1000000", "--gpu-memory", "141"]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0 and "all of it fits" in done.stdout and "343.7 M" in done.stdout
    roomy(free=1e6)
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 1 and "does not fit" in done.stdout
    brief = CliRunner().invoke(app, [*args, "--brief"])
    assert brief.exit_code == 1 and "does not fit" not in brief.stdout
    assert brief.stderr.startswith("does not fit here: ") and "are free" in brief.stderr
    made = json.loads(CliRunner().invoke(app, [*args, "--json"]).stdout)
    assert made["amount"]["tokens"] == 10**6 and len(made["problems"]) == 1


def test_a_plan_loads_neither_torch_nor_transformers(minimax, tmp_path):
    file = write(minimax(), tmp_path)
    code = (
        "import sys; sys.modules.update(torch=None, transformers=None, vllm=None)\n"
        "from draftsmith.core.cli import app\n"
        f"app(['plan', '-c', {file!r}, '--tokens', '1000', '--gpu-memory', '400', '--json'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["problems"] == []


@pytest.mark.parametrize("text", ["{}", "not json"])
def test_a_target_without_a_config_is_named(minimax, roomy, tmp_path, text):
    config = minimax()
    (tmp_path / "MiniMax-M2.5" / "config.json").write_text(text)
    with pytest.raises(UserError, match="not the config of a causal language model"):
        make_plan(config, stated(config, 10, 10, 0.5), H200)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        *((option, value, "is not a finite number")
          for option in ("--length", "--capture-rate", "--train-rate", "--reply-rate", "--gpu-memory")
          for value in ("inf", "1e400")),
        *((option, value, "greater than or equal to 1")
          for option in ("--length", "--gpus", "--tokens", "--train-rate", "--gpu-memory") for value in ("0", "-3")),
        *(("--length", value, "greater than or equal to 1") for value in ("nan", "-inf")),
        ("--supervised", "nan", "less than or equal to 1"),
        ("--supervised", "1.5", "than or equal to 1"),
        ("--max-hours", "nan", "greater than or equal to 0"),
        ("--length", "8193", "--length is 8,193, and no sample is longer than data.max_length (8,192)"),
    ],
)  # fmt: skip
def test_a_number_that_means_nothing_is_refused(minimax, roomy, tmp_path, option, value, said):
    args = ["plan", "-c", write(minimax(), tmp_path), "--tokens", "1000000", option, value]
    done = CliRunner().invoke(app, args)
    told = str(done.exception) if isinstance(done.exception, UserError) else done.output.replace("│", " ")
    assert done.exit_code and said in " ".join(told.split())


def test_a_stated_run_has_samples_as_short_as_the_config_lets_them_be(minimax, roomy, tmp_path):
    file = write(minimax(data={"max_length": 500, "sampling": {"max_tokens": 100}}), tmp_path)
    made = json.loads(CliRunner().invoke(app, ["plan", "-c", file, "--tokens", "1000000", "--json"]).stdout)
    assert made["amount"]["samples"] == 2000
