"""Serving measured through a real vLLM server: its streams, its counters, both turns of a dialogue."""

import json
import shutil

import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from draftsmith.core.embedded import embedded_checkpoint

pytestmark = [pytest.mark.vllm, pytest.mark.long]
K = 2


@pytest.fixture(scope="module")
def server(smollm_run, serving, tmp_path_factory):
    """URL of vLLM's own server with the run's draft."""
    draft = {"method": "eagle3", "model": str(smollm_run["root"] / "export"), "num_speculative_tokens": K}
    with serving(
        tmp_path_factory.mktemp("server") / "log",
        "--model", str(embedded_checkpoint()), "--dtype", "float32",
        "--max-model-len", "512", "--no-enable-prefix-caching", "--speculative-config", json.dumps(draft),
    ) as url:  # fmt: skip
        yield url


@pytest.fixture(scope="module")
def measured(smollm_run, server, cli, tmp_path_factory):
    """The report of a copy of the run, and its folder."""
    folder = tmp_path_factory.mktemp("on-server")
    shutil.copytree(smollm_run["root"], folder / "small", ignore=shutil.ignore_patterns("eval"))
    (folder / "talk.jsonl").write_text(
        '{"id": "t", "turns": ["Name three colours.", "Which of them is the warmest?"]}\n'
    )
    options = [f"run.dir={folder}", f"eval.server={{url: {server}}}", f"eval.sets=[{folder}/talk.jsonl]"]
    options += ["eval.concurrency=[4]", "eval.temperature=[0.0, 1.0]", f"eval.k=[{K}]"]
    cli("eval", "--config", smollm_run["config"], *options)
    return json.loads((folder / "small/eval/report.json").read_text()), folder / "small"


def test_a_server_is_measured_as_an_engine_is(measured, report):
    rows = {(r["set"], r["temperature"]): r for r in measured[0]["served"]}
    assert set(rows) == {(s, t) for s in ("held_out", "talk") for t in (0.0, 1.0)}
    greedy = rows["held_out", 0.0]
    assert greedy["k"] == K and greedy["drafts"] > 100 and len(greedy["per_position"]) == K
    [agreement] = [a for a in measured[0]["agreement"] if a["temperature"] == 0.0]
    assert agreement["method"] == "exact" and agreement["difference"] == pytest.approx(0.0, abs=0.02)
    assert greedy["speedup"] is None and 0 < greedy["inter_token_ms"] < greedy["first_token_ms"] * 100
    # The requests' own streams show the rounds that the server counts: its interval holds its figure.
    low, high = greedy["ci95"]
    assert low - 0.02 <= greedy["acceptance_length"] <= high + 0.02


def test_the_servers_own_settings_are_recorded(measured):
    """E2, E3."""
    [said] = measured[0]["settings"]["servers"]
    assert said["prefix_caching"] is False and said["vllm"].startswith("0.") and said["k"] == K


def test_the_second_turn_holds_the_targets_first_reply(measured):
    rows = pq.read_table(measured[1] / "eval/served_prompts.parquet").to_pylist()
    first, second = (r["prompt_ids"] for r in rows if r["set"] == "talk")
    tokenizer = AutoTokenizer.from_pretrained(embedded_checkpoint())
    begin, end = tokenizer.decode(first), tokenizer.decode(second)
    assert end.startswith(begin)
    reply, _, rest = end.removeprefix(begin).partition("<|im_end|>")
    assert len(reply.split()) > 3 and "Which of them is the warmest?" in rest


def test_the_engines_replies_are_those_of_the_target_alone(report):
    [row] = report["served"]
    assert row["interleaved"] and row["speedup"] == pytest.approx(
        row["tokens_per_second"] / row["baseline_tokens_per_second"]
    )
    assert len(row["first_differences"]) == row["prompts"] - row["identical_replies"]
    assert report["diagnosis"] is None
