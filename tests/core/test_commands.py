"""Commands in messages name the config that this command was given."""

import json
import shlex

import pytest

from draftsmith.core.commands import with_config
from draftsmith.core.run import RunFolder

pytestmark = pytest.mark.usefixtures("one_thread")
GIVEN = ["train", "--config", "my.yaml"]


@pytest.mark.parametrize(
    ("text", "more", "completed"),
    [
        ("Run `make prepare`.", [], "Run `make prepare CONFIG=my.yaml`."),
        ("`make train ARGS=--fresh`", [], "`make train CONFIG=my.yaml ARGS=--fresh`"),
        ("`make eval ARGS=--fresh`", ["run.name=b"], '`make eval CONFIG=my.yaml ARGS="run.name=b --fresh"`'),
        ("`draftsmith train --fresh`", ["run.name=b"], "`draftsmith train --config my.yaml run.name=b --fresh`"),
        ("`draftsmith capture merge`", ["run.name=b"], "`draftsmith capture merge --config my.yaml`"),
        ("`draftsmith eval`", ["--draft", "d"], "`draftsmith eval --config my.yaml --draft d`"),
        ("`make demo`, `draftsmith export convert A B`", [], "`make demo`, `draftsmith export convert A B`"),
        ("`draftsmith train --config FILE`", [], "`draftsmith train --config FILE`"),
    ],
)  # fmt: skip
def test_a_command_is_completed(text, more, completed):
    assert with_config(text, [*GIVEN, *more]) == completed


@pytest.mark.parametrize("given", [["train", "-c", "a b.yaml"], ["train", "--config=a b.yaml"]])
def test_a_file_with_a_blank_is_quoted(given):
    words = shlex.split(with_config("`make train ARGS=--fresh`", [*given, "data.sources=[{path: x y}]"]).strip("`"))
    assert words[:3] == ["make", "train", "CONFIG=a b.yaml"]
    assert shlex.split(words[3].removeprefix("ARGS=")) == ["data.sources=[{path: x y}]", "--fresh"]


def test_without_a_config_a_message_stays():
    assert with_config("`make train`", ["doctor"]) == "`make train`"


def test_a_refusals_command_works_as_it_stands(run_cli, refused, config_file, trained_run):
    file = config_file(trained_run)
    said = refused("train", "--config", file, "train.learning_rate=0.002")
    assert f'`make train CONFIG={file} ARGS="train.learning_rate=0.002 --fresh"`' in said
    command = said.split("make it again with `draftsmith ")[1].split("`")[0]
    code, out, _ = run_cli(*shlex.split(command))
    assert code == 0 and "draft: 11 steps" in out


def test_a_missing_stage_and_a_dry_run_name_the_file(run_cli, refused, config_file, synthetic_run):
    file = config_file(synthetic_run)
    assert f"`draftsmith train --config {file}`" in refused("export", "--config", file)
    _, out, _ = run_cli("prepare", "--config", file, "--dry-run", "capture.storage=fp8")
    assert f"--config {file} capture.storage=fp8 --fresh`" in json.loads(out)["does_not_fit"]["capture"]


def test_a_summary_names_the_file(run_cli, refused, config_file, trained_run, make_config):
    from draftsmith.core.manifest import write_manifest

    run, file = RunFolder.of(trained_run), config_file(trained_run)
    inputs = {"export": {"checkpoint": "last"}, "weights_sha256": "0"}
    run.export.mkdir()
    (run.export / "config.json").write_text("{}")
    write_manifest(run.export, "export", inputs, {"checkpoint": "step-0000003"})
    code, out, _ = run_cli("summary", "--config", file)
    assert code == 0 and f"the export is of an earlier draft: `make export CONFIG={file} ARGS=--fresh`\n" in out
    assert f"Run `make prepare CONFIG={file} ARGS=run.name=none`" in refused(
        "summary", "--config", file, "run.name=none"
    )
