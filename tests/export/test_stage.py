"""The export stage: which checkpoint, proven or kept apart, and its card."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.core.checkpoint import chosen_checkpoint, final_checkpoint, read_checkpoint
from draftsmith.core.draft_folder import read_draft_folder
from draftsmith.core.errors import StageFailed, UserError
from draftsmith.core.run import RunFolder
from draftsmith.core.target import resolve_target
from draftsmith.export.licence import target_licence
from draftsmith.export.stage import export

pytestmark = pytest.mark.usefixtures("one_thread")


def test_an_export_is_proven_and_is_the_final_checkpoint(trained_run):
    export(trained_run)
    run = RunFolder.of(trained_run)
    draft, checkpoint = read_draft_folder(run.export), read_checkpoint(final_checkpoint(run, "test"))
    assert draft.shape == checkpoint.shape and draft.layer_ids == [3, 4, 5]
    assert torch.equal(draft.tensors["fc.weight"], checkpoint.tensors["fc.weight"].bfloat16().float())
    proof = json.loads((run.export / "verification.json").read_text())
    assert proof["passed"] is True and proof["problems"] == []
    assert proof["served"] == "not run: export.verify is offline"
    contract, logits = proof["checks"]
    assert (contract["name"], contract["passed"]) == ("contract", True)
    assert 0 < logits["measured"]["relative_error"] < logits["bound"]["relative_error"] == 0.02
    assert logits["measured"]["rows"] > 0
    manifest = json.loads((run.export / "manifest.json").read_text())
    assert manifest["checkpoint"] == "step-0000011"
    assert sorted(p.name for p in run.export.iterdir()) == [
        "README.md", "config.json", "manifest.json", "model.safetensors", "verification.json",
    ]  # fmt: skip


def test_a_finished_export_is_left_alone(trained_run, tree_of):
    export(trained_run)
    before = tree_of(RunFolder.of(trained_run).root)
    export(trained_run)
    assert tree_of(RunFolder.of(trained_run).root) == before


def test_an_export_of_another_training_is_refused(trained_run, changed):
    export(trained_run)
    run = RunFolder.of(trained_run)
    tensors = load_file(run.checkpoints / "step-0000011/draft.safetensors")
    tensors["fc.weight"] += 1
    save_file(tensors, run.checkpoints / "step-0000011/draft.safetensors")
    with pytest.raises(UserError, match=r"the checkpoint's weights are others .* or make .*export --fresh"):
        export(trained_run)


def test_an_export_that_is_off_fails_and_leaves_no_folder(trained_run, changed):
    with pytest.raises(StageFailed, match=r"reloaded logits are off by .*export\.max_logit_error"):
        export(changed(trained_run, export={"max_logit_error": 1e-9}))
    run = RunFolder.of(trained_run)
    assert not run.export.exists() and not list(run.root.glob(".tmp*"))
    failed = run.root / "export-failed"
    assert json.loads((failed / "verification.json").read_text())["passed"] is False
    assert read_draft_folder(failed).layer_ids == [3, 4, 5]  # kept whole, to be looked at
    assert "A check failed: do not serve" in (failed / "README.md").read_text()
    export(trained_run)
    assert run.export.is_dir() and not failed.exists()


def test_a_fresh_export_that_fails_leaves_the_old_one(trained_run, changed, tree_of):
    export(trained_run)
    run = RunFolder.of(trained_run)
    before = tree_of(run.export)
    with pytest.raises(StageFailed):
        export(changed(trained_run, export={"max_logit_error": 1e-9}), fresh=True)
    assert tree_of(run.export) == before


def test_an_incomplete_checkpoint_fails_by_name_and_leaves_no_folder(trained_run):
    file = RunFolder.of(trained_run).checkpoints / "step-0000011/draft.safetensors"
    tensors = load_file(file)
    del tensors["midlayer.hidden_norm.weight"]
    save_file(tensors, file)
    with pytest.raises(StageFailed, match=r"missing tensor midlayer\.hidden_norm\.weight"):
        export(trained_run)
    assert not RunFolder.of(trained_run).export.exists()


def test_an_unfinished_training_is_not_exported(trained_run):
    state = RunFolder.of(trained_run).checkpoints / "step-0000011/state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "step": 7}))
    with pytest.raises(UserError, match=r"training stopped at step 7 of 11.*Run `draftsmith train` again"):
        export(trained_run)


def test_the_card_says_how_to_serve_and_what_the_draft_is(trained_run, changed):
    export(trained_run)
    card = (RunFolder.of(trained_run).export / "README.md").read_text()
    assert '"num_speculative_tokens": 1' in card and "after layers 3, 4, 5" in card
    assert "not compared on a server (not run: export.verify is offline)" in card
    assert "| contract | passed |" in card and "20 samples for training and 4 held out" in card
    assert "Acceptance" not in card  # nothing has been measured yet


def test_the_card_shows_what_was_served_with_a_plot(trained_run):
    export(trained_run)
    run = RunFolder.of(trained_run)
    row = {
        "set": "a|b", "k": 3, "temperature": 0.0, "concurrency": 8, "acceptance_length": 1.5, "tokens_per_second": 99.6,
        "baseline_tokens_per_second": 50.0, "per_position": [0.3, 0.15, 0.05],
    }  # fmt: skip
    weights = json.loads((run.export / "manifest.json").read_text())["weights_sha256"]
    run.eval.mkdir()
    report = {"served": [row], "replay": [], "settings": {"export_weights_sha256": weights}}
    (run.eval / "report.json").write_text(json.dumps(report))
    export(trained_run)
    card = (run.export / "README.md").read_text()
    assert "| a&#124;b | 3 | 0.0 | 8 | 1.500 | 100 | 50 |" in card and "](acceptance.png)" in card
    assert (run.export / "acceptance.png").read_bytes().startswith(b"\x89PNG")
    report["settings"]["export_weights_sha256"] = "of another draft"
    (run.eval / "report.json").write_text(json.dumps(report))
    export(trained_run)
    assert "a&#124;b" not in (run.export / "README.md").read_text()


@pytest.mark.parametrize(
    ("head", "licence"),
    [("---\nlicense: mit\n---\n# x", "mit"), ("# x", None), ("---\nlicense: [\n---", None), ("---\na: 1\n---\n", None)],
)
def test_the_targets_licence_is_the_cards(make_config, tmp_path, tiny_target, head, licence):
    shutil.copytree(tiny_target, tmp_path / "target")
    (tmp_path / "target/README.md").write_text(head)
    assert target_licence(resolve_target(make_config(target={"path": str(tmp_path / "target")}).target)) == licence


# ---- which checkpoint ------------------------------------------------------------------------------------------------


def test_a_named_checkpoint_is_exported(trained_run, changed):
    run = RunFolder.of(trained_run)
    for which in ("step-8", "step-0000008", "8", str(run.checkpoints / "step-0000008")):
        export(changed(trained_run, export={"checkpoint": which}), fresh=True)
        assert json.loads((run.export / "manifest.json").read_text())["checkpoint"] == "step-0000008"
    with pytest.raises(UserError, match=r"step-0000099 is no complete checkpoint.*step-0000008, step-0000011"):
        export(changed(trained_run, export={"checkpoint": "step-99"}))


def test_the_best_checkpoint_is_the_one_that_training_named(trained_run, changed):
    run = RunFolder.of(trained_run)
    best = json.loads((run.checkpoints / "best.json").read_text())["checkpoint"]
    export(changed(trained_run, export={"checkpoint": "best"}))
    assert json.loads((run.export / "manifest.json").read_text())["checkpoint"] == best
    (run.checkpoints / "best.json").write_text('{"checkpoint": "step-0000077"}')
    with pytest.raises(UserError, match=r"step-0000077 is no complete checkpoint"):
        chosen_checkpoint(run, "best", "export")
    (run.checkpoints / "best.json").unlink()
    with pytest.raises(UserError, match=r"evaluated no checkpoint on held-out samples.*step-0000011"):
        chosen_checkpoint(run, "best", "export")


def test_a_target_with_code_of_its_own_is_named_and_not_run(make_config, tmp_path, tiny_target):
    folder = tmp_path / "remote"
    shutil.copytree(tiny_target, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}})
    )
    (folder / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(UserError, match=rf"{folder} asks to run code of its own.*target\.trust_remote_code=true"):
        resolve_target(make_config(target={"path": str(folder)}).target)
    assert not (tmp_path / "ran").exists()


def test_an_export_for_sglang_is_not_served_on_vllm(trained_run, changed):
    from draftsmith.eval.stage import evaluate

    config = changed(trained_run, export={"layer_id_convention": "sglang"})
    export(config)
    folder = RunFolder.of(config).export
    assert read_draft_folder(folder).layer_ids == [3, 4, 5]
    with pytest.raises(UserError, match=r"its layer ids are sglang's.*other layers.*export convert"):
        evaluate(config)
