"""The report: numbers in JSON by its schema, one self-contained HTML file, and Markdown with the same rows."""

import html.parser
import json
import re
import shutil
import subprocess

import jsonschema
import pytest
from pydantic import ValidationError

from draftsmith.core.errors import UserError
from draftsmith.core.run import RunFolder
from draftsmith.eval.report import read_report, write_report
from draftsmith.eval.schema import report_schema
from draftsmith.eval.tables import summaries


def make_report(name="held_out"):
    served = {
        "k": 3, "temperature": 0.0, "prompts": 4, "per_position": [0.5, 0.25, 0.125], "drafts": 80, "accepted": 70,
        "tokens": 150, "tokens_per_second": 90.25, "baseline_tokens_per_second": 50.5, "identical_replies": 3,
        "ci95": [1.81, 1.93], "first_token_ms": 12.5, "inter_token_ms": 3.25, "baseline_first_token_ms": 11.75,
        "baseline_inter_token_ms": 6.5, "interleaved": True, "first_differences": [17],
    }  # fmt: skip
    replay = {
        "temperature": 0.0, "rounds": 80, "samples": 4, "exact": True, "method": "exact", "ci95": [1.7, 2.05],
    }  # fmt: skip
    rows = [
        {**replay, "k": 1, "acceptance_length": 1.5, "per_position": [0.5]},
        {**replay, "k": 3, "acceptance_length": 1.875, "per_position": [0.5, 0.25, 0.125]},
    ]
    agreement = {"k": 3, "temperature": 0.0, "method": "exact", "replayed": 1.875, "falls_short": False}
    return {
        "replay": rows,
        "replay_by_source": [{"source": name, **row} for row in rows],
        "served": [
            {**served, "set": name, "concurrency": 1, "acceptance_length": 1.875, "speedup": 1.787},
            {**served, "set": name, "concurrency": 8, "acceptance_length": 1.862, "speedup": 1.411},
        ],
        "agreement": [
            {**agreement, "concurrency": 1, "served": 1.875, "difference": 0.0},
            {**agreement, "concurrency": 8, "served": 1.862, "difference": -0.0069},
        ],
        "objective": {
            "checkpoint": "step-0000011", "loss": "soft_ce", "loss_per_step": [3.25, 3.5],
            "supervised_rows_per_step": [90, 80], "accuracy_per_step": [0.41, 0.3],
        },
        "diagnosis": None,
        "remarks": [],
        "settings": {
            "target": {"path": "tiny"}, "checkpoint": "step-0000011", "layer_ids": [3, 4, 5], "prefix_caching": False,
            "chat_template": "applied", "prompts": "served_prompts.parquet",
        },
        "versions": {"python": "3.11", "vllm": "0.32.0"},
    }  # fmt: skip


@pytest.fixture(scope="module")
def _written():
    return {}


@pytest.fixture
def written(make_config, tmp_path_factory, _written):
    """`written(report)`: the folder of its files; plots take time, so equal reports are written once."""

    def write(report):
        key = json.dumps(report)
        if key not in _written:
            config = make_config(run={"name": "test", "dir": str(tmp_path_factory.mktemp("report"))})
            run = RunFolder.of(config)
            run.root.mkdir(parents=True, exist_ok=True)
            rows = [{"step": s, "loss_per_step": [4.0 / s, 5.0]} for s in (1, 2)] + [
                {"step": 2, "eval_loss_per_step": [2, 5]}
            ]
            run.metrics.write_text("".join(json.dumps(r) + "\n" for r in rows))
            write_report(run, config, report)
            _written[key] = run.eval
        return _written[key]

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
        "plots/acceptance_by_position.png", "plots/acceptance_by_set.png", "plots/loss.png",
        "plots/replay_against_served.png", "plots/speedup_by_concurrency.png",
        "report.html", "report.json", "report.md",
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
    assert len(images) == 5 and all(link.startswith("data:image/png;base64,iVBOR") for link in images)


def test_the_page_shows_every_row(written):
    cells = page(written(make_report())).cells
    for wanted in (
        "1.875",
        "1.862",
        "90.2",
        "50.5",
        "1.79",
        "1.41",
        "3/4",
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
    replayed = [r for r in rows if len(r) == 8 and r[0] in "13"]
    assert [r[2] for r in replayed] == ["**1.500**", "**1.875**"] and replayed[1][3] == "1.700 to 2.050"
    assert ["2", "3.5000", "0.300", "80"] in rows


def test_the_markdown_links_its_plots(written):
    folder = written(make_report())
    for file in re.findall(r"!\[.*?\]\((.*?)\)", (folder / "report.md").read_text()):
        assert (folder / file).is_file()


def test_sampled_replies_are_called_an_estimate(written):
    report = make_report()
    for row in report["replay"]:
        row |= {"exact": False, "method": "sampled"}
    folder = written(report)
    assert "an estimate" in (folder / "report.html").read_text() and "an estimate" in (folder / "report.md").read_text()


def test_a_run_without_held_out_samples_is_reported_too(written):
    nothing = {"replay": [], "replay_by_source": [], "agreement": [], "objective": None}
    folder = written({**make_report(), **nothing})
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
    assert [len(r) for r in rows if r[5:6] in (["**1.875**"], ["**1.862**"])] == [13, 13]
    assert "<script>" not in (folder / "report.md").read_text()


def test_a_name_that_looks_like_mathematics_is_plotted_as_it_is(written):
    assert (written(make_report("cost$_{$")) / "plots/acceptance_by_position.png").is_file()


def test_a_missing_report_is_named(tmp_path):
    with pytest.raises(UserError, match="Run `draftsmith eval` first"):
        read_report(tmp_path)


# ---- the schema ------------------------------------------------------------------------------------------------------


def test_a_report_is_what_its_schema_says(written):
    folder = written(make_report())
    jsonschema.validate(json.loads((folder / "report.json").read_text()), json.loads(report_schema()))


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r.pop("agreement"),
        lambda r: r["served"][0].update(acceptance_length="1.875"),
        lambda r: r["served"][0].update(drafts=None),
        lambda r: r["replay"][0].update(ci95=[1.0]),
        lambda r: r["replay"][0].update(per_position=[1.2]),
        lambda r: r["replay"][0].update(acceptance_length=float("nan")),
        lambda r: r.update(other=1),
    ],
)
def test_a_report_that_is_not_is_never_written(make_config, change):
    report = make_report()
    change(report)
    config = make_config()
    with pytest.raises(ValidationError):
        write_report(RunFolder.of(config), config, report)
    assert not RunFolder.of(config).eval.exists()


def test_every_field_of_the_schema_that_needs_words_has_them():
    served = json.loads(report_schema())["$defs"]["ServedRow"]["properties"]
    for name in ("acceptance_length", "drafts", "interleaved", "first_differences"):
        assert served[name]["description"]


# ---- more than a few rows --------------------------------------------------------------------------------------------


def sweep():
    report = make_report()
    row = report["served"][0]
    report["served"] = [
        {**row, "set": s, "k": k, "concurrency": c, "per_position": [0.5] * k, "speedup": 1.0 + c / k, "drafts": 10 * k}
        for s in ("held_out", "mt_bench", "gsm8k")
        for k in (3, 7)
        for c in (1, 8, 32)
    ]
    return report


def test_a_sweep_is_summed_up_by_set_and_by_concurrency(written):
    found = summaries(sweep())
    assert found["columns"] == [(0.0, 3), (0.0, 7)]
    assert [name for name, _ in found["by_set"]] == ["held_out", "mt_bench", "gsm8k"]
    assert found["by_set"][0][1] == pytest.approx([1 + 70 / 30, 2.0])  # 3 x 70 of 3 x 30 and of 3 x 70 rounds
    assert [n for n, _ in found["by_concurrency"]] == [1, 8, 32]
    assert found["by_concurrency"][1][1] == pytest.approx([1 + 8 / 3, 1 + 8 / 7])  # equal in all sets
    text = (written(sweep()) / "report.html").read_text()
    assert "Acceptance length by set" in text and "18 measured passes" in text


def test_a_server_without_a_baseline_has_dashes(written):
    report = make_report()
    for row in report["served"]:
        row |= dict.fromkeys(
            ("baseline_tokens_per_second", "baseline_first_token_ms", "baseline_inter_token_ms", "speedup",
             "identical_replies", "first_differences")
        )  # fmt: skip
    folder = written(report)
    assert "12.5 / -" in page(folder).cells and not (folder / "plots/speedup_by_concurrency.png").exists()


def test_a_diagnosis_is_at_the_top(written):
    report = make_report()
    finding = {"error": 0.9, "bound": 0.02, "detail": "hidden_norm"}
    report["diagnosis"] = {
        "first_difference": "hidden_norm",
        "findings": [
            {**finding, "part": "fc", "error": 0.001, "agrees": True},
            {**finding, "part": "hidden_norm", "agrees": False},
        ],
    }
    folder = written(report)
    assert "First difference between trainer and engine: <b>hidden_norm</b>" in (folder / "report.html").read_text()
    assert ["hidden_norm", "0.90000", "**no**", "hidden_norm"] in markdown_rows(folder)


def test_remarks_are_above_the_tables(written):
    report = make_report()
    report["remarks"] = ["held_out, K = 3: the machine was busy; measure again."]
    folder = written(report)
    assert '<div class="warning">held_out, K = 3: the machine was busy' in (folder / "report.html").read_text()
    assert "**Remark.** held_out, K = 3: the machine" in (folder / "report.md").read_text().split("## Served")[0]


def test_prefix_caching_and_the_template_are_in_the_report(written):
    """E2, E3: figures without them do not compare."""
    folder = written(make_report())
    for file in ("report.html", "report.md"):
        assert "Prefix caching off, chat template applied" in (folder / file).read_text()
    assert read_report(folder)["versions"]["vllm"] == "0.32.0"


# ---- in a browser ----------------------------------------------------------------------------------------------------

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


@pytest.mark.slow
@pytest.mark.parametrize("report", [make_report(), sweep()], ids=["short", "sweep"])
def test_the_page_opens_in_a_browser_without_a_request(written, tmp_path, report):
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
    page, log, shot = written(report) / "report.html", tmp_path / "net.json", tmp_path / "page.png"
    done = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage",
         f"--log-net-log={log}", f"--screenshot={shot}", "--window-size=1100,2400", "--enable-logging=stderr",
         "--dump-dom", page.as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Served on vLLM" in done.stdout and "CONSOLE" not in done.stderr
    requested = set(re.findall(r'"(?:original_)?url":"([^"]+)"', log.read_text()))
    assert not [u for u in requested if not u.startswith(("file:", "data:"))]
    assert shot.stat().st_size > 20_000
