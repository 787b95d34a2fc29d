"""What a report remarks on: noise, and comparisons that were not made."""

import pytest

from draftsmith.eval.remarks import remarks


def served(**values):
    row = {"set": "held_out", "k": 3, "temperature": 0.0, "concurrency": 1, "acceptance_length": 1.128, "speedup": 1.1,
           "first_token_ms": 20.0, "baseline_first_token_ms": 19.0}  # fmt: skip
    return row | values


def agreement(**values):
    row = {"k": 3, "temperature": 0.0, "concurrency": 1, "method": "exact", "difference": 0.0, "falls_short": False}
    return row | values


def found(rows, agreements=None, diagnosis=None, replay=(1,), written_at=0.8):
    agreements = [agreement()] if agreements is None else agreements
    report = {"served": rows, "agreement": agreements, "diagnosis": diagnosis, "replay": list(replay)}
    return remarks(report, written_at)


def test_nothing_is_remarked_where_all_is_well():
    assert found([served(), served(set="x")]) == []
    alone = served(speedup=None, baseline_first_token_ms=None)
    assert found([alone, served(speedup=1.128)]) == []


def test_a_speed_up_above_the_acceptance_length_is_noise():
    [said] = found([served(speedup=4.96)])
    assert said.startswith("held_out, K = 3, T = 0, 1 in flight: speed-up 4.96 at acceptance length 1.128. ")
    assert "the machine was busy; measure again" in said
    [said] = found([served(speedup=4.96, concurrency=n) for n in (1, 2, 3, 4, 5)], [agreement(concurrency=n) for n in
                   (1, 2, 3, 4, 5)])  # fmt: skip
    assert said.count("speed-up") == 3 and "; 2 more." in said


@pytest.mark.parametrize(("ours", "theirs", "said"), [(61, 20, 1), (59, 20, 0), (20, 61, 1), (20, 59, 0)])
def test_first_tokens_that_are_far_apart_are_noise(ours, theirs, said):
    lines = found([served(first_token_ms=float(ours), baseline_first_token_ms=float(theirs))])
    assert len(lines) == said and all("busy; measure again" in line for line in lines)


def test_a_shortfall_without_a_diagnosis_says_why():
    short = agreement(temperature=0.8, method="sampled", difference=-0.0505, falls_short=True)
    [said] = found([served(temperature=0.8)], [short])
    assert "T = 0.8, 1 in flight: served 5.05 % below replay. Not diagnosed: replay went along replies that" in said
    exact = agreement(difference=-0.03, falls_short=True)
    [said] = found([served()], [exact])
    assert "this draft is not a checkpoint of the run" in said
    assert found([served()], [exact], diagnosis={"findings": []}) == []


def test_a_cell_that_was_not_replayed_says_why():
    sampled = agreement(temperature=0.8, method="sampled")
    [said] = found([served(), served(temperature=0.8)], [sampled])
    assert "T = 0, 1 in flight: not replayed. The samples' replies were written at temperature 0.8" in said
    [said] = found([served()], [], replay=())
    assert "no held-out sample has states of this draft's layers" in said.lower()
    assert found([served(set="other")], []) == []  # of another set nothing could be replayed, which all know
