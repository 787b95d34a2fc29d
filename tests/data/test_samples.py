"""Samples: token-exact, the mask is exactly the reply, and the draft vocabulary comes from training replies alone."""

import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from draftsmith.core.atomic import sha256_json
from draftsmith.core.conversations import Conversation, Skipped
from draftsmith.core.errors import UserError
from draftsmith.core.run import RunFolder
from draftsmith.core.samples import Sample, iter_samples, read_samples, write_samples
from draftsmith.core.target import resolve_target
from draftsmith.core.vocab import load_mapping, save_mapping
from draftsmith.core.vocabulary import sample_figures
from draftsmith.data import stage
from draftsmith.data.inputs import Inputs
from draftsmith.data.rows import Row
from draftsmith.data.stage import _fitting, prepare, prepare_inputs


@pytest.fixture
def made(make_config, target, tally_of, tmp_path):
    """`made(rows)`: (samples, tally) of rows of ten conversations, of which the last two are held out."""

    def make(rows, **data):
        config = make_config(data=data)
        messages = ({"role": "user", "content": f"question {i}"} for i in range(10))
        conversations = [Conversation(f"id-{i}", "src", f"f, line {i + 1}", (m,)) for i, m in enumerate(messages)]
        tally = tally_of(["src"])
        read = Inputs(conversations, np.arange(10) >= 8)
        samples = []
        for sample in _fitting(config, target, read, iter(rows), tally, tmp_path / "rows"):
            tally.use(sample)
            samples.append(sample)
        return samples, tally

    return make


def row(conversation, ids, turn=0, prompt=(5, 6, 7)):
    ids = [*prompt, *ids]
    return Row(conversation, turn, ids, [(len(prompt), len(ids))], "stop", "target")


def ten(ids=(8, 9)):
    return [row(c, ids) for c in range(10)]


def test_a_sample_is_prompt_and_reply_and_its_mask_is_the_reply(made):
    samples, _ = made([row(0, [8, 9, 1], turn=2), *ten()[1:]])
    first = samples[0]
    assert first.input_ids == [5, 6, 7, 8, 9, 1] and first.prompts[0] == [5, 6, 7]
    assert first.loss_spans == [(3, 6)] and first.loss_mask.tolist() == [0, 0, 0, 1, 1, 1]
    assert (first.sample_id, first.source, first.finish_reason) == ("id-0/2", "src", "stop")
    assert (first.conversation_id, first.turn, first.author) == ("id-0", 2, "target")


def test_samples_come_in_the_conversations_order_whatever_order_the_rows_come_in(made):
    rows = [row(c, [8, 9], turn) for c in range(10) for turn in range(3)]
    straight, _ = made(rows)
    back, _ = made(rows[::-1])
    assert straight == back and [s.turn for s in straight[:4]] == [0, 1, 2, 0]


def test_a_reply_with_nothing_to_draft_is_skipped_at_its_place(made):
    samples, tally = made([*ten()[:9], row(9, [1])], max_skip_share=0.2)
    assert len(samples) == 9 and tally.sources["src"].skipped == {"reply_too_short": 1}


def test_rows_that_could_not_be_made_count_and_too_many_stop_the_stage(made):
    refused = [Skipped(f"f, line {i}", "template_refused", "x", "src") for i in range(3)]
    with pytest.raises(UserError, match=r"3 of 10 rows cannot be used .*3 template_refused.*f, line 0"):
        made([*refused, *ten()[:7]])


def test_all_turns_of_a_conversation_are_on_one_side(made):
    samples, _ = made([row(c, [8, 9], turn) for c in range(10) for turn in range(3)])
    assert {s.sample_id for s in samples if s.split == "eval"} == {f"id-{c}/{t}" for c in (8, 9) for t in range(3)}


@pytest.mark.parametrize("rows", [[], ten()[8:]])
def test_no_training_sample_at_all_is_refused(made, rows):
    with pytest.raises(UserError, match=r"no training sample.*lower data\.eval_share"):
        made(rows)


def test_samples_are_read_back_as_they_were_written(tmp_path):
    samples = [
        Sample("a/0", [1, 2, 3, 4], [(1, 2), (3, 4)], "naïve", "length", "train"),
        Sample("b/0", [511], [(0, 1)], "s", "stop", "eval", "someone", "b", 3),
    ]
    write_samples(tmp_path, samples)
    assert read_samples(tmp_path) == samples
    assert read_samples(tmp_path, "eval") == list(iter_samples(tmp_path, "eval")) == samples[1:]
    assert samples[0].loss_mask.dtype == np.uint8 and samples[0].loss_mask.tolist() == [0, 1, 0, 1]
    assert samples[0].segments == [(False, [1]), (True, [2]), (False, [3]), (True, [4])]
    assert samples[1].segments == [(True, [511])]


def test_samples_that_were_written_in_parts_are_all_there(tmp_path, monkeypatch):
    monkeypatch.setattr("draftsmith.core.samples._GROUP_TOKENS", 50)
    samples = [Sample(f"{i}/0", list(range(i % 9 + 2)), [(1, 2)], "s", "stop", "train") for i in range(100)]
    write_samples(tmp_path, samples)
    assert read_samples(tmp_path) == samples


# ---- the whole stage, with replies that are given instead of an engine's ---------------------------------------------


def answer(config, target, conversations, journal):
    """Held-out replies are not known here: conversation i is answered with token 200 + i."""
    journal.mkdir(parents=True)
    (journal / "replies").write_text("an unfinished prepare's")
    for i, _ in reversed(list(enumerate(conversations))):
        yield Row(i, 0, [5, 6, 7, *[200 + i] * 4, 1], [(3, 8)], "stop" if i else "length", "target")


@pytest.fixture
def prepared(make_config, source, monkeypatch):
    """The config and the run after `prepare` on twelve prompts, a bad row and a duplicate."""
    monkeypatch.setattr(stage, "regenerate", answer)
    monkeypatch.setattr(stage, "require_vllm", lambda stage: None)
    rows = [{"prompt": f"question {i}"} for i in range(12)]
    path = source(*rows, "{", {"prompt": " question  3"})
    config = make_config(
        data={"sources": [{"path": path}], "eval_share": 0.25, "draft_vocab_size": 8, "max_skip_share": 0.1}
    )
    prepare(config)
    run = RunFolder.of(config)
    manifest = json.loads((run.samples / "manifest.json").read_text())
    return SimpleNamespace(config=config, run=run, path=path, manifest=manifest)


def test_the_manifest_counts_every_row_by_source(prepared):
    of_source = prepared.manifest["sources"]["s"]
    assert prepared.manifest["counts"] == {"train": 9, "eval": 3}
    assert of_source["conversations"] == 13 and of_source["samples"] == 12 and of_source["shapes"] == {"prompt": 13}
    assert of_source["skipped"] == {"not_json": 1} and of_source["removed"] == {"exact_duplicate": 1}
    assert of_source["finish_reasons"] == {"length": 1, "stop": 11} and of_source["authors"] == {"target": 12}
    assert of_source["tokens"] == 12 * 8 and of_source["reply_tokens"] == 12 * 5
    assert of_source["lengths"] == {"p5": 8, "p50": 8, "p95": 8, "max": 8}


def test_what_is_not_used_is_listed_with_file_and_line(prepared):
    listed = [json.loads(line) for line in (prepared.run.samples / "skipped.jsonl").read_text().splitlines()]
    assert [(row["reason"], row["place"]) for row in listed] == [
        ("not_json", f"{prepared.path}, line 13"),
        ("exact_duplicate", f"{prepared.path}, line 14"),
    ]


def test_the_draft_vocabulary_is_of_training_replies_and_special_tokens(prepared):
    samples = read_samples(prepared.run.samples)
    trained = {s.input_ids[3] for s in samples if s.split == "train"}
    held_out = {s.input_ids[3] for s in samples if s.split == "eval"}
    kept = set(load_mapping(prepared.run.vocab_mapping).target_ids.tolist())
    assert len(kept) == 8 and 1 in kept and len(kept & trained) >= 6 and not kept & held_out
    figures = sample_figures(prepared.run, prepared.manifest)
    assert figures["coverage_train"] == figures["sources"]["s"]["coverage_train"] == 37 / 45
    assert figures["coverage_eval"] == 0.2 and figures["draft_vocab_size"] == 8
    assert "coverage_train" not in prepared.manifest and "draft_vocab_size" not in prepared.manifest["inputs"]["data"]


def kept_of(run):
    """Bytes of every file of the samples."""
    return {p.name: p.read_bytes() for p in run.samples.iterdir()}


def test_another_size_makes_the_mapping_from_the_replies_that_are_there(prepared, changed, monkeypatch, capsys):
    monkeypatch.setattr(stage, "regenerate", None)  # nobody is asked
    before, mapping = kept_of(prepared.run), prepared.run.vocab_mapping.read_bytes()
    smaller = changed(prepared.config, data={"draft_vocab_size": 6})
    prepare(smaller)
    assert "draft vocabulary: 8 -> 6 tokens, from the replies that are there" in capsys.readouterr().out
    assert len(load_mapping(prepared.run.vocab_mapping).d2t) == 6 and kept_of(prepared.run) == before
    prepare(smaller)
    assert "draft vocabulary" not in capsys.readouterr().out
    prepare(changed(prepared.config, data={"draft_vocab_size": None}))
    assert load_mapping(prepared.run.vocab_mapping).is_full
    prepare(prepared.config)
    assert prepared.run.vocab_mapping.read_bytes() == mapping and kept_of(prepared.run) == before
    with pytest.raises(UserError, match=r"data\.draft_vocab_size is 600"):
        prepare(changed(prepared.config, data={"draft_vocab_size": 600}))
    assert prepared.run.vocab_mapping.read_bytes() == mapping


@pytest.mark.parametrize("damage", ["missing", "cut", "a byte", "of other samples"])
def test_a_mapping_that_is_not_of_these_samples_is_made_again(prepared, damage):
    file = prepared.run.vocab_mapping
    whole = file.read_bytes()
    if damage == "missing":
        file.unlink()
    elif damage == "cut":
        file.write_bytes(whole[:-40])
    elif damage == "a byte":
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    else:
        save_mapping(file, load_mapping(file), {})
    prepare(prepared.config)
    assert file.read_bytes() == whole


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_prepare_that_is_killed_at_the_mapping_is_finished_by_the_next(prepared, changed, config_file, moment):
    """SIGKILL, just before and just after the new mapping takes the old one's place."""
    before, old = kept_of(prepared.run), prepared.run.vocab_mapping.read_bytes()
    smaller = changed(prepared.config, data={"draft_vocab_size": 6})
    code = f"""
import os, signal
from pathlib import Path
from draftsmith.core import atomic
from draftsmith.core.config_io import load_config
from draftsmith.data.stage import prepare
replace = os.replace
def killed(a, b):
    if {moment == "after"}:
        replace(a, b)
    os.kill(os.getpid(), signal.SIGKILL)
atomic.os.replace = killed
prepare(load_config(Path({config_file(smaller)!r}), []))
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == -9
    assert (prepared.run.vocab_mapping.read_bytes() == old) == (moment == "before")
    prepare(smaller)
    assert len(load_mapping(prepared.run.vocab_mapping).d2t) == 6 and kept_of(prepared.run) == before


def test_replies_of_an_unfinished_prepare_outlive_another_size(prepared, changed):
    """Begun by an earlier version, whose journal was named with the size, or by this one, whose is not."""
    run, inputs = prepared.run, {"data": {"max_length": 9}, "not_in": {}}
    new = stage._journal(prepared.config, run, inputs)
    assert stage._journal(changed(prepared.config, data={"draft_vocab_size": 6}), run, inputs) == new
    old = run.journal / sha256_json({"data": {"max_length": 9, "draft_vocab_size": 8}, "not_in": {}})[:16]
    old.mkdir(parents=True)
    assert stage._journal(prepared.config, run, inputs) == old


def test_nothing_but_the_samples_is_left(prepared, tree_of):
    assert {p.split("/")[0] for p in tree_of(prepared.run.root)} == {
        "config.yaml",
        "samples",
        "vocab_mapping.safetensors",
    }
    assert {p.name for p in prepared.run.samples.iterdir()} == {
        "samples.parquet",
        "skipped.jsonl",
        "sheet.html",
        "manifest.json",
    }


def test_what_is_there_is_not_made_again_and_a_later_evaluation_set_is_said(prepared, source, changed, capsys):
    prepare(prepared.config)
    said = capsys.readouterr().out
    assert "already there" in said and "warning" not in said
    bench = source({"prompt": "x"}, name="bench.jsonl")
    prepare(changed(prepared.config, eval={"sets": [bench]}))
    assert f"warning: the samples were made before {bench}" in capsys.readouterr().out.replace("\n", " ")


def test_what_auto_is_on_this_machine_decides_the_replies(prepared, changed, monkeypatch):
    """Samples made in float32 on one machine are not those that bfloat16 makes on another; kept ones are."""
    auto = changed(prepared.config, run={"name": "auto"}, target={"dtype": "auto"})
    kept = changed(auto, data={"replies": "keep"})
    monkeypatch.setattr("draftsmith.core.engine.has_bfloat16", lambda: False)
    resolved = resolve_target(auto.target)
    assert prepare_inputs(auto, resolved)["target"]["dtype"] == "float32"
    before = prepare_inputs(kept, resolved)
    prepare(auto)
    prepare(changed(auto, target={"dtype": "float32"}))  # the same by its name
    monkeypatch.setattr("draftsmith.core.engine.has_bfloat16", lambda: True)
    with pytest.raises(UserError, match=r'target\.dtype is "float32" there and "bfloat16" in the config'):
        prepare(auto)
    prepare(changed(auto, data={"server": {"url": "http://host:8000"}}))  # a server's settings are no input
    assert prepare_inputs(kept, resolved) == before


def test_replies_of_another_author_and_cut_ones_are_said(prepared, changed, monkeypatch, capsys):
    def others(*args):
        return (Row(r.conversation, r.turn, r.input_ids, r.loss_spans, r.finish_reason, "gpt-x") for r in answer(*args))

    monkeypatch.setattr(stage, "regenerate", others)
    prepare(changed(prepared.config, run={"name": "other"}))
    said = capsys.readouterr().out
    assert "1 replies were cut by length" in said and "12 samples hold replies that the target is not known" in said
    assert "gpt-x" in said and "a multiple of 128" in said


def test_a_stage_that_is_stopped_leaves_no_samples_and_keeps_the_journal(prepared, changed, monkeypatch):
    def stops(config, target, conversations, journal):
        made = answer(config, target, conversations, journal)
        yield next(made)
        raise KeyboardInterrupt

    monkeypatch.setattr(stage, "regenerate", stops)
    config = changed(prepared.config, run={"name": "stopped"})
    with pytest.raises(KeyboardInterrupt):
        prepare(config)
    run = RunFolder.of(config)
    assert not run.samples.exists() and not (run.root / "scratch").exists() and list(run.journal.iterdir())


def test_a_refused_source_leaves_no_run_behind(prepared, changed, source):
    config = changed(prepared.config, run={"name": "refused"})
    config = changed(config, data={"sources": [{"path": source("{", name="bad.jsonl")}]})
    with pytest.raises(UserError):
        prepare(config)
    assert not RunFolder.of(config).root.exists()
