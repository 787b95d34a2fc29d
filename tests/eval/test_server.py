"""What a running server may do wrong, on a stand-in that answers as vLLM does; the real one is in tests/pipeline."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from draftsmith.core.errors import StageFailed, UserError
from draftsmith.eval.passes import Counters, Job
from draftsmith.eval.prompts import Prompt
from draftsmith.eval.server import server_sides


class Stand(ThreadingHTTPServer):
    """One server; every reply is the ids 7, 8, 9 in outputs of one and two tokens, one round of two drafts."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.speculates, self.busy, self.caching, self.ids, self.status, self.cut = True, 0, "False", True, 200, False
        self.rounds, self.asked = 5, []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def metrics(self):
        lines = [
            f'vllm:num_requests_running{{engine="0"}} {self.busy}',
            f'vllm:cache_config_info{{enable_prefix_caching="{self.caching}"}} 1',
        ]
        if self.speculates:
            lines += [
                f'vllm:spec_decode_num_drafts_total{{engine="0"}} {self.rounds}',
                f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {self.rounds}',
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {self.rounds}',
                'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 0',
            ]
        return "\n".join(lines) + "\n"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def answer(self, text, status=200):
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self):
        pages = {
            "/v1/models": json.dumps({"data": [{"id": "m", "max_model_len": 64, "root": "m"}]}),
            "/metrics": self.server.metrics(),
            "/version": '{"version": "0.32.0"}',
        }
        self.answer(pages.get(self.path, ""), 200 if self.path in pages else 404)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        if self.server.status != 200:
            self.answer('{"error": "too long"}', self.server.status)
            return
        self.server.rounds += 1
        outputs = [([7], None), ([8, 9], "length")]
        events = [
            {"choices": [{"text": "x", "finish_reason": r, **({"token_ids": t} if self.server.ids else {})}]}
            for t, r in outputs
        ]
        text = "".join(f"data: {json.dumps(e)}\n\n" for e in events) + "data: [DONE]\n\n"
        if self.server.cut:
            self.send_response(200)
            self.send_header("Content-Length", "100000")
            self.end_headers()
            self.wfile.write(text[:40].encode())
            self.close_connection = True
            return
        self.answer(text)


@pytest.fixture
def stand():
    server = Stand()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def config_of(make_config):
    return lambda url, **more: make_config(eval={"server": {"url": url, **more}, "concurrency": [2]})


JOB = Job("s", 1.0, 2, [Prompt(f"p{i}/0", [i, i + 1], 3) for i in range(3)], seed=11)


def test_streams_and_counters_become_a_pass(stand, config_of):
    with server_sides(config_of(f"{stand.url}/v1")) as [side]:
        done = side.measure(JOB)
    assert (side.k, side.context) == (2, 64)
    assert done.replies == [[7, 8, 9]] * 3 and done.outputs == [2] * 3 and done.finish_reasons == ["length"] * 3
    assert done.counters == Counters(3, 3, (3, 0))  # differences: 5 rounds of others were there before
    assert sorted(b["prompt"] for b in stand.asked) == [[0, 1], [1, 2], [2, 3]]
    assert {b["seed"] - b["prompt"][0] for b in stand.asked} == {11}
    assert all(b["temperature"] == 1.0 and b["top_p"] == 1.0 and b["top_k"] == 0 for b in stand.asked)


@pytest.mark.parametrize(("caching", "recorded"), [("True", True), ("False", False), ("", None)])
def test_prefix_caching_is_recorded_and_warned_of(stand, config_of, capsys, caching, recorded):
    """E2."""
    stand.caching = caching
    with server_sides(config_of(stand.url)) as [side]:
        assert side.settings["prefix_caching"] is recorded and side.settings["vllm"] == "0.32.0"
    assert ("--no-enable-prefix-caching" in capsys.readouterr().out) is (recorded is not False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"busy": 3}, "working on 3 requests of others"),
        ({"speculates": False}, "does not speculate"),
    ],
)
def test_a_server_that_cannot_be_measured_is_refused(stand, config_of, change, message):
    vars(stand).update(change)
    with pytest.raises(UserError, match=message), server_sides(config_of(stand.url)):
        pass


def test_a_baseline_that_speculates_is_refused(stand, config_of):
    with pytest.raises(UserError, match="speculates too"), server_sides(config_of(stand.url, baseline_url=stand.url)):
        pass


def test_no_server_is_named_with_its_url(config_of):
    with (
        pytest.raises(UserError, match=r"no vLLM server answers at http://127\.0\.0\.1:9 "),
        server_sides(config_of("http://127.0.0.1:9")),
    ):
        pass


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"status": 400}, UserError, r"refuses `p0/0`, 2 tokens: HTTP 400: .*too long"),
        ({"ids": False}, UserError, "streams no token ids"),
        ({"cut": True}, StageFailed, "stopped answering"),
    ],
)
def test_a_server_that_fails_within_a_pass_is_said(stand, config_of, change, kind, message):
    vars(stand).update(change)
    with server_sides(config_of(stand.url)) as [side], pytest.raises(kind, match=message):
        side.measure(Job("s", 0.0, 1, JOB.prompts[:1]))
