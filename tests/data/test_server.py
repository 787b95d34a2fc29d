"""A server that answers the prompts: vLLM's protocol, and everything else that may answer at its URL.

The server here is the tests' own; the real one is in tests/pipeline.
"""

import asyncio
import json
import os
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from draftsmith.core.conversations import Conversation
from draftsmith.core.errors import StageFailed, UserError
from draftsmith.core.run import RunFolder
from draftsmith.core.samples import read_samples
from draftsmith.core.target import resolve_target
from draftsmith.data.journal import FILE, Journal
from draftsmith.data.regenerate import regenerate
from draftsmith.data.rows import Row
from draftsmith.data.stage import prepare


def talk(*turns, name="c"):
    return Conversation(name, "s", f"s.jsonl, line {name}", tuple({"role": "user", "content": t} for t in turns))


TWO_TURNS = talk("one", "two")


@pytest.fixture
def server():
    """Answers as vLLM's `/v1/completions` does; `faults` are HTTP codes that the next requests get instead."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            models = {"data": [{"id": "tiny", "root": "tiny", "max_model_len": httpd.longest}]}
            self.send(*(httpd.odd_models or (models,)))

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if httpd.hold(body):
                httpd.released.wait(30)
            if httpd.odd is not None:
                return self.send(*httpd.odd)
            if httpd.faults:
                return self.send({"error": "told to"}, httpd.faults.pop())
            httpd.bodies.append(body)
            ids = httpd.reply(body)
            choice = {"token_ids": ids, "prompt_token_ids": body["prompt"], "finish_reason": "stop", **httpd.changes}
            self.send({"choices": [choice]})

        def send(self, value, code=200, headers=()):
            data = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(code)
            for name, text in headers:
                self.send_header(name, text)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args):
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.faults, httpd.bodies, httpd.changes, httpd.longest = [], [], {}, 64
    httpd.odd = httpd.odd_models = None
    httpd.reply = lambda body: [5 + sum(body["prompt"]) % 50, 7, 1]
    httpd.hold, httpd.released = (lambda body: False), threading.Event()
    threading.Thread(target=httpd.serve_forever, args=(0.01,), daemon=True).start()
    yield httpd
    httpd.released.set()
    httpd.shutdown()
    httpd.server_close()


@pytest.fixture
def ask(make_config, changed, server, tmp_path):
    config = make_config(data={"max_length": 64, "sampling": {"max_tokens": 8}})
    resolved = resolve_target(config.target)

    def run(talks, sampling=(), **more):
        settings = {"url": f"http://127.0.0.1:{server.server_port}/v1", "retry_wait": 0.0, "retries": 2, **more}
        wanted = config.data.sampling.model_dump() | dict(sampling)
        served = changed(config, data={"server": settings, "sampling": wanted})
        return list(regenerate(served, resolved, talks, tmp_path / "journal"))

    return run


def test_a_server_gives_the_rows_that_an_engine_would(ask, server):
    server.faults = [503, 429]
    rows = ask([TWO_TURNS] * 5, concurrency=3)
    assert [type(r) for r in rows] == [Row] * len(rows) and {r.conversation for r in rows} == set(range(5))
    assert {body["return_token_ids"] for body in server.bodies} == {True}
    assert all(body["temperature"] == 0.0 and body["max_tokens"] <= 8 for body in server.bodies)
    for row in rows:
        for start, end in row.loss_spans:
            assert row.input_ids[start:end] == [5 + sum(row.input_ids[:start]) % 50, 7, 1]


def test_a_server_that_dies_stops_the_stage_and_the_replies_are_kept(ask, server, tmp_path):
    ask([TWO_TURNS])
    server.faults = [500] * 3
    with pytest.raises(StageFailed, match="run the same command"):
        ask([TWO_TURNS, talk("new", name="2")])
    assert len(Journal(tmp_path / "journal")) == 2
    assert len([r for r in ask([TWO_TURNS, talk("new", name="2")]) if isinstance(r, Row)]) >= 2
    assert len(server.bodies) == 3


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"token_ids": None}, "returns no token ids"),
        ({"prompt_token_ids": [1, 2]}, "says it used 2 others"),
    ],
)
def test_a_server_whose_ids_cannot_be_trusted_is_refused(ask, server, changes, said):
    server.changes = changes
    with pytest.raises(UserError, match=said):
        ask([TWO_TURNS])


def test_a_server_that_is_not_there_or_too_short_or_another_is_refused_at_once(ask, server):
    with pytest.raises(UserError, match="serves tiny"):
        ask([TWO_TURNS], model="other")
    with pytest.raises(UserError, match="no such environment variable"):
        ask([TWO_TURNS], api_key_env="DRAFTSMITH_NO_SUCH_KEY")
    server.longest = 32
    with pytest.raises(UserError, match="32 tokens of context"):
        ask([TWO_TURNS])
    with pytest.raises(UserError, match="no OpenAI-compatible server answers"):
        ask([TWO_TURNS], url="http://127.0.0.1:9")
    assert not server.bodies


def test_every_value_that_a_server_would_fill_in_is_sent(ask, server):
    """A server fills in what generation_config.json recommends; an engine of our own does not."""
    ask([TWO_TURNS])
    assert {k: server.bodies[0][k] for k in ("temperature", "top_p", "top_k", "min_p")} == {
        "temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0
    }  # fmt: skip
    penalties = {"repetition_penalty": 1.05, "presence_penalty": 1.5, "frequency_penalty": -0.5}
    assert [server.bodies[0][k] for k in penalties] == [1.0, 0.0, 0.0]
    ask([talk("new")], sampling={"temperature": 1.0, "min_p": 0.1, "top_k": 20, "top_p": 0.95, **penalties})
    asked = {"temperature": 1.0, "min_p": 0.1, "top_k": 20, "top_p": 0.95, **penalties}
    assert {k: server.bodies[-1][k] for k in asked} == asked


def test_what_greedy_replies_do_not_read_is_said(ask, capsys):
    ask([TWO_TURNS], sampling={"top_k": 20, "min_p": 0.1})
    assert (
        "at data.sampling.temperature 0 replies are greedy, whatever data.sampling.top_k, data.sampling.min_p says"
        in (" ".join(capsys.readouterr().out.split()))
    )


def test_a_whole_prepare_with_several_replies(make_config, server, tmp_path):
    """Near-duplicates are dropped among the prompts, and no reply is one; equal ones are used once, and counted."""
    source = tmp_path / "s.jsonl"
    prompts = [f"tell me about the {w} in the garden of my neighbour" for w in ("oak", "elm", "ash", "fir", "yew")]
    source.write_text(
        "".join(json.dumps({"id": p.split()[4], "prompt": p}) + "\n" for p in [*prompts, prompts[0] + "!"])
    )
    server.reply = lambda body: [5 + body["seed"] % 2, 6 + len(body["prompt"]) % 3, 7, 1]
    server.longest = 256
    config = make_config(
        data={
            "sources": [{"path": str(source)}], "max_length": 128, "draft_vocab_size": 64, "eval_share": 0.4,
            "sampling": {"max_tokens": 8, "temperature": 1.0, "replies": 4},
            "server": {"url": f"http://127.0.0.1:{server.server_port}"},
        }
    )  # fmt: skip
    prepare(config)
    assert len(server.bodies) == 4 * 5
    folder = RunFolder.of(config).samples
    samples = read_samples(folder)
    replies = [tuple(s.input_ids) for s in samples]
    assert 5 < len(replies) == len(set(replies)) <= 10
    sides = {(s.conversation_id, s.split) for s in samples}
    assert len(sides) == 5 and {split for _, split in sides} == {"train", "eval"}
    removed = json.loads((folder / "manifest.json").read_text())["removed"]
    assert removed == {"near_duplicate": 1, "same_reply": 20 - len(samples)}
    assert f"{20 - len(samples)} same_reply" in (folder / "sheet.html").read_text()


# ---- what ends it ----------------------------------------------------------------------------------------------------


def test_replies_that_came_in_beside_an_error_are_kept(ask, server, tmp_path, monkeypatch):
    """All four at one moment; whichever the loop looks at first, the three good ones are recorded."""
    asked, together = [], asyncio.Event()

    async def answer(client, settings, sampling, model, request):
        asked.append(request)
        if len(asked) == 4:
            together.set()
        await together.wait()
        if request.conversation == 1:
            raise UserError("refused", "mend")
        return [5, 7, 1], "stop"

    talks = [talk(f"question {i}", name=str(i)) for i in range(4)]
    with monkeypatch.context() as patch, pytest.raises(UserError, match="refused"):
        patch.setattr("draftsmith.data.server._ask", answer)
        ask(talks, concurrency=4)
    assert len(Journal(tmp_path / "journal")) == 3
    assert len(ask(talks)) == 4 and len(server.bodies) == 1


@pytest.mark.parametrize("ends", ["error", "Ctrl-C"])
def test_nobody_waits_for_what_is_still_running(ask, server, tmp_path, ends):
    """One prompt is answered, one never is; then a third is refused, or the user has enough."""
    talks = [talk(f"question {i}", name=str(i)) for i in range(3)]
    ask(talks)
    first, held, _ = [body["prompt"] for body in server.bodies]
    journal = tmp_path / "journal" / FILE
    journal.write_bytes(b"")

    def hold(body):
        if body["prompt"] not in (first, held):
            wait_until(lambda: journal.read_bytes().count(b"\n") == 1)
            if ends == "error":
                server.odd = ({"error": "no"}, 400)
            else:
                os.kill(os.getpid(), signal.SIGINT)
                return True
        return body["prompt"] == held

    server.hold = hold
    begin = time.monotonic()
    with pytest.raises(UserError if ends == "error" else KeyboardInterrupt):
        ask(talks, concurrency=3)
    assert time.monotonic() - begin < 15
    assert len(Journal(tmp_path / "journal")) == 1

    # The process would wait for them before it ends; one that has heard of it may need a moment.
    def left():
        return [t for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]

    wait_until(lambda: not left())
    assert not left()


def wait_until(holds, seconds=10):
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)


def test_a_wait_before_another_try_ends_with_everything_else(ask, server):
    server.faults = [503]

    def hold(body):
        if not server.faults:
            server.odd = ({"error": "no"}, 400)
        return False

    server.hold = hold
    begin = time.monotonic()
    with pytest.raises(UserError, match="refuses"):
        ask([talk("one"), talk("two", name="2")], concurrency=2, retry_wait=60.0)
    assert time.monotonic() - begin < 15


# ---- what else may answer --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        ((b"<html>Sign in</html>",), r"no completion: HTTP 200: <html>Sign in</html>"),
        (({"error": {"message": "asleep"}},), r"no completion: HTTP 200: .*asleep"),
        (({"choices": []},), r"no completion: HTTP 200: .*choices"),
        (([1],), r"no completion: HTTP 200: \[1\]"),
        (({"choices": ["x"]},), "no completion"),
        (({"choices": [{"token_ids": ["a"], "finish_reason": "stop"}]},), "returns no token ids"),
        (({"choices": [{"token_ids": [5], "finish_reason": "stop", "prompt_token_ids": 3}]},), "it used 3 others"),
        ((b"", 204), r"HTTP 204: no body"),
    ],
    ids=str,
)
def test_an_odd_answer_is_said_with_its_url_and_its_start(ask, server, odd, said):
    server.odd = odd
    with pytest.raises(UserError, match=said) as error:
        ask([TWO_TURNS])
    assert f"http://127.0.0.1:{server.server_port}" in str(error.value)


def test_a_redirect_is_said_with_where_it_leads(ask, server):
    for place in ("odd_models", "odd"):
        setattr(server, place, (b"moved", 307, [("Location", "https://new/v1")]))
        with pytest.raises(UserError, match=r"127\.0\.0\.1:\d+.*HTTP 307, to https://new/v1: moved"):
            ask([TWO_TURNS])
        server.odd_models = None


@pytest.mark.parametrize(
    "odd", [(b"<html>",), ({"data": None},), ([],), ({"data": [{"name": "x"}]},), ({"detail": "key"}, 401)], ids=str
)
def test_what_is_no_list_of_models_is_said(ask, server, odd):
    server.odd_models = odd
    with pytest.raises(UserError, match=r"no OpenAI-compatible server answers at http.*/v1/models: HTTP (200|401): .+"):
        ask([TWO_TURNS])


@pytest.mark.parametrize(
    "url", ["http://host:port", "http://[::1", "http://host:99999", "http://a b", "http://\u2603."]
)
def test_an_invalid_url_is_said(ask, url):
    with pytest.raises(ValueError, match=r"data\.server\.url"):
        ask([TWO_TURNS], url=url)


def test_a_key_that_no_header_can_hold_is_said(ask, monkeypatch):
    monkeypatch.setenv("SOME_KEY", "caf\u00e9\n")
    with pytest.raises(UserError, match="`SOME_KEY` is no plain text"):
        ask([TWO_TURNS], api_key_env="SOME_KEY")
