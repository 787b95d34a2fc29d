"""What there is to capture: no id twice, equal shares, windows by length, bytes that turn out so."""

import shutil
from collections import Counter
from types import SimpleNamespace

import pytest

from draftsmith.core.errors import UserError
from draftsmith.core.run import RunFolder
from draftsmith.core.samples import Sample, write_samples
from draftsmith.core.target import resolve_target
from draftsmith.hidden_state_capture.reader import HiddenStateStore
from draftsmith.hidden_state_capture.stage import capture
from draftsmith.hidden_state_capture.todo import (
    Head,
    engine_length,
    read_heads,
    shares,
    store_bytes,
    too_long,
    windows,
)


def sample(name, tokens, start=1):
    return Sample(name, list(range(tokens)), [(start, tokens)], "s", "stop", "train")


def heads(*lengths):
    return [Head(f"h{i}", tokens, tokens // 2, "train", "s") for i, tokens in enumerate(lengths)]


def test_a_sample_id_that_is_there_twice_is_refused_by_name(synthetic_run, synthetic_samples):
    run = RunFolder.of(synthetic_run)
    write_samples(run.samples, [*synthetic_samples, synthetic_samples[3]])
    shutil.rmtree(run.hidden_states)
    with pytest.raises(UserError, match=r"1 sample ids are there twice, e\.g\. `c-003/0`.*prepare --fresh"):
        capture(synthetic_run)


def test_heads_count_the_rows_that_predict_a_reply_token(tmp_path):
    samples = [
        Sample("two", list(range(10)), [(2, 4), (7, 10)], "s", "stop", "train"),
        Sample("from-the-start", [1, 2, 3], [(0, 3)], "s", "stop", "eval"),
    ]
    write_samples(tmp_path, samples)
    assert [(h.tokens, h.labels, h.split) for h in read_heads(tmp_path)] == [(10, 5, "train"), (3, 2, "eval")]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shares_are_equal_in_tokens_complete_and_the_same_everywhere(count):
    given = heads(*(37 * i % 500 + 10 for i in range(200)))
    found = shares(given, count)
    assert Counter(h.sample_id for share in found for h in share) == Counter(h.sample_id for h in given)
    tokens = [sum(h.tokens for h in share) for share in found]
    assert max(tokens) - min(tokens) <= 500
    assert shares(list(reversed(given)), count) == found


def test_more_shares_than_samples_leave_some_empty():
    assert sorted(len(s) for s in shares(heads(5, 6), 4)) == [0, 0, 1, 1]


def test_windows_hold_the_wanted_samples_longest_first(tmp_path):
    write_samples(tmp_path, [sample(f"s{i}", 3 + 7 * i % 11) for i in range(20)])
    wanted = {f"s{i}" for i in range(20) if i != 4}
    found = [(s.sample_id, len(s.input_ids)) for s in windows(tmp_path, wanted, 40)]
    assert {name for name, _ in found} == wanted and len(found) == 19
    assert [n for _, n in found] != sorted((n for _, n in found), reverse=True)  # more than one window
    whole = [len(s.input_ids) for s in windows(tmp_path, wanted, 10**9)]
    assert whole == sorted(whole, reverse=True)


def test_samples_beyond_the_targets_context_are_listed(make_config):
    config = make_config(data={"max_length": 400})
    target = resolve_target(config.target)
    assert engine_length(config, target) == 256  # of the tiny target, which would not start with more
    assert [h.sample_id for h in too_long(heads(254, 255, 256, 10), config, target)] == ["h1", "h2"]
    assert too_long(heads(64), make_config(), target) == []


def test_a_scaled_context_is_left_to_the_engine(make_config):
    scaled = SimpleNamespace(
        hf_config=SimpleNamespace(max_position_embeddings=256, rope_scaling={"rope_type": "yarn", "factor": 4.0})
    )
    assert engine_length(make_config(data={"max_length": 400}), scaled) == 402


def test_the_bytes_foretold_are_those_of_the_shards(synthetic_run, synthetic_samples):
    store = HiddenStateStore(RunFolder.of(synthetic_run).hidden_states)
    written = sum(s["bytes"] for s in store.manifest["shards"])
    foretold = store_bytes([Head.of(s) for s in synthetic_samples], 3, 64, "bf16")
    assert foretold == pytest.approx(written - 4096 * len(store.manifest["shards"]), rel=0.01)
