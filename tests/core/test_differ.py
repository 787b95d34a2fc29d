"""What a stage says of an output that the config at hand would not have made: no hash, full keys, the cheapest mend."""

import json
import re

import pytest

from draftsmith.core.differ import find
from draftsmith.core.errors import UserError
from draftsmith.core.lineage import train_inputs
from draftsmith.core.manifest import MANIFEST, check_inputs, read_manifest
from draftsmith.core.run import RunFolder
from draftsmith.core.target import resolve_target
from draftsmith.export.stage import export_inputs
from draftsmith.hidden_state_capture.stage import capture_inputs

pytestmark = pytest.mark.usefixtures("one_thread")
HASH = re.compile(r"[0-9a-f]{16}|sha256")


def message(run, folder, manifest, inputs):
    with pytest.raises(UserError) as error:
        check_inputs(folder, manifest, inputs)
    assert not HASH.search(str(error.value)), error.value
    return str(error.value)


def test_no_input_of_a_run_shows_its_hash(trained_run):
    """Every hash that the stages record, changed one by one."""
    run, target = RunFolder.of(trained_run), resolve_target(trained_run.target)
    checkpoint = run.complete_checkpoints()[-1]
    recorded = {
        "prepare": read_manifest(run.samples)["inputs"],
        "capture": capture_inputs(trained_run, target, [3, 4, 5], run),
        "train": train_inputs(trained_run, run),
        "export": export_inputs(trained_run, checkpoint),
    }
    said = []
    for stage, inputs in recorded.items():
        text = json.dumps(inputs)
        for value in set(re.findall(r'"([0-9a-f]{64})"', text)):
            changed = json.loads(text.replace(value, "0" * 64))
            said.append(message(run, run.root, {"stage": stage, "inputs": changed}, inputs))
    for phrase in (
        "the samples were made anew since",
        "the hidden states were captured anew since",
        "the vocabulary mapping was made anew since",
        "the target's tokenizer.json is another file than then",
        "the target's weights are others than then",
        "the checkpoint's weights are others than then",
    ):
        assert any(phrase in one for one in said), phrase
    assert not any("Give the same again" in one for one in said)


def test_samples_that_were_made_again_are_said_by_the_command(refused, config_file, trained_run):
    run = RunFolder.of(trained_run)
    manifest = json.loads((run.samples / MANIFEST).read_text())
    (run.samples / MANIFEST).write_text(json.dumps({**manifest, "created": "later"}))
    for stage in ("capture", "train", "export"):
        said = refused(stage, "--config", config_file(trained_run))
        assert "the samples were made anew since" in said and not HASH.search(said)
        assert "which deletes the hidden states" in said


def test_a_setting_of_last_time_is_offered_before_anything_is_deleted(refused, config_file, trained_run):
    said = refused("train", "--config", config_file(trained_run), "train.learning_rate=0.5", "run.seed=3")
    assert "train.learning_rate is 0.001 there and 0.5 in the config; run.seed is 0 there and 3 in the config" in said
    again = said.index("Give the same again (`train.learning_rate=0.001`, `run.seed=0`,")
    assert again < said.index("--fresh") < said.index("which deletes the trained draft")


def test_what_was_given_then_is_taken_when_it_is_given_again(run_cli, refused, config_file, synthetic_run):
    file = config_file(synthetic_run)
    assert run_cli("train", "--config", file, "train.rejected_weight=0.3")[0] == 0
    said = refused("train", "--config", file)
    assert "`train.rejected_weight=0.3`" in said
    code, out, _ = run_cli("train", "--config", file, re.search(r"`(train\.[^`]+)`", said)[1])
    assert code == 0 and "already there" in out


def phrases(there, here):
    return [d.said("there", "in the config") for d in find(there, here)]


def test_a_key_that_was_not_written_down_is_its_default():
    assert phrases({}, {"mode": "spool"}) == ['capture.mode is "store" there and "spool" in the config']
    assert find({}, {"mode": "spool"})[0].override() == "capture.mode=store"
    assert phrases({"target": {"reasoning_parser": None}}, {"target": {"reasoning_parser": "x"}}) == [
        'target.reasoning_parser is not set there and "x" in the config'
    ]


def test_a_file_that_came_or_went_is_said_so():
    name = {"target": {"chat_template_sha256": None}}
    other = {"target": {"chat_template_sha256": "ab" * 32}}
    assert phrases(name, other) == ["there is the target's chat template now, and not then"]
    assert phrases(other, name) == ["there was the target's chat template then, and not now"]


def test_another_source_is_named_once_and_a_list_of_them_without_hashes():
    one, two = ({"path": path, "sha256": letter * 64, "revision": None} for path, letter in (("a", "a"), ("b", "b")))
    said = phrases({"data": {"sources": [one]}}, {"data": {"sources": [two]}})
    assert said == ['data.sources[0].path is "a" there and "b" in the config']
    more = phrases({"data": {"sources": [one]}}, {"data": {"sources": [one, two]}})
    assert len(more) == 1 and not HASH.search(more[0])
    assert phrases({"data": {"sources": [one]}}, {"data": {"sources": [{**one, "sha256": "c"}]}}) == [
        "the content of data.sources[0] is another one than then"
    ]


def test_an_export_of_an_earlier_checkpoint_names_both():
    said = phrases({"checkpoint": "step-1", "weights_sha256": "a"}, {"checkpoint": "step-2", "weights_sha256": "b"})
    assert said == ["the checkpoint is step-1 there and step-2 by now"]
