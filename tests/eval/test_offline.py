"""What the store alone tells: replay of the export, the objective of the checkpoint, and what the report depends on."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from draftsmith.core.checkpoint import final_checkpoint, read_checkpoint
from draftsmith.core.draft_folder import read_draft_folder
from draftsmith.core.errors import UserError
from draftsmith.core.replay import SampleRounds, tally
from draftsmith.core.run import RunFolder
from draftsmith.core.target import resolve_target
from draftsmith.eval.offline import HeldOut, objective_figures, replay
from draftsmith.eval.replay_rows import replay_rows, source_rows
from draftsmith.eval.stage import eval_inputs, evaluate
from draftsmith.eval.subject import own_draft
from draftsmith.export.stage import export
from draftsmith.hidden_state_capture.reader import HiddenStateStore

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def exported(trained_run):
    export(trained_run)
    return trained_run


def batches_of(config, tokens):
    return HeldOut(HiddenStateStore(RunFolder.of(config).hidden_states), tokens)


def replayed(config, tokens=64, draft=None):
    draft = draft or read_draft_folder(RunFolder.of(config).export)
    return replay(config, resolve_target(config.target), draft, "rms", batches_of(config, tokens))


def test_only_held_out_samples_are_replayed(exported, synthetic_samples):
    found = replayed(exported)
    assert sorted(found.sample_ids) == sorted(s.sample_id for s in synthetic_samples if s.split == "eval")
    rows = replay_rows(exported, found)
    assert [(r["k"], r["samples"], r["exact"]) for r in rows] == [(k, 4, True) for k in range(1, 8)]


def test_the_rounds_walk_every_reply_to_its_end(exported, synthetic_samples):
    lengths = {s.sample_id: s.loss_spans[0][1] - s.loss_spans[0][0] for s in synthetic_samples}
    found = replayed(exported)
    for (k, _), table in found.tables.items():
        for sample_id, (rounds, *accepted) in zip(found.sample_ids, table, strict=True):
            assert accepted == sorted(accepted, reverse=True) and len(accepted) == k and accepted[0] <= rounds
            # The first token comes from the prefill; every round then emits its accepted tokens and one more. A last
            # token alone needs no draft.
            assert lengths[sample_id] - rounds - sum(accepted) in (1, 2)


def test_the_figures_follow_from_the_rounds(exported):
    found = replayed(exported)
    for row in replay_rows(exported, found):
        rounds, *accepted = found.tables[row["k"], 0.0].sum(0)
        assert row["rounds"] == rounds and isinstance(row["rounds"], int)
        assert row["acceptance_length"] == pytest.approx(1 + sum(accepted) / rounds)
        assert sum(row["per_position"]) == pytest.approx(row["acceptance_length"] - 1)
        assert row["ci95"][0] <= row["acceptance_length"] <= row["ci95"][1]


def test_a_reply_outside_the_drafts_vocabulary_is_all_misses(exported, synthetic_samples):
    """E4: every token of the reply counts; those that the draft cannot propose are misses and not left out."""
    draft = read_draft_folder(RunFolder.of(exported).export)
    sample = next(s for s in synthetic_samples if s.split == "eval")
    reply = set(sample.input_ids[slice(*sample.loss_spans[0])])
    outside = [i for i in range(512) if i not in reply][: len(draft.target_ids)]
    without = replace(draft, target_ids=torch.tensor(outside))
    found = replayed(exported, draft=without)
    rounds, *accepted = found.tables[3, 0.0][found.sample_ids.index(sample.sample_id)]
    start, end = sample.loss_spans[0]
    assert accepted == [0, 0, 0] and rounds == end - start - 1
    figures = objective_figures(
        resolve_target(exported.target),
        read_checkpoint(final_checkpoint(RunFolder.of(exported), "test")),
        batches_of(exported, 64),
        10**6,
    )
    assert figures["supervised_rows_per_step"][0] == sum(
        b - a - 1 for s in synthetic_samples if s.split == "eval" for a, b in s.loss_spans
    )


def test_sources_are_told_apart_and_add_up(exported, synthetic_samples):
    found = replayed(exported)
    sources = {i: "ab"[n % 2] for n, i in enumerate(found.sample_ids)}
    rows = source_rows(exported, found, sources)
    whole = {r["k"]: r for r in replay_rows(exported, found)}
    assert [r["source"] for r in rows] == ["a"] * 7 + ["b"] * 7
    for k, row in whole.items():
        parts = [r for r in rows if r["k"] == k]
        assert sum(r["rounds"] for r in parts) == row["rounds"] and sum(r["samples"] for r in parts) == row["samples"]


def rounds_of_a_constant_guess(reply, guess, k):
    """Drafts accepted in every round of a server whose draft always proposes `guess`."""
    accepted, at = [], 1  # the prefill gives the reply's first token
    while at < len(reply):
        accepted.append(next((n for n in range(k) if reply[at + n : at + n + 1] != [guess]), k))
        at += accepted[-1] + 1
    return accepted


def test_a_draft_that_always_guesses_one_token_is_accepted_where_that_token_stands(exported, synthetic_samples):
    draft = read_draft_folder(RunFolder.of(exported).export)
    draft.tensors["lm_head.weight"].zero_()  # argmax is the first: target id 0
    replies = {s.sample_id: s.input_ids[slice(*s.loss_spans[0])] for s in synthetic_samples if s.split == "eval"}
    found = replayed(exported, draft=draft)
    for k in range(1, 8):
        wanted = [SampleRounds(i, rounds_of_a_constant_guess(replies[i], 0, k)) for i in found.sample_ids]
        assert found.tables[k, 0.0].tolist() == tally(wanted, k).tolist()
        assert sum(sum(r.accepted) for r in wanted)


@pytest.mark.parametrize("tokens", [1, 1000])
def test_packing_changes_neither_replay_nor_objective(exported, tokens):
    assert replay_rows(exported, replayed(exported, tokens)) == replay_rows(exported, replayed(exported))
    checkpoint = read_checkpoint(final_checkpoint(RunFolder.of(exported), "test"))
    target = resolve_target(exported.target)
    one, other = (objective_figures(target, checkpoint, batches_of(exported, t), 10**6) for t in (64, tokens))
    assert one["supervised_rows_per_step"] == other["supervised_rows_per_step"]
    assert one["loss_per_step"] == pytest.approx(other["loss_per_step"], rel=1e-5)


def test_the_objective_counts_the_rows_of_the_alignment(exported, synthetic_samples):
    checkpoint = read_checkpoint(final_checkpoint(RunFolder.of(exported), "test"))
    figures = objective_figures(resolve_target(exported.target), checkpoint, batches_of(exported, 64), 10**6)
    replies = [b - a for s in synthetic_samples if s.split == "eval" for a, b in s.loss_spans]
    # At step j the row needs j + 1 reply tokens after it: a reply of n tokens has n - j such rows.
    assert figures["supervised_rows_per_step"] == [sum(n - j for n in replies) for j in (1, 2, 3)]
    assert figures["checkpoint"] == "step-0000011" and figures["loss"] == "soft_ce"


def test_sampled_replies_are_marked_as_an_estimate(exported, changed):
    config = changed(exported, data={"sampling": {"temperature": 1.0, "max_tokens": 16}})
    rows = replay_rows(config, replayed(config))
    assert not any(row["exact"] for row in rows) and {row["method"] for row in rows} == {"sampled"}


def test_other_temperatures_are_expectations_beside_the_exact_rows(exported, changed):
    config = changed(exported, eval={"temperature": [0.0, 0.5, 1.0]})
    rows = replay_rows(config, replayed(config))
    exact = [r for r in rows if r["temperature"] == 0.0]
    assert exact == replay_rows(exported, replayed(exported))
    assert [(r["temperature"], r["method"]) for r in rows if r["k"] == 7] == [
        (0.0, "exact"), (0.5, "expected"), (1.0, "expected"),
    ]  # fmt: skip
    for row in rows:
        assert 1.0 <= row["acceptance_length"] <= 1.0 + row["k"]


def test_a_draft_that_samples_cannot_be_walked_by_the_replies_tokens(exported, changed):
    sampling = {"temperature": 1.0, "max_tokens": 16}
    config = changed(exported, data={"sampling": sampling}, eval={"draft_sampling": "probabilistic"})
    assert {row["method"] for row in replay_rows(config, replayed(config))} == {"expected"}


# ---- what the report depends on --------------------------------------------------------------------------------------


@pytest.fixture
def with_set(exported, changed, tmp_path):
    def make(text):
        path = tmp_path / "my set.jsonl"
        path.write_text(text)
        return changed(exported, eval={"sets": [str(path)]})

    return make


@pytest.mark.parametrize("text", ["{", ""])
def test_a_set_that_cannot_be_served_is_refused_before_anything_is_written(with_set, tree_of, text):
    config = with_set(text)
    before = tree_of(RunFolder.of(config).root)
    with pytest.raises(UserError):
        evaluate(config)
    assert tree_of(RunFolder.of(config).root) == before


def test_a_changed_set_makes_another_report(with_set):
    config = with_set('{"prompt": "a"}')
    run = RunFolder.of(config)
    draft = own_draft(config, run)
    before = eval_inputs(config, run, draft)
    assert eval_inputs(with_set('{"prompt": "a"}'), run, draft) == before
    assert eval_inputs(with_set('{"prompt": "b"}'), run, draft) != before


@pytest.mark.parametrize("change", [{"eval": {"k": [2]}}, {"eval": {"concurrency": [2]}}, {"run": {"seed": 1}}])
def test_a_changed_setting_makes_another_report(exported, changed, change):
    run = RunFolder.of(exported)
    draft = own_draft(exported, run)
    assert eval_inputs(changed(exported, **change), run, draft) != eval_inputs(exported, run, draft)


@pytest.mark.parametrize("change", [{"data": {"max_length": 32}}, {"target": {"dtype": "float32"}}], ids=str)
def test_a_config_that_the_samples_were_not_made_with_is_refused(exported, changed, monkeypatch, change):
    def start(*args):
        raise AssertionError("the engine was started")

    monkeypatch.setattr("draftsmith.eval.stage.serve", start)
    with pytest.raises(UserError):
        evaluate(changed(exported, **change))


def test_an_export_of_an_earlier_training_is_refused(exported):
    run = RunFolder.of(exported)
    (run.checkpoints / "step-0000011").rename(run.checkpoints / "step-0000012")
    with pytest.raises(UserError, match=r"holds step-0000011, and export\.checkpoint is step-0000012"):
        evaluate(exported)


# ---- another draft than the run's ------------------------------------------------------------------------------------


@pytest.fixture
def nothing_served(monkeypatch):
    """Replay alone: engines are tests/pipeline's."""
    monkeypatch.setattr("draftsmith.eval.stage.serve", lambda *_: [])


def test_another_draft_is_replayed_as_in_its_own_run_and_the_runs_report_stays(
    exported, nothing_served, tmp_path, capsys
):
    run = RunFolder.of(exported)
    evaluate(exported)
    own = (run.eval / "report.json").read_bytes()
    other = tmp_path / "m2-5" / "export"
    shutil.copytree(run.export, other, ignore=shutil.ignore_patterns("manifest.json"))  # of somebody else
    shutil.rmtree(run.checkpoints)  # this run need not be trained
    shutil.rmtree(run.export)
    evaluate(exported, other)
    report = json.loads((run.root / "eval-m2-5" / "report.json").read_text())
    assert report["replay"] == json.loads(own)["replay"] and report["objective"] is None
    assert report["settings"]["checkpoint"] == str(other)
    assert (run.eval / "report.json").read_bytes() == own
    evaluate(exported, other)
    assert "eval-m2-5/report.html (already there)" in capsys.readouterr().out


def test_a_draft_of_other_layers_is_served_but_not_replayed(exported, nothing_served, tmp_path, capsys):
    run, other = RunFolder.of(exported), tmp_path / "other"
    shutil.copytree(run.export, other)
    told = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**told, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}))
    evaluate(exported, other)
    assert "other reads layers [1, 2], which were not captured" in capsys.readouterr().out
    assert json.loads((run.root / "eval-other" / "report.json").read_text())["replay"] == []


def test_what_is_no_draft_of_this_target_is_refused(exported, nothing_served, tmp_path):
    run = RunFolder.of(exported)
    with pytest.raises(UserError, match=r"--draft .*nowhere: no draft"):
        evaluate(exported, tmp_path / "nowhere")
    other = tmp_path / "sglangs"
    shutil.copytree(run.export, other)
    told = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**told, "layer_id_convention": "sglang"}))
    with pytest.raises(UserError, match="layer ids are sglang's"):
        evaluate(exported, other)
    assert not (run.root / "eval-sglangs").exists()
