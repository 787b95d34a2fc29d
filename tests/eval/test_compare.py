"""Drafts compared offline: the same samples, paired intervals, drafts that cannot be replayed or do not fit."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from draftsmith.core.cli import app
from draftsmith.core.config_io import dump_config
from draftsmith.core.errors import UserError
from draftsmith.core.lineage import earlier_draft
from draftsmith.core.run import RunFolder
from draftsmith.eval.compare import compare
from draftsmith.export.stage import export

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def drafts(trained_run, tmp_path):
    """`drafts(name, tensors={}, config={})`: a folder like the run's export, with other tensors or config keys."""
    export(trained_run)

    def make(name, tensors=None, **config):
        folder = tmp_path / name
        shutil.copytree(RunFolder.of(trained_run).export, folder)
        weights = load_file(folder / "model.safetensors")
        save_file({**weights, **{k: f(weights[k]) for k, f in (tensors or {}).items()}}, folder / "model.safetensors")
        written = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**written, **config}))
        return folder

    return make


def rows_of(config, folders, tmp_path):
    out = tmp_path / "compared.json"
    compare(config, folders, served=False, out=out)
    result = json.loads(out.read_text())
    assert out.with_suffix(".md").read_text().count("| replay |") == len(result["rows"])
    return result


def test_a_draft_beside_itself_differs_by_nothing(trained_run, drafts, tmp_path):
    result = rows_of(trained_run, [drafts("one"), drafts("two")], tmp_path)
    second = [r for r in result["rows"] if r["draft"] == "two"]
    assert result["base"] == "one" and len(second) == 7
    for row in second:
        assert (row["difference"], row["difference_ci95"], row["better"]) == (0.0, [0.0, 0.0], None)


def test_another_draft_has_its_own_figures_and_a_paired_difference(trained_run, drafts, tmp_path):
    folders = [drafts("one"), drafts("constant", {"lm_head.weight": lambda w: w * 0})]
    result = rows_of(trained_run, folders, tmp_path)
    by_draft = {(r["draft"], r["k"]): r for r in result["rows"]}
    for k in range(1, 8):
        one, other = by_draft["one", k], by_draft["constant", k]
        assert other["difference"] == pytest.approx(other["acceptance_length"] - one["acceptance_length"])
        low, high = other["difference_ci95"]
        assert low <= high and other["better"] == (True if low > 0 else False if high < 0 else None)
        assert one["difference"] is None
    hashes = [d["weights_sha256"]["model.safetensors"] for d in result["drafts"]]
    assert hashes[0] != hashes[1]


def test_a_draft_of_other_layers_is_not_replayed(trained_run, drafts, tmp_path, capsys):
    folders = [drafts("one"), drafts("other", eagle_aux_hidden_state_layer_ids=[1, 2, 3])]
    with pytest.raises(UserError, match="fewer than two of the drafts read the captured layers"):
        compare(trained_run, folders, served=False, out=tmp_path / "out.json")
    assert "other reads layers [1, 2], which were not captured" in capsys.readouterr().out


@pytest.mark.parametrize("count", [0, 1])
def test_one_draft_alone_is_refused(trained_run, drafts, tmp_path, count):
    with pytest.raises(UserError, match="Name two folders or more"):
        compare(trained_run, [drafts("one")][:count], served=False, out=tmp_path / "out.json")


def test_a_folder_that_is_no_draft_is_named(trained_run, drafts, tmp_path):
    with pytest.raises(UserError, match="nothing: no"):
        compare(trained_run, [drafts("one"), tmp_path / "nothing"], served=False, out=tmp_path / "out.json")


def test_the_command_takes_folders_and_the_stage_still_takes_overrides(trained_run, drafts, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(dump_config(trained_run))
    folders = [str(drafts("one")), str(drafts("two"))]
    out = tmp_path / "out.json"
    done = CliRunner().invoke(app, ["eval", "compare", *folders, "-c", str(config), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert json.loads(out.read_text())["base"] == "one"
    shown = CliRunner().invoke(app, ["eval", "--help"]).output
    assert "compare" in shown and "diagnose" in shown and "eval --config FILE" in shown
    refused = CliRunner().invoke(app, ["eval", "--config", str(config), "eval.kk=[3]"])
    assert isinstance(refused.exception, UserError) and "eval.kk" in str(refused.exception)


def test_an_export_of_an_earlier_draft_is_compared_with_a_warning(trained_run, drafts, tmp_path, capsys):
    other, run = drafts("old"), RunFolder.of(trained_run)
    rows_of(trained_run, [other, run.export], tmp_path)
    assert "warning" not in capsys.readouterr().out
    weights = run.complete_checkpoints()[-1] / "draft.safetensors"
    save_file({k: v + 1 for k, v in load_file(weights).items()}, weights)  # trained anew, to the same step
    rows_of(trained_run, [other, run.export], tmp_path)
    said = " ".join(capsys.readouterr().out.split())
    assert f"warning: {run.export} is of an earlier draft (it is of an earlier training's step-0000011)" in said
    assert said.count("warning") == 1 and "`draftsmith export --fresh` exports" in said


def test_an_export_is_of_an_earlier_draft_where_training_went_on(trained_run, drafts):
    drafts("one")
    run = RunFolder.of(trained_run)
    assert earlier_draft(run.export) is None
    shutil.copytree(run.checkpoints / "step-0000011", run.checkpoints / "step-0000022")
    assert earlier_draft(run.export) == "it is of step-0000011, and the run has step-0000022 by now"
