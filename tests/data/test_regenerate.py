"""What the target is asked and when, how a stopped run goes on, and the server's protocol; engines: tests/pipeline."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from draftsmith.core.conversations import Conversation, Skipped, TokenTurn
from draftsmith.core.errors import StageFailed, UserError
from draftsmith.core.target import load_tokenizer, resolve_target
from draftsmith.data.dialogues import Dialogues
from draftsmith.data.journal import FILE, Journal
from draftsmith.data.regenerate import regenerate
from draftsmith.data.rows import Row


def says(role, content, **more):
    return {"role": role, "content": content, **more}


def conversation(*messages, name="c", **more):
    return Conversation(name, "s", f"s.jsonl, line {name}", messages, **more)


TWO_TURNS = conversation(says("user", "one"), says("assistant", "dropped"), says("user", "two"))
WITH_TOOL = conversation(
    says("user", "weather?"),
    says("assistant", None, tool_calls=[{"type": "function", "function": {"name": "f", "arguments": "{}"}}]),
    says("tool", "sunny"),
    says("assistant", "It is sunny."),
    says("user", "thanks"),
)


@pytest.fixture
def target(make_config):
    config = make_config(data={"max_length": 64, "sampling": {"max_tokens": 8}})
    resolved = resolve_target(config.target)
    return config, resolved, load_tokenizer(resolved, config.target)


def reply_to(request):
    """Stands for a greedy target: the same prompt, the same reply; it ends in the tiny target's end token."""
    return [5 + sum(request.prompt_ids) % 50, 7, 1], "stop"


def answer_all(dialogues, reply=reply_to, most=None):
    asked = []
    while (most is None or len(asked) < most) and (request := dialogues.take()):
        asked.append(request)
        dialogues.accept(request, *reply(request))
    return asked


def rows_of(journal):
    return list(journal.rows(journal.confirmed()))


def test_the_second_prompt_holds_the_targets_own_reply(target, tmp_path):
    config, _, tokenizer = target
    dialogues = Dialogues(config, tokenizer, [TWO_TURNS], Journal(tmp_path))
    first, second = answer_all(dialogues)
    said = tokenizer.decode(reply_to(first)[0][:-1])
    assert said in tokenizer.decode(second.prompt_ids) and "dropped" not in tokenizer.decode(second.prompt_ids)
    assert (first.turn, second.turn) == (0, 1) and first.seed is None and not dialogues.skipped


def test_what_no_client_could_send_ends_a_conversation_and_is_listed(target, tmp_path):
    config, _, tokenizer = target
    cut = Dialogues(config, tokenizer, [TWO_TURNS, WITH_TOOL], Journal(tmp_path))
    answer_all(cut, lambda request: ([9] * request.max_tokens, "length"))
    assert [(s.reason, s.place) for s in cut.skipped] == [
        ("after_length_cut", TWO_TURNS.place),
        ("after_length_cut", WITH_TOOL.place),
    ]
    tool = Dialogues(config, tokenizer, [WITH_TOOL], Journal(tmp_path / "tool"))
    assert len(answer_all(tool)) == 1 and tool.skipped[0].reason == "after_tool_turn"


def test_history_of_the_source_asks_for_every_reply_after_its_own_messages(target, changed, tmp_path):
    config, _, tokenizer = target
    config = changed(config, data={"history": "source"})
    open_ended = conversation(says("user", "one"), says("assistant", "kept"), says("user", "two"))
    asked = answer_all(Dialogues(config, tokenizer, [open_ended], Journal(tmp_path)))
    assert len(asked) == 2 and "kept" in tokenizer.decode(asked[1].prompt_ids)


def test_given_ids_are_asked_as_they_are(target, tmp_path):
    config, _, tokenizer = target
    given = conversation(tokens=(TokenTurn([4, 5, 6], [7]), TokenTurn([4, 5, 6, 7, 8], None)))
    asked = answer_all(Dialogues(config, tokenizer, [given], Journal(tmp_path)))
    assert [r.prompt_ids for r in asked] == [[4, 5, 6], [4, 5, 6, 7, 8]]


def test_a_prompt_without_room_for_a_reply_is_refused(target, tmp_path):
    config, _, tokenizer = target
    long = conversation(says("user", "word " * 100))
    dialogues = Dialogues(config, tokenizer, [long], Journal(tmp_path))
    assert dialogues.take() is None and dialogues.skipped[0].reason == "prompt_too_long"


def test_sampled_replies_have_a_seed_each_that_only_their_place_decides(target, changed, tmp_path):
    config, _, tokenizer = target
    config = changed(config, data={"sampling": {"max_tokens": 8, "temperature": 1.0, "seed": 3}})
    seeds = [
        {(r.conversation, r.turn): r.seed for r in answer_all(Dialogues(config, tokenizer, talks, Journal(folder)))}
        for talks, folder in (([TWO_TURNS] * 4, tmp_path / "a"), ([TWO_TURNS] * 4, tmp_path / "b"))
    ]
    assert seeds[0] == seeds[1] and len(set(seeds[0].values())) == 8


@pytest.mark.parametrize("done", range(7))
def test_a_stopped_run_goes_on_with_what_it_has(target, tmp_path, done):
    """Stopped after any number of replies, the last line cut: the same rows as in one go, and nothing asked twice."""
    config, _, tokenizer = target
    talks = [TWO_TURNS, WITH_TOOL, conversation(says("user", "three"), name="3"), TWO_TURNS]
    whole = Journal(tmp_path / "whole")
    total = len(answer_all(Dialogues(config, tokenizer, talks, whole)))
    stopped = Journal(tmp_path / "stopped")
    answer_all(Dialogues(config, tokenizer, talks, stopped), most=done)
    stopped.close()
    with (tmp_path / "stopped" / FILE).open("ab") as file:
        file.write(b"[3,0,[1,2")
    again = Journal(tmp_path / "stopped")
    assert len(again) == min(done, total)
    dialogues = Dialogues(config, tokenizer, talks, again)
    assert len(answer_all(dialogues)) == total - min(done, total)
    assert rows_of(again) == rows_of(whole) and dialogues.skipped[0].reason == "after_tool_turn"


def test_a_reply_is_never_given_to_another_prompt(target, tmp_path):
    """Sources that read otherwise than before: what was answered under a number is asked again under it."""
    config, _, tokenizer = target
    first, second = conversation(says("user", "one"), name="1"), conversation(says("user", "two"), name="2")
    journal = Journal(tmp_path)
    answer_all(Dialogues(config, tokenizer, [first, second], journal))
    journal = Journal(tmp_path)
    [asked] = answer_all(Dialogues(config, tokenizer, [second], journal))
    [[row]] = rows_of(journal)
    assert row.input_ids == asked.prompt_ids + reply_to(asked)[0]


def test_only_replies_to_todays_prompts_become_rows(target, tmp_path):
    """A source that lost or changed conversations while the run was stopped leaves replies that nobody asks for."""
    config, _, tokenizer = target
    first, other = conversation(says("user", "one"), name="1"), conversation(says("user", "two"), name="2")
    before = Journal(tmp_path)
    answer_all(Dialogues(config, tokenizer, [first, TWO_TURNS, other], before))
    before.close()
    today = Journal(tmp_path)
    assert not answer_all(Dialogues(config, tokenizer, [first], today))
    assert [row.conversation for rows in rows_of(today) for row in rows] == [0]
    today.close()
    shorter = conversation(says("user", "one"), name="c")  # the second turn is gone
    fewer = Journal(tmp_path)
    assert not answer_all(Dialogues(config, tokenizer, [first, shorter], fewer))
    assert [(row.conversation, row.turn) for rows in rows_of(fewer) for row in rows] == [(0, 0), (1, 0)]


@pytest.mark.parametrize(
    "damaged", [b"[1,0,[1,2", b"\0\0\0", b"{}", b"7", b"[1,0]", b'[1,0,[1],["x"],"stop"]', b'["a",0,[1],[2],"stop"]']
)
def test_a_damaged_line_costs_one_reply_and_is_said(target, tmp_path, capsys, damaged):
    config, _, tokenizer = target
    talks = [conversation(says("user", f"question {i}"), name=str(i)) for i in range(4)]
    whole = Journal(tmp_path)
    answer_all(Dialogues(config, tokenizer, talks, whole))
    wanted = rows_of(whole)
    whole.close()
    lines = (tmp_path / FILE).read_bytes().splitlines()
    (tmp_path / FILE).write_bytes(b"\n".join([lines[0], damaged, *lines[2:]]) + b"\n")
    again = Journal(tmp_path)
    assert len(again) == 3 and f"{FILE}: damaged at line 2;" in capsys.readouterr().out
    [asked] = answer_all(Dialogues(config, tokenizer, talks, again))
    assert asked.conversation == 1 and rows_of(again) == wanted


# ---- a server: its protocol; the real one is in tests/pipeline ---------------------------------------------------


@pytest.fixture
def server():
    """Answers as vLLM's `/v1/completions` does; `faults` are HTTP codes that the next requests get instead."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send({"data": [{"id": "tiny", "root": "tiny", "max_model_len": httpd.longest}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if httpd.faults:
                return self.send({"error": "told to"}, httpd.faults.pop())
            httpd.bodies.append(body)
            ids = [5 + sum(body["prompt"]) % 50, 7, 1]
            choice = {"token_ids": ids, "prompt_token_ids": body["prompt"], "finish_reason": "stop", **httpd.changes}
            self.send({"choices": [choice]})

        def send(self, value, code=200):
            data = json.dumps(value).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args):
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.faults, httpd.bodies, httpd.changes, httpd.longest = [], [], {}, 64
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield httpd
    httpd.shutdown()
    httpd.server_close()


@pytest.fixture
def ask(target, changed, server, tmp_path):
    config, resolved, _ = target

    def run(talks, **more):
        settings = {"url": f"http://127.0.0.1:{server.server_port}/v1", "retry_wait": 0.0, "retries": 2, **more}
        served = changed(config, data={"server": settings})
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
        ask([TWO_TURNS, conversation(says("user", "new"), name="2")])
    assert len(Journal(tmp_path / "journal")) == 2
    assert len([r for r in ask([TWO_TURNS, conversation(says("user", "new"), name="2")]) if isinstance(r, Row)]) >= 2
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


def test_nothing_left_to_ask_starts_nothing(target, tmp_path):
    config, resolved, tokenizer = target
    journal = Journal(tmp_path)
    answer_all(Dialogues(config, tokenizer, [TWO_TURNS], journal))
    journal.close()
    rows = list(regenerate(config, resolved, [TWO_TURNS, conversation(says("user", "w " * 90))], tmp_path))
    assert isinstance(rows[0], Skipped) and all(isinstance(r, Row) for r in rows[1:])
