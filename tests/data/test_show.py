"""Looking at samples: supervised tokens stand out, figures agree with the samples, pages hold what they need."""

import re

import pytest
from typer.testing import CliRunner

from draftsmith.core.cli import app
from draftsmith.core.run import RunFolder
from draftsmith.core.samples import Sample, read_samples
from draftsmith.core.target import resolve_target
from draftsmith.core.vocabulary import make_vocabulary
from draftsmith.data.plots import read_lengths
from draftsmith.data.sheet import Examples, sheet_html


@pytest.fixture
def say(tokenizer):
    """`say(prompt, reply, ...)`: a sample of that text."""

    def make(sample_id, *parts, source="s"):
        ids, spans = [], []
        for i, part in enumerate(parts):
            start = len(ids)
            ids += tokenizer.encode(part)
            if i % 2:
                spans.append((start, len(ids)))
        return Sample(sample_id, ids, spans, source, "stop", "train", "target", sample_id.split("/")[0], 0)

    return make


@pytest.fixture
def shown(synthetic_run, config_file, say):
    """`shown(command, ...)`: what the command prints about a run of two samples."""
    from draftsmith.core.samples import write_samples

    path = config_file(synthetic_run)
    parts = [
        say("one/0", "the user asks 日本", "the assistant <b>answers</b> 🙂", "again", "more"),
        say("two/0", "question", "reply"),
    ]
    write_samples(RunFolder.of(synthetic_run).samples, parts)

    def run(*args):
        return CliRunner().invoke(app, ["data", args[0], "--config", path, *args[1:]])

    return run


def test_show_marks_exactly_the_supervised_text(shown):
    said = shown("show").output
    assert re.findall("⟦(.*?)⟧", said, re.DOTALL) == ["the assistant <b>answers</b> 🙂", "more", "reply"]
    assert "the user asks 日本⟦" in said and "⟧again⟦" in said


def test_show_finds_a_sample_by_its_own_and_its_conversations_id(shown):
    for row in ("two/0", "two"):
        said = shown("show", "--row", row).output
        assert "⟦reply⟧" in said and "one/0" not in said
    assert "two/0" not in shown("show", "-n", "1").output


def test_show_prints_ids_where_they_are_asked_for(shown, tokenizer):
    assert str(tokenizer.encode("reply")) in shown("show", "--row", "two", "--ids").output
    assert str(tokenizer.encode("reply")) not in shown("show", "--row", "two").output


def test_an_id_that_no_sample_has_is_said(shown):
    result = shown("show", "--row", "nobody")
    assert "no sample `nobody`" in str(result.exception)


@pytest.mark.parametrize("command", ["show", "stats"])
def test_without_samples_prepare_is_named(make_config, config_file, command):
    result = CliRunner().invoke(app, ["data", command, "--config", config_file(make_config())])
    assert "Run `draftsmith prepare`" in str(result.exception)


@pytest.fixture
def figures(tally_of, say, target):
    """Samples of two sources, and their figures."""
    samples = [say(f"{s}{i}/0", "p" * (i + 1), "the reply", source=s) for s in ("alpha", "beta") for i in range(12)]
    tally = tally_of(["alpha", "beta"])
    for sample in samples:
        tally.use(sample)
    return samples, tally.figures()


def test_the_figures_are_those_of_the_samples(figures):
    samples, found = figures
    assert found["tokens"] == sum(len(s.input_ids) for s in samples)
    assert found["sources"]["beta"]["lengths"]["max"] == max(len(s.input_ids) for s in samples)


def test_stats_print_every_source_and_a_picture_where_asked(synthetic_run, config_file, figures, tmp_path):
    from draftsmith.core.manifest import read_manifest, write_manifest
    from draftsmith.core.samples import write_samples

    samples, found = figures
    folder = RunFolder.of(synthetic_run).samples
    write_samples(folder, samples)
    inputs = read_manifest(folder)["inputs"]
    write_manifest(folder, "prepare", inputs, {**found, "skipped": {"not_json": 3}, "removed": {"near_duplicate": 2}})
    assert not CliRunner().invoke(app, ["data", "stats", "--config", config_file(synthetic_run)]).exception  # none yet
    make_vocabulary(synthetic_run, RunFolder.of(synthetic_run), resolve_target(synthetic_run.target))
    plot = tmp_path / "plot.png"
    result = CliRunner().invoke(app, ["data", "stats", "--config", config_file(synthetic_run), "--plot", str(plot)])
    assert not result.exception
    for text in (
        "alpha",
        "beta",
        "all",
        "24",
        "3 not_json",
        "2 near_duplicate",
        "100.0%",
        "24 stop",
        "vocabulary of 128 tokens",
    ):
        assert text in result.output
    assert plot.read_bytes().startswith(b"\x89PNG")
    before = {p.name for p in folder.parent.iterdir()}
    assert not CliRunner().invoke(app, ["data", "stats", "--config", config_file(synthetic_run)]).exception
    assert {p.name for p in folder.parent.iterdir()} == before  # nothing is written that was not asked for
    lengths = read_lengths(folder)
    assert {k: sorted(v.tolist()) for k, v in lengths.items()} == {
        s: sorted(len(x.input_ids) for x in samples if x.source == s) for s in ("alpha", "beta")
    }


def test_the_sheet_shows_some_samples_of_every_source_and_needs_nothing_else(
    synthetic_run, tokenizer, figures, tmp_path, say
):
    from draftsmith.core.samples import write_samples

    samples, found = figures
    write_samples(tmp_path, samples)
    examples = Examples()
    for sample in [*samples, say("x/0", "<script>alert(1)</script>", "<mark>", source="beta")]:
        examples.see(sample)
    assert [s.source for s in examples.samples()] == ["alpha"] * 5 + ["beta"] * 5
    page = sheet_html(synthetic_run, tokenizer, tmp_path, found, examples)
    assert page.count("<h3>") == 10 and page.count('<mark title="') == 10 and "<script" not in page
    assert "data:image/png;base64," in page and "http" not in page


def test_the_synthetic_samples_are_still_read(synthetic_run):
    assert len(read_samples(RunFolder.of(synthetic_run).samples)) == 24
