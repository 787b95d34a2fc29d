"""An eval that ended early goes on from the cells that it measured."""

import math
from dataclasses import astuple

import pytest

from draftsmith.core.config import Config
from draftsmith.eval.journal import PassJournal
from draftsmith.eval.passes import Counters, Job, Pass
from draftsmith.eval.prompts import Prompt
from draftsmith.eval.sweep import _in_turns

CONFIG, SIDES = Config(), ["no draft", "export at K = 3"]


def job(name, temperature=0.0):
    return Job(name, temperature, 1, [Prompt(f"{name}/0", [1, 2], 8)])


def a_pass(reply):
    counters = Counters(10, 8, (5, 2, 1))
    return Pass(2.0, [reply], ["stop"], [len(reply)], [0.25], [math.nan], counters)


class Side:
    """Counts what it is asked; dies at its `last` job, as an engine would."""

    def __init__(self, k, last=99):
        self.k, self.last, self.asked = k, last, []

    def measure(self, asked):
        self.asked.append(asked.set)
        if len(self.asked) == self.last:
            raise RuntimeError("the engine died")
        return a_pass([self.k, len(asked.set)])


def sweep(journal, sides, monkeypatch, jobs):
    monkeypatch.setattr("draftsmith.eval.sweep._jobs", lambda *args: iter(jobs))
    return [(number, found.set, passes) for number, found, passes in _in_turns(CONFIG, None, sides, SIDES, journal)]


def test_a_sweep_whose_engine_died_goes_on(tmp_path, monkeypatch):
    jobs = [job("a"), job("bb"), job("bb", 1.0), job("cccc")]
    whole = sweep(None, [Side(0), Side(3)], monkeypatch, jobs)
    with pytest.raises(RuntimeError):
        sweep(PassJournal(tmp_path, "inputs"), [Side(0), Side(3, last=3)], monkeypatch, jobs)
    sides, journal = [Side(0), Side(3)], PassJournal(tmp_path, "inputs")
    again = sweep(journal, sides, monkeypatch, jobs)
    assert [s.asked for s in sides] == [["bb", "cccc"]] * 2 and journal.used == 2
    assert str(again) == str(whole)  # nan is not equal to itself
    assert [type(x) for x in astuple(again[0][2][1])] == [type(x) for x in astuple(whole[0][2][1])]
    journal.clear()
    assert not tmp_path.exists()


def test_other_inputs_prompts_or_sides_are_measured(tmp_path):
    first = PassJournal(tmp_path, {"k": [3]})
    first.add(SIDES, job("a"), [a_pass([1]), a_pass([2])])
    again = PassJournal(tmp_path, {"k": [3]})
    assert again.get(SIDES, job("a")) is not None
    assert again.get(SIDES[::-1], job("a")) is None and again.get(SIDES, job("a", 1.0)) is None
    other = Job("a", 0.0, 1, [Prompt("a/0", [1, 3], 8)])
    assert again.get(SIDES, other) is None
    assert PassJournal(tmp_path, {"k": [5]}).get(SIDES, job("a")) is None


def test_a_line_that_a_kill_cut_off_is_measured_again(tmp_path, capsys):
    journal = PassJournal(tmp_path, 0)
    journal.add(SIDES, job("a"), [a_pass([1])])
    journal.add(SIDES, job("b"), [a_pass([2])])
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-40])
    cut = PassJournal(tmp_path, 0)
    assert "a damaged line" in str(capsys.readouterr())
    assert cut.get(SIDES, job("a")) is not None and cut.get(SIDES, job("b")) is None
    cut.add(SIDES, job("b"), [a_pass([3])])
    mended = PassJournal(tmp_path, 0)
    found = mended.get(SIDES, job("b"))
    assert found is not None and found[0].replies == [[3]] and mended.get(SIDES, job("a")) is not None
