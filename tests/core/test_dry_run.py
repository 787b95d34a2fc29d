"""`STAGE --dry-run`: what it refuses, and what it says of a run that is begun."""

import json
import subprocess
import sys

import pytest

from draftsmith.core.lineage import train_inputs
from draftsmith.core.manifest import manifest_hash, write_manifest
from draftsmith.core.run import RunFolder
from draftsmith.eval.stage import eval_inputs
from draftsmith.eval.subject import Subject

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["capture", "--shard", "5/4"], "--shard 5/4: not i/n"),
        (["eval", "--draft", "/nonexistent"], "--draft: /nonexistent is no folder of a draft"),
        (["train", "train.init_from=/nonexistent"], "no folder /nonexistent"),
        (["train", "train.engine=deepspeed", "train.deepspeed_config=/nonexistent"], "there is no /nonexistent"),
    ],
)
def test_a_dry_run_refuses_what_the_run_would(refused, config_file, synthetic_run, arguments, said):
    stage, *rest = arguments
    assert said in refused(stage, "--config", config_file(synthetic_run), "--dry-run", *rest)


def test_a_dry_run_says_what_is_there_and_fits(run_cli, refused, config_file, synthetic_run, make_config):
    def told(stage, *arguments, config=synthetic_run):
        code, out, error = run_cli(stage, "--config", config_file(config), "--dry-run", *arguments)
        assert code == 0, error
        return json.loads(out)["there"], json.loads(out)["does_not_fit"]

    assert told("train") == (["prepare", "capture"], {})
    for stage in ("capture", "train", "eval"):
        message = refused(stage, "--config", config_file(synthetic_run), "--dry-run", "capture.storage=fp8")
        assert 'storage is "bf16" there and "fp8" in the config' in message and "draftsmith capture --config" in message
    for stage, *more in (["prepare"], ["capture", "--fresh"]):
        there, misfits = told(stage, "capture.storage=fp8", *more)
        assert there == ["prepare"] and "storage is" in misfits["capture"]
    for change in ("data.max_length=63", "target.chat_template_kwargs={a: 1}", "run.seed=7"):
        message = refused("prepare", "--config", config_file(synthetic_run), "--dry-run", change)
        assert "was made with other settings" in message and change.split("=")[0].split(".")[1] in message
    assert told("prepare", "--fresh", "data.max_length=63")[0] == ["capture"]
    assert told("train", "train.learning_rate=0.5") == (["prepare", "capture"], {})


def test_a_dry_run_finds_the_settings_of_every_stage(run_cli, refused, config_file, synthetic_run):
    """Their inputs, as the stages record them; the outputs themselves are not looked at."""
    run = RunFolder.of(synthetic_run)
    write_manifest(run.checkpoints, "train", train_inputs(synthetic_run, run), {})
    chosen = synthetic_run.export.model_dump(mode="json", exclude={"license"})
    write_manifest(run.export, "export", {"checkpoint": "step-3", "draft_sha256": "x", "export": chosen}, {})
    subject = Subject(run.export, "step-3", "x", {"export_manifest_sha256": manifest_hash(run.export)}, None)
    write_manifest(run.eval, "eval", eval_inputs(synthetic_run, run, subject), {})
    everything = ["prepare", "capture", "train", "export", "eval"]
    code, out, _ = run_cli("prepare", "--config", config_file(synthetic_run), "--dry-run")
    assert code == 0 and json.loads(out)["there"] == everything
    for change, stage in (
        ("train.learning_rate=0.5", "train"),
        ("data.draft_vocab_size=64", "train"),
        ("export.verify_k=4", "export"),
        ("eval.k=[2]", "eval"),
    ):
        code, out, _ = run_cli("prepare", "--config", config_file(synthetic_run), "--dry-run", change)
        told = json.loads(out)
        assert list(told["does_not_fit"]) == [stage] and told["there"] == [s for s in everything if s != stage]
        message = refused(stage, "--config", config_file(synthetic_run), "--dry-run", change)
        assert change.partition("=")[0].split(".")[1] in message and f"draftsmith {stage} --config" in message


def test_a_dry_eval_of_another_draft_names_it_and_its_report(run_cli, config_file, synthetic_run, tmp_path):
    run, other = RunFolder.of(synthetic_run), tmp_path / "theirs"
    other.mkdir()
    (other / "config.json").write_text("{}")
    for arguments, draft, report in (([], run.export, "eval"), (["--draft", other], other, "eval-theirs")):
        code, out, error = run_cli("eval", "--config", config_file(synthetic_run), "--dry-run", *arguments)
        assert code == 0, error
        told = json.loads(out)
        assert told["draft"] == str(draft) and told["writes"] == [str(run.root / report)]
        models = [e["speculative_config"]["model"] for e in told["served"]["vllm"] if "speculative_config" in e]
        assert models and set(models) == {str(draft)}


def test_torchruns_processes_print_one_dry_run(config_file, synthetic_run):
    launch = [sys.executable, "-m", "draftsmith.train.launch", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, "-m", "draftsmith", "train", "--config", config_file(synthetic_run), "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["stage"] == "train"
