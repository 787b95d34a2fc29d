"""The tables, the fit and the variants of `benchmarks/quality`, and an ablation of two tiny trainings."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from draftsmith.core.run import RunFolder
from draftsmith.core.vocab import load_mapping
from draftsmith.hidden_state_capture.reader import HiddenStateStore

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "quality"
MODULES = ("ablate", "fit", "plots", "runs", "scale", "side_by_side", "tables")


@pytest.fixture(scope="module")
def quality():
    """`quality.tables` and so on, as the scripts import one another."""
    sys.path.insert(0, str(FOLDER))
    yield type("Quality", (), {name: importlib.import_module(name) for name in MODULES})
    sys.path.remove(str(FOLDER))
    for name in MODULES:
        del sys.modules[name]


def _line(variant, length, seed=0, tokens=1000, epochs=10, **more):
    lengths = {str(k): length + k / 100 for k in range(1, 8)}
    return {
        "name": variant, "variant": variant, "seed": seed, "replay_last": lengths, "steps_per_second": 2.0,
        "parameters": 5_000_000, "train_tokens": tokens, "tokens_seen": tokens * epochs, "seconds": 60.0,
        "side_by_side": 1, "process_seconds": 70.0, "resumed": False, "ttt_steps": 7, **more,
    }  # fmt: skip


def test_a_known_curve_is_found_again(quality):
    tokens = [1e5, 2e5, 4e5, 8e5, 1.6e6]
    found = quality.fit.fit(tokens, [3.5 - 0.2 * (t / 1e6) ** -0.4 for t in tokens])
    assert (found.a, found.b, found.c) == pytest.approx((3.5, 0.2, 0.4), rel=0.02)
    assert found.at(6.4e6) == pytest.approx(3.5 - 0.2 * 6.4**-0.4, abs=1e-3) and not found.at_bound


def test_a_straight_line_in_the_logarithm_has_no_end(quality):
    assert quality.fit.fit([1e5, 1e6, 1e7, 1e8], [1.0, 2.0, 3.0, 4.0]).at_bound


def test_two_sizes_are_no_curve(quality):
    with pytest.raises(ValueError, match="three sizes"):
        quality.fit.fit([1e5, 1e5, 2e5], [1.0, 1.1, 1.2])


def test_time_to_reach_lies_between_evaluations(quality):
    curve = [(10.0, 2.0), (20.0, 3.0), (30.0, 2.9), (40.0, 3.2)]
    reach = quality.fit.time_to_reach
    assert [reach(curve, x) for x in (1.5, 2.5, 3.0, 3.05, 9.0)] == pytest.approx([10, 15, 20, 35, None], nan_ok=True)


def test_the_ablation_table_orders_by_length_and_averages_seeds(quality):
    lines = [_line("base", 2.0), _line("worse", 1.9), _line("better", 2.1), _line("better", 2.3, seed=1)]
    rows = quality.tables.ablation_table(lines).splitlines()
    assert [row.split(" | ")[0] for row in rows[2:]] == ["| better", "| base", "| worse"]
    better = rows[2].strip("| ").split(" | ")
    assert better[:5] == ["better", "2.210", "2.230", "2.250", "2.270"]
    assert better[5] == f"{100 * (2.25 / 2.05 - 1):+.1f} %" and better[6:8] == ["2", "0.200"]


def test_the_scale_table_fits_equal_epochs_only(quality):
    sizes = [1e5, 2e5, 4e5, 8e5]
    lines = [_line(f"s{i}", 3.0 - 0.1 * (t / 1e6) ** -0.5 - 0.05, tokens=t) for i, t in enumerate(sizes)]
    lines.append(_line("again", 9.0, tokens=1e5, epochs=80))
    text = quality.tables.scale_table(lines)
    assert len(text.splitlines()) == 2 + 5 + 2 and "length = 3.00" in text and "^-0.5" in text


def test_the_cost_table_counts_the_start_of_a_process(quality):
    mine = _line(
        "ours", 2.0, curve=[{"seconds": 30.0, "acceptance_length": 2.0}, {"seconds": 60.0, "acceptance_length": 3.0}]
    )
    epochs = [{"seconds": s, "replay": {"7": x}} for s, x in ((100.0, 1.5), (200.0, 2.5))]
    peer = {"name": "peer", "process_seconds": 250.0, "epochs": [*epochs, {"seconds": 200.0}]}
    text = quality.tables.cost_table(mine, [peer], (0.8, 1.0))
    assert "| ours | 3.000 | 70 s | 40 s | 55 s |" in text
    assert "| peer | 2.500 | 250 s | 200 s | 250 s |" in text


def test_the_served_table_leaves_held_out_prompts_out_of_the_mean(quality):
    rows = [
        {"kind": "served", "draft": d, "set": s, "k": 5, "temperature": 0.0, "acceptance_length": x}
        for d, s, x in (("a", "held_out", 9.0), ("a", "qa", 2.0), ("a", "sum", 3.0), ("b", "qa", 2.0), ("b", "qa", 4.0),
                        ("b", "sum", 2.0), ("b", "held_out", 1.0))
    ]  # fmt: skip
    text = quality.tables.served_table({"base": "a", "rows": [*rows, {"kind": "replay"}]})
    assert "| a | 5 | 0 | 9.000 | 2.000 | 3.000 | 2.500 | 1.000 |" in text
    assert "| b | 5 | 0 | 1.000 | 3.000 | 2.000 | 2.500 | 1.000 |" in text


def test_plots_are_drawn(quality, tmp_path):
    lines = [_line(n, 3.0 - 0.1 * (t / 1e6) ** -0.5, tokens=t) for n, t in (("base", 1e5), ("b", 2e5), ("c", 8e5))]
    quality.plots.draw_ablation(lines, "5", tmp_path / "a.png")
    quality.plots.draw_scale(lines, "5", tmp_path / "s.png")
    assert min((tmp_path / name).stat().st_size for name in ("a.png", "s.png")) > 5000


def test_every_variant_is_a_config(quality):
    known, file = quality.ablate.read_variants(FOLDER / "variants.yaml"), ROOT / "benchmarks/acceptance/h200.yaml"
    plan = quality.ablate.Plan(file, ("eval.sets=[]",))
    base = plan.base.model_dump()
    for name, settings in known.items():
        config = plan.config(quality.ablate.Variant(name, settings)).model_dump()
        differ = {f"{s}.{k}" for s in base for k in base[s] if base[s][k] != config[s][k]} - {"run.name"}
        expected = {".".join(key.split(".")[:2]) for key in settings}
        assert differ == expected, f"{name} does not change what it says, or is the base"


def test_variants_are_chosen_by_pattern_seed_and_together(quality):
    known = quality.ablate.read_variants(FOLDER / "variants.yaml")
    choose = quality.ablate.choose
    assert not any(v.own_states for v in choose(known, [], [], []))
    assert [v.key for v in choose(known, ["ttt-*"], [0, 1], [])] == [
        "ttt-3-seed0",
        "ttt-5-seed0",
        "ttt-3-seed1",
        "ttt-5-seed1",
    ]
    tagged = quality.ablate.Plan(ROOT / "configs/quickstart.yaml", (), "long")
    assert tagged.config(quality.ablate.Variant("muon", {}, 1)).run.name == "quickstart-muon-seed1-long"
    (both,) = choose(known, [], [], [["muon", "loss-kl"]])
    assert both.name == "muon+loss-kl" and both.settings == known["muon"] | known["loss-kl"]
    with pytest.raises(SystemExit, match="mouon"):
        choose(known, ["mouon"], [], [])


def test_a_smaller_share_is_part_of_a_larger_one(quality):
    index = [
        {"sample_id": f"c{i // 2}/{i % 2}", "split": "eval" if i >= 180 else "train", "length": 10 + i % 7}
        for i in range(200)
    ]
    kept = {share: np.array(quality.runs.chosen(index, share)) for share in (0.125, 0.25, 0.5, 1.0)}
    total = sum(r["length"] for r in index[:180])
    for share, rows in kept.items():
        assert rows[180:].all() and (rows[:180:2] == rows[1:180:2]).all()  # held-out ones, whole conversations
        assert sum(r["length"] for r, k in zip(index[:180], rows, strict=False) if k) == pytest.approx(
            share * total, abs=40
        )
        assert all((rows <= other).all() for larger, other in kept.items() if larger > share)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_tiny_ablation_and_scale(quality, synthetic_run, config_file, tmp_path):
    plan, out = quality.ablate.Plan(Path(config_file(synthetic_run)), ("train.epochs=1",)), tmp_path / "out.jsonl"
    variants = [
        quality.ablate.Variant("base", {}),
        quality.ablate.Variant("vocabulary", {"data.draft_vocab_size": None, "train.loss": "kl"}, 1),
        quality.scale.points([0.5], [2], False, [])[0],
    ]
    assert quality.ablate.train_all(plan, variants, 2, 300, out) == []
    lines = {line["name"]: line for line in quality.ablate.lines_of(out)}
    assert set(lines) == {"base", "vocabulary-seed1", "share-0.5-epochs-2"}
    assert all(set(line["replay_last"]) == set("1234567") for line in lines.values())
    assert lines["share-0.5-epochs-2"]["train_tokens"] == pytest.approx(lines["base"]["train_tokens"] / 2, abs=15)
    for line in lines.values():  # K = 3 of the config's J, as training itself found it
        assert line["replay_last"]["3"] == pytest.approx(line["curve"][-1]["acceptance_length"], abs=1e-3)
    of = {name: RunFolder(Path(line["run"])) for name, line in lines.items()}
    assert load_mapping(of["vocabulary-seed1"].vocab_mapping).is_full
    assert len(HiddenStateStore(of["share-0.5-epochs-2"].hidden_states).numbers("eval")) == 4
    before = out.read_text()
    assert quality.ablate.train_all(plan, variants, 2, 300, out) == [] and out.read_text() == before  # nothing again
    json.dumps(quality.tables.ablation_table(list(lines.values())))


@pytest.mark.slow
def test_the_time_ends_trainings_and_the_same_command_goes_on(quality, synthetic_run, config_file, tmp_path):
    plan, out = quality.ablate.Plan(Path(config_file(synthetic_run)), ("train.epochs=1",)), tmp_path / "out.jsonl"
    variant = quality.ablate.Variant("base", {})
    (left,) = quality.ablate.train_all(plan, [variant], 1, 0.0, out)
    assert "not started" in left and not out.exists()
    assert quality.ablate.train_all(plan, [variant], 1, 300, out) == [] and len(quality.ablate.lines_of(out)) == 1
