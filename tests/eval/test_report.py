"""The report: numbers in JSON, one self-contained HTML file, and Markdown with the same rows."""

import html.parser
import json
import re

import pytest

from draftsmith.core.errors import UserError
from draftsmith.core.run import RunFolder
from draftsmith.eval.report import read_report, write_report
from draftsmith.eval.served import Served, report_rows


def make_report(name="held_out"):
    served = {
        "k": 3, "temperature": 0.0, "prompts": 4, "per_position": [0.5, 0.25, 0.125], "drafts": 80, "accepted": 70,
        "tokens": 150, "tokens_per_second": 90.25, "baseline_tokens_per_second": 50.5, "identical_replies": 4,
    }  # fmt: skip
    replay = {"temperature": 0.0, "rounds": 80, "samples": 4, "exact": True, "ci95": [1.7, 2.05]}
    return {
        "replay": [
            {**replay, "k": 1, "acceptance_length": 1.5, "per_position": [0.5]},
            {**replay, "k": 3, "acceptance_length": 1.875, "per_position": [0.5, 0.25, 0.125]},
        ],
        "served": [
            {**served, "set": name, "concurrency": 1, "acceptance_length": 1.875, "speedup": 1.787},
            {**served, "set": name, "concurrency": 8, "acceptance_length": 1.862, "speedup": 1.411},
        ],
        "objective": {
            "checkpoint": "step-0000011", "loss": "soft_ce", "loss_per_step": [3.25, 3.5],
            "supervised_rows_per_step": [90, 80], "accuracy_per_step": [0.41, 0.3],
        },
        "settings": {"target": {"path": "tiny"}, "checkpoint": "step-0000011", "layer_ids": [3, 4, 5]},
        "versions": {"python": "3.11", "vllm": "0.32.0"},
    }  # fmt: skip


@pytest.fixture
def written(make_config):
    """`written(report)`: the folder of its files."""

    def write(report):
        config = make_config()
        run = RunFolder.of(config)
        run.root.mkdir(parents=True, exist_ok=True)
        rows = [{"step": s, "loss_per_step": [4.0 / s, 5.0]} for s in (1, 2)] + [
            {"step": 2, "eval_loss_per_step": [2, 5]}
        ]
        run.metrics.write_text("".join(json.dumps(r) + "\n" for r in rows))
        write_report(run, config, report)
        return run.eval

    return write


class Page(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.links, self.cells, self._open = [], [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [(tag, v) for k, v in attrs if k in ("src", "href", "srcset", "action", "data")]
        if tag == "td":
            self.cells.append("")
        self._open = tag == "td" or (self._open and tag == "b")

    def handle_endtag(self, tag):
        self._open = self._open and tag != "td"

    def handle_data(self, data):
        if self._open:
            self.cells[-1] += data


def page(folder):
    return Page((folder / "report.html").read_text(encoding="utf-8"))


def test_all_files_are_there(written):
    folder = written(make_report())
    assert sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()) == [
        "plots/acceptance_by_position.png", "plots/loss.png", "report.html", "report.json", "report.md",
    ]  # fmt: skip
    assert (folder / "plots/loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_json_holds_what_was_measured_as_numbers(written):
    report = make_report()
    folder = written(report)
    assert read_report(folder) == report
    row = json.loads((folder / "report.json").read_text())["served"][0]
    assert [type(row[k]) for k in ("acceptance_length", "tokens_per_second", "drafts")] == [float, float, int]
    replay = json.loads((folder / "report.json").read_text())["replay"][1]
    assert all(isinstance(x, float) for x in [*replay["ci95"], *replay["per_position"]])


def test_the_page_asks_for_nothing_from_elsewhere(written):
    folder = written(make_report())
    text = (folder / "report.html").read_text()
    assert all(link.startswith("data:") for _, link in page(folder).links)
    assert not {"script", "iframe", "object", "embed"} & set(page(folder).tags)
    rest = re.sub(r'"data:image/png;base64,[A-Za-z0-9+/=]+"', "", text)
    assert not re.search(r"https?:|[\"'(=\s]//|@import|url\(", rest)


def test_the_page_holds_its_plots(written):
    images = [link for tag, link in page(written(make_report())).links if tag == "img"]
    assert len(images) == 2 and all(link.startswith("data:image/png;base64,iVBOR") for link in images)


def test_the_page_shows_every_row(written):
    cells = page(written(make_report())).cells
    for wanted in (
        "1.875",
        "1.862",
        "90.2",
        "50.5",
        "1.79",
        "1.41",
        "4/4",
        "1.700 to 2.050",
        "0.500, 0.250, 0.125",
        "3.2500",
    ):
        assert wanted in cells, wanted


def markdown_rows(folder):
    lines = (folder / "report.md").read_text(encoding="utf-8").splitlines()
    return [[c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines if line.startswith("|")]


def test_the_markdown_shows_every_row(written):
    rows = markdown_rows(written(make_report()))
    served = [r for r in rows if r[0] == "held_out"]
    assert [r[3] for r in served] == ["1", "8"] and [r[5] for r in served] == ["**1.875**", "**1.862**"]
    replayed = [r for r in rows if len(r) == 7 and r[0] in "13"]
    assert [r[1] for r in replayed] == ["**1.500**", "**1.875**"] and replayed[1][2] == "1.700 to 2.050"
    assert ["2", "3.5000", "0.300", "80"] in rows


def test_the_markdown_links_its_plots(written):
    folder = written(make_report())
    for file in re.findall(r"!\[.*?\]\((.*?)\)", (folder / "report.md").read_text()):
        assert (folder / file).is_file()


def test_sampled_replies_are_called_an_estimate(written):
    report = make_report()
    for row in report["replay"]:
        row["exact"] = False
    folder = written(report)
    assert "an estimate" in (folder / "report.html").read_text() and "an estimate" in (folder / "report.md").read_text()


def test_a_run_without_held_out_samples_is_reported_too(written):
    folder = written({**make_report(), "replay": [], "objective": None})
    assert "1.862" in page(folder).cells and "Objective" not in (folder / "report.md").read_text()


def test_a_run_without_metrics_has_no_plot_of_the_loss(make_config):
    config = make_config()
    write_report(RunFolder.of(config), config, make_report())
    assert not (RunFolder.of(config).eval / "plots/loss.png").exists()


NAME = "<script>alert('a')</script>&|`x`"


def test_markup_in_the_name_of_a_set_is_text_on_the_page(written):
    parsed = page(written(make_report(NAME)))
    assert "script" not in parsed.tags and NAME in parsed.cells


def test_markup_in_the_name_of_a_set_breaks_no_row_of_the_markdown(written):
    folder = written(make_report(NAME))
    rows = markdown_rows(folder)
    assert [len(r) for r in rows if r[5:6] in (["**1.875**"], ["**1.862**"])] == [11, 11]
    assert "<script>" not in (folder / "report.md").read_text()


def test_a_name_that_looks_like_mathematics_is_plotted_as_it_is(written):
    assert (written(make_report("cost$_{$")) / "plots/acceptance_by_position.png").is_file()


def test_a_missing_report_is_named(tmp_path):
    with pytest.raises(UserError, match="Run `draftsmith eval` first"):
        read_report(tmp_path)


# ---- the served rows -------------------------------------------------------------------------------------------------


def test_rates_count_rounds_and_the_length_counts_the_bonus_token():
    ours = Served(
        "s",
        0.0,
        1,
        tokens=30,
        seconds=2.0,
        replies=[[1, 2], [3]],
        drafts=10,
        accepted=8,
        accepted_per_position=[5, 2, 1],
    )
    base = Served("s", 0.0, 1, tokens=20, seconds=4.0, replies=[[1, 2], [4]])
    (row,) = report_rows(3, [ours], [base])
    assert row["acceptance_length"] == 1.8 and row["per_position"] == [0.5, 0.2, 0.1]
    assert (row["tokens_per_second"], row["baseline_tokens_per_second"], row["speedup"]) == (15.0, 5.0, 3.0)
    assert row["identical_replies"] == 1 and row["prompts"] == 2


def test_every_row_stands_beside_its_own_baseline():
    ours = Served("a", 0.0, 1, 1, 1.0, [[1]])
    with pytest.raises(AssertionError):
        list(report_rows(3, [ours], [Served("b", 0.0, 1, 1, 1.0, [[1]])]))
