"""Passes as rows: E1's counting, latencies, what a baseline is compared with, agreement with replay."""

import numpy as np
import pytest

from draftsmith.core.config import Config
from draftsmith.eval.offline import Replay
from draftsmith.eval.passes import Clock, Counters, Job, Pass
from draftsmith.eval.prompts import HELD_OUT, Prompt
from draftsmith.eval.rows import agreement_rows, first_differences, served_row
from draftsmith.eval.schema import ServedRow
from draftsmith.eval.sweep import Measured, Variant, _in_turns

CONFIG = Config.model_validate({"eval": {"bootstrap": 20}})


def job(count=2, temperature=0.0, name="s"):
    return Job(name, temperature, 1, [Prompt(f"c{i}/0", [1], 8) for i in range(count)])


def a_pass(replies, seconds=2.0, outputs=None, counters=None):
    many = len(replies)
    outputs = outputs or [len(r) for r in replies]
    return Pass(
        seconds, replies, ["stop"] * many, outputs, [0.01] * many, [0.002] * (many - 1) + [float("nan")],
        counters or Counters(),
    )  # fmt: skip


def row_of(done, base=None, **values):
    return served_row(CONFIG, Measured(Variant(None, 3), job(len(done.replies), **values), done, base, True))


def test_rates_count_rounds_and_the_length_counts_the_bonus_token():
    """E1: 10 rounds that accepted 8 drafts; rates are of rounds, not of the position before."""
    row = row_of(a_pass([[1, 2], [3]], counters=Counters(10, 8, (5, 2, 1))))
    assert row["acceptance_length"] == 1.8 and row["per_position"] == [0.5, 0.2, 0.1]
    assert sum(row["per_position"]) == pytest.approx(row["acceptance_length"] - 1)


def test_a_row_stands_beside_its_baseline():
    row = row_of(a_pass([[1, 2, 3], [4, 5, 6]], 2.0), a_pass([[1, 2, 3], [4, 9, 6]], 4.0))
    assert (row["tokens_per_second"], row["baseline_tokens_per_second"], row["speedup"]) == (3.0, 1.5, 2.0)
    assert (row["first_token_ms"], row["inter_token_ms"], row["baseline_inter_token_ms"]) == (10.0, 2.0, 2.0)
    assert (row["identical_replies"], row["first_differences"]) == (1, [1])
    ServedRow.model_validate(row)


def test_sampled_replies_are_not_compared_and_a_missing_baseline_is_none():
    sampled = row_of(a_pass([[1, 2], [3, 4]]), a_pass([[5, 6], [7, 8]]), temperature=1.0)
    assert sampled["identical_replies"] is None and sampled["speedup"] == 1.0
    alone = row_of(a_pass([[1, 2], [3, 4]]))
    assert alone["speedup"] is None and alone["baseline_first_token_ms"] is None
    ServedRow.model_validate(sampled)
    ServedRow.model_validate(alone)


def test_differences_are_placed_by_their_first_token():
    ours, theirs = a_pass([[1, 2], [1, 2, 3], [4], [5]]), a_pass([[1, 2], [1, 2], [9], [5, 6]])
    assert first_differences(ours, theirs) == [2, 0, 1]


def test_rounds_of_a_request_are_its_outputs_after_the_first():
    """A reply of 7 tokens in outputs of 1, 3, 1, 2: three rounds, three accepted drafts."""
    assert a_pass([list(range(7))], outputs=[4]).table.tolist() == [[3, 3]]


def test_counters_are_taken_as_differences():
    before, after = Counters(10, 8, (5, 3)), Counters(14, 9, (6, 3))
    assert after.since(before) == Counters(4, 1, (1, 0))
    assert after.since(Counters()) == after  # nothing was counted yet: no positions either


def test_a_clock_measures_between_tokens_not_between_outputs():
    clock = Clock(asked=1.0)
    for now in (1.5, 2.0, 3.5):
        clock.tick(now)
    assert (clock.first, clock.outputs, clock.between(5)) == (1.5, 3, 0.5)
    assert np.isnan(Clock(0.0).between(1))


# ---- agreement -------------------------------------------------------------------------------------------------------


def replayed(rounds):
    """[(rounds, accepted)] a sample at K = 1, T = 0."""
    table = np.array(rounds, dtype=np.float64)
    return Replay([f"c{i}/0" for i in range(len(rounds))], {(1, 0.0): table}, {0.0: "exact"})


def measured(counters, count, name=HELD_OUT):
    return Measured(Variant(None, 1), job(count, name=name), a_pass([[1, 2]] * count, counters=counters), None, True)


def test_agreement_is_over_the_samples_that_were_served():
    found = replayed([(10, 5), (10, 5), (10, 0)])
    [row] = agreement_rows(
        CONFIG, found, [measured(Counters(20, 10, (10,)), 2), measured(Counters(1, 1, (1,)), 1, "x")]
    )
    assert (row["replayed"], row["served"], row["difference"], row["falls_short"]) == (1.5, 1.5, 0.0, False)


def test_agreement_knows_later_turns_of_samples_whose_ids_hold_a_hash():
    found = Replay(["a#1/0", "b"], {(1, 0.0): np.array([[10.0, 5], [10, 0]])}, {0.0: "exact"})
    served = Job(HELD_OUT, 0.0, 1, [Prompt("a#1/0", [1], 8), Prompt("a#1/0#1", [1], 8)])
    done = a_pass([[1, 2]] * 2, counters=Counters(20, 10, (10,)))
    [row] = agreement_rows(CONFIG, found, [Measured(Variant(None, 1), served, done, None, True)])
    assert row["replayed"] == row["served"] == 1.5


@pytest.mark.parametrize(("accepted", "short"), [(500, False), (471, False), (469, True), (600, False)])
def test_falling_short_by_more_than_two_percent_is_said(accepted, short):
    """1.5 is replayed; 1.47 is the bound."""
    [row] = agreement_rows(CONFIG, replayed([(1000, 500)]), [measured(Counters(1000, accepted, (accepted,)), 1)])
    assert row["falls_short"] is short


# ---- turns -----------------------------------------------------------------------------------------------------------


def test_sides_take_turns_and_another_begins_in_every_cell(monkeypatch):
    order = []

    class Side:
        def __init__(self, k):
            self.k = k

        def measure(self, job):
            order.append((job.set, self.k))
            return a_pass([[self.k]] * len(job.prompts))

    jobs = [job(1, name=name) for name in "abc"]
    monkeypatch.setattr("draftsmith.eval.sweep._jobs", lambda *args: iter(jobs))
    found = list(_in_turns(CONFIG, None, [Side(0), Side(3)], ["x", "y"], None))
    assert order == [("a", 0), ("a", 3), ("b", 3), ("b", 0), ("c", 0), ("c", 3)]
    assert [[p.replies[0][0] for p in passes] for _, _, passes in found] == [[0, 3]] * 3
