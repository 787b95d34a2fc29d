"""Hub sets: read at one commit from first use to the end of the stage, however the hub moves on. The hub is a server
of the test's own; only the download of the rows is not its."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from draftsmith.core.errors import UserError
from draftsmith.core.manifest import read_manifest
from draftsmith.core.revisions import content, recorded_revisions
from draftsmith.core.run import RunFolder
from draftsmith.core.samples import read_samples
from draftsmith.core.target import resolve_target
from draftsmith.data import stage
from draftsmith.data.rows import Row
from draftsmith.data.stage import prepare
from draftsmith.eval.prompts import PromptSets

OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture
def hub(monkeypatch):
    """Answers `dataset_info` for org/set and org/bench with `commit`; `asked` are the names it was asked for."""
    import datasets
    import huggingface_hub.constants

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            httpd.asked.append(self.path)
            known = "/org/set" in self.path or "/org/bench" in self.path
            data = json.dumps({"id": "org/set", "sha": httpd.commit, "siblings": []}).encode()
            self.send_response(200 if known else 404)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args):
            pass

    def load_dataset(name, subset, split, revision, streaming):
        httpd.read.append((name, revision))
        if name == "org/bench":
            return [{"prompt": f"of the bench {revision[:3]}"}]
        return [{"prompt": f"{revision[:3]} question {i}"} for i in range(12 if revision == OLD else 5)]

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.commit, httpd.asked, httpd.read = OLD, [], []
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{httpd.server_port}")
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    threading.Thread(target=httpd.serve_forever, args=(0.01,), daemon=True).start()
    yield httpd
    httpd.shutdown()
    httpd.server_close()


def answer(config, target, conversations, journal):
    for i in range(len(conversations)):
        yield Row(i, 0, [5, 6, 7, *[200 + i] * 4, 1], [(3, 8)], "stop", "target")


@pytest.fixture
def config(make_config, monkeypatch):
    monkeypatch.setattr(stage, "regenerate", answer)
    data = {"sources": [{"path": "hf:org/set"}], "eval_share": 0.25, "draft_vocab_size": 8, "dedup": {"near": False}}
    return make_config(data=data, eval={"sets": ["hf:org/bench"]})


def test_a_stopped_prepare_goes_on_with_the_commit_that_it_began_with(config, hub, monkeypatch):
    journals = []

    def stops(config, target, conversations, journal):
        journals.append(journal)
        yield next(answer(config, target, conversations, journal))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(stage, "regenerate", stops)
        prepare(config)
    hub.commit, asked = NEW, len(hub.asked)

    def goes_on(config, target, conversations, journal):
        journals.append(journal)
        return answer(config, target, conversations, journal)

    monkeypatch.setattr(stage, "regenerate", goes_on)
    prepare(config)
    assert journals[0] == journals[1] and len(hub.asked) == asked
    assert {revision for _, revision in hub.read} == {OLD}
    run = RunFolder.of(config)
    assert len(read_samples(run.samples)) == 12
    manifest = read_manifest(run.samples)
    assert manifest["inputs"]["data"]["sources"][0]["revision"] == OLD
    assert manifest["revisions"] == {"hf:org/set@main": OLD, "hf:org/bench@main": OLD}
    assert manifest["not_in"] == {"hf:org/bench": OLD}


def test_finished_samples_need_no_hub_and_stay_what_they_are(config, hub, changed, capsys):
    prepare(config)
    hub.commit, asked = NEW, len(hub.asked)
    prepare(config)
    assert len(hub.asked) == asked
    said = capsys.readouterr().out
    assert "already there" in said and "warning: the samples" not in said
    prepare(changed(config, data={"sources": [{"path": "hf:org/set", "revision": OLD}]}))  # says what was found
    with pytest.raises(UserError, match=r"data\.sources\[0\]\.revision is \"a+\" there and \"b+\" in"):
        prepare(changed(config, data={"sources": [{"path": "hf:org/set", "revision": NEW}]}))


def test_evaluation_reads_its_sets_as_they_were_when_they_were_looked_for(config, hub):
    prepare(config)
    hub.commit, run = NEW, RunFolder.of(config)
    assert content("hf:org/bench", recorded_revisions(run)) == OLD
    hub.read.clear()
    sets = PromptSets(config, resolve_target(config.target)).sets
    assert [s.name for s in sets] == ["held_out", "bench"] and hub.read == [("org/bench", OLD)]


def test_a_new_run_reads_the_hub_as_it_is_now(config, hub, changed):
    prepare(config)
    hub.commit = NEW
    other = changed(config, run={"name": "other"})
    prepare(other)
    assert len(read_samples(RunFolder.of(other).samples)) == 5


def test_a_commit_in_the_config_is_not_asked_for_and_a_branch_is(config, hub, changed):
    config = changed(config, eval={"sets": []})
    prepare(changed(config, data={"sources": [{"path": "hf:org/set", "revision": NEW}]}))
    assert not hub.asked and {revision for _, revision in hub.read} == {NEW}
    hub.read.clear()
    prepare(changed(config, run={"name": "b"}, data={"sources": [{"path": "hf:org/set", "revision": "v1"}]}))
    assert [path.rpartition("/")[2] for path in hub.asked] == ["v1"] and {r for _, r in hub.read} == {OLD}


def test_a_set_that_the_hub_does_not_know_is_said_and_leaves_no_run(config, hub, changed, monkeypatch, tmp_path):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    config = changed(config, data={"sources": [{"path": "hf:org/other"}]})
    with pytest.raises(UserError, match=r"`hf:org/other`: its revision `main` was not found: .*give the folder"):
        prepare(config)
    assert not RunFolder.of(config).root.exists()
