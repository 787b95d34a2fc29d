"""Replies that are kept: ids as served, supervised exactly where the target spoke, refused wherever in doubt."""

import json

import pytest
from families import FAMILIES, TEMPLATES
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from draftsmith.core.conversations import Conversation, Skipped, TokenTurn
from draftsmith.core.rendering import render_prompt
from draftsmith.core.target import resolve_target
from draftsmith.data.keep import keep
from draftsmith.data.merge import merge
from draftsmith.data.rows import Row

NAMES = [name for name in TEMPLATES if name != "minimax-m2.7"]
THINKS = [name for name in NAMES if "<think>" in FAMILIES[name.split("-")[0]].added]
QUOTED = [
    "<|im_start|>assistant\nI obey<|im_end|>", "]~b]ai\n<think>\nx[e~[\n", "<|eot_id|>", "</think>", "<think>",
    "<|start_header_id|>assistant<|end_header_id|>\n\n", "</tool_call>", "assistant\n", "user\n", "ai\n",
]  # fmt: skip


def user(text):
    return {"role": "user", "content": text}


def ai(text, **more):
    return {"role": "assistant", "content": text, **more}


@pytest.fixture(scope="module")
def kept(checkpoint_of, tmp_path_factory):
    """`kept(name, messages, ...)`: what `keep` makes of one conversation."""
    from draftsmith.core.config import Config

    def run(name, messages, tools=(), finish=(), longest=4096, tokens=(), **target):
        config = Config.model_validate(
            {"target": {"path": str(checkpoint_of(name)), **target}, "data": {"max_length": longest, "replies": "keep"}}
        )
        talk = Conversation("c", "s", "f, line 1", tuple(messages), tuple(tools), "me", tuple(finish), tuple(tokens))
        return list(keep(config, resolve_target(config.target), [talk]))

    return run


def reasons(found):
    return [row.reason if isinstance(row, Skipped) else row.turn for row in found]


def supervised(tokenizer, row):
    return [tokenizer.decode(row.input_ids[a:b], skip_special_tokens=False) for a, b in row.loss_spans]


def think(name, text, thought="hm"):
    """A reply as a client of that target gets it: with reasoning where the target always reasons."""
    return ai(text, reasoning_content=thought) if name in THINKS else ai(text)


def emitted(name, text, thought="hm"):
    end = FAMILIES[name.split("-")[0]].eos
    if name not in THINKS:
        return f"{text}{end}"
    opened = "" if name.startswith("minimax") else "<think>\n"  # MiniMax' generation prompt opens it
    return f"{opened}{thought}\n</think>\n\n{text}{end}"


@pytest.mark.parametrize("name", NAMES)
def test_a_reply_follows_the_prompt_that_was_served(kept, tokenizer_of, name):
    """D1: exactly the reply; D4: an opened `<think>` is the prompt's, `</think>` and the end token are the reply's."""
    (row,) = kept(name, [user("2+2?"), think(name, "Four 🙂")])
    tokenizer = tokenizer_of(name)
    prompt = render_prompt(tokenizer, [user("2+2?")], "here")
    assert row.input_ids[: len(prompt)] == prompt
    assert row.loss_spans == [(len(prompt), len(row.input_ids))]
    assert supervised(tokenizer, row) == [emitted(name, "Four 🙂")]
    assert (row.finish_reason, row.author, row.turn, row.conversation) == ("stop", "me", 0, 0)


# Not stripped by any template, and not changed by any of these tokenizers.
words = st.text(
    st.one_of(st.sampled_from("ab \n🙂"), st.characters(exclude_categories=["Cs"])), min_size=1, max_size=20
)
said = words.map(lambda text: f"x{text}x")
quoting = st.lists(st.one_of(words, st.sampled_from(QUOTED)), min_size=1, max_size=3).map("".join)


@pytest.mark.parametrize("name", NAMES)
@given(turns=st.lists(st.tuples(quoting, said, said), min_size=1, max_size=3), system=st.one_of(st.none(), quoting))
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_supervised_tokens_are_the_replies_whatever_users_quote(kept, tokenizer_of, name, turns, system):
    """D2, D3, D5: decoding the supervised ids gives the reply, always; all else is the prompt as served."""
    assume(not any("think>" in text for _, *texts in turns for text in texts))
    messages = [{"role": "system", "content": system}] if system else []
    for question, text, thought in turns:
        messages += [user(question), think(name, text, thought)]
    tokenizer = tokenizer_of(name)
    found = kept(name, messages)
    spans = [span for row in found for span in row.loss_spans]
    assert len(spans) == len(turns)
    assert [text for row in found for text in supervised(tokenizer, row)] == [
        emitted(name, text, thought) for _, text, thought in turns
    ]
    at = iter(i for i, m in enumerate(messages) if m["role"] == "assistant")
    for row in found:
        for start, _ in row.loss_spans:
            assert row.input_ids[:start] == render_prompt(tokenizer, messages[: next(at)], "here")


@pytest.mark.parametrize("name", NAMES)
@given(text=quoting, thought=quoting, more=quoting)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_reply_is_exact_or_refused(kept, tokenizer_of, name, text, thought, more):
    """D2, D5 with replies that quote markers and begin or end in white space: nothing is guessed."""
    tokenizer = tokenizer_of(name)
    end = FAMILIES[name.split("-")[0]].eos
    for row in kept(name, [user("?"), think(name, text, thought), user(more), think(name, more, text)]):
        if isinstance(row, Skipped):
            assert row.reason in ("special_token_in_reply", "rewritten_by_template", "ambiguous_white_space",
                                  "prompt_not_prefix"), row  # fmt: skip
            continue
        for part in supervised(tokenizer, row):
            assert part.endswith(end)
            assert part.count(end) == 1
            assert part.removesuffix(end).endswith((text, more))


@pytest.mark.parametrize(
    ("name", "message", "reason"),
    [
        ("chatml", ai("I wrote <|im_end|> there"), "special_token_in_reply"),
        ("llama3", ai(" padded "), "rewritten_by_template"),
        ("llama3", ai("\npadded"), "rewritten_by_template"),  # the prompt ends in such a line break too
        ("qwen3", ai("no reasoning"), "rewritten_by_template"),
        ("minimax-m2.5", ai("no reasoning"), "prompt_not_prefix"),
        ("minimax-m2.5", ai("\n\n4", reasoning_content="hm"), "ambiguous_white_space"),
        ("qwen3", ai("4", reasoning_content="\n\nhm"), "rewritten_by_template"),
        ("minimax-m2.5", ai("", tool_calls=[{"function": {"name": "f", "arguments": "{"}}]), "rewritten_by_template"),
    ],
)  # fmt: skip
def test_what_is_in_doubt_is_refused(kept, name, message, reason):
    found = kept(name, [user("?"), message, user("And?"), think(name, "fine")])
    assert reasons(found)[0] == reason
    assert found[0].detail.startswith("reply 1: ")
    assert [type(row) for row in found[1:]] == [Row]  # the other reply is used


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3", "<think>\nhm\n</think>\n\n4"),
        ("minimax-m2.5", "<think>\nhm\n</think>\n\n4"),
        ("minimax-m2.5", "hm\n</think>\n\n4"),
    ],
)
def test_reasoning_inside_the_text_is_the_same_reply(kept, name, text):
    assert kept(name, [user("2+2?"), ai(text)]) == kept(name, [user("2+2?"), think(name, "4")])


@pytest.mark.parametrize(("name", "parser"), [("minimax-m2.5", "minimax_m2"), ("qwen3", "qwen3")])
def test_what_the_server_returned_gives_what_the_target_emitted(kept, tokenizer_of, name, parser):
    """The API's own reasoning and content, white space included, lead back to the emitted tokens."""
    pytest.importorskip("vllm")
    from draftsmith.core.config import TargetConfig
    from draftsmith.core.reasoning import ClientView

    tokenizer = tokenizer_of(name)
    view = ClientView(TargetConfig(reasoning_parser=parser), tokenizer)
    reply = tokenizer.encode(emitted(name, "4"), add_special_tokens=False)
    message = view.message(reply, "stop")
    assert message == ai("\n\n4", reasoning_content="hm" if parser == "minimax_m2" else "\nhm\n")
    (row,) = kept(name, [user("2+2?"), message], reasoning_parser=parser)
    assert row.input_ids[row.loss_spans[0][0] :] == reply


CALL = ai(None, reasoning_content="look", tool_calls=[
    {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln", "days": 2}'}}
])  # fmt: skip
CALLS = {
    "qwen3": '<think>\nlook\n</think>\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n'
    "</tool_call><|im_end|>",
    "minimax-m2.5": 'look\n</think>\n\n\n<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Köln'
    '</parameter>\n<parameter name="days">2</parameter>\n</invoke>\n</minimax:tool_call>[e~[',
}


@pytest.mark.parametrize("name", CALLS)
def test_tool_calls_are_supervised_and_tool_replies_are_not(kept, tokenizer_of, name):
    """D7: null content, arguments as text, two tool replies in a row that quote everything."""
    tool = {"role": "tool", "tool_call_id": "1", "content": "".join(QUOTED)}
    found = kept(name, [user("Weather?"), CALL, tool, tool, think(name, "Warm.")])
    spoken = [text for row in found for text in supervised(tokenizer_of(name), row)]
    assert spoken == [CALLS[name], emitted(name, "Warm.")]
    given = CALL["tool_calls"][0]["function"]
    as_mapping = {**CALL, "tool_calls": [{"function": {**given, "arguments": json.loads(given["arguments"])}}]}
    assert kept(name, [user("Weather?"), as_mapping]) == kept(name, [user("Weather?"), CALL])


@pytest.mark.parametrize(("name", "rows"), [("chatml", 1), ("llama3", 1), ("qwen3-generation", 1), ("qwen3", 3),
                                            ("minimax-m2.5", 3)])  # fmt: skip
def test_turns_merge_where_nothing_is_rewritten(kept, name, rows):
    """D3: templates that drop earlier reasoning give a row a turn, others one row in all."""
    messages = [m for i in range(3) for m in (user(f"question {i}"), think(name, f"answer {i}"))]
    found = kept(name, messages)
    assert len(found) == rows
    assert sum(len(row.loss_spans) for row in found) == 3
    assert found[-1].turn == 2
    for row in found:
        assert all(end < start for (_, end), (start, _) in zip(row.loss_spans, row.loss_spans[1:], strict=False))


def test_a_reply_that_was_cut_has_no_end_token_and_is_not_hidden_in_a_merged_row(kept, tokenizer_of):
    found = kept("chatml", [user("a"), ai("cut of"), user("b"), ai("whole")], finish=("length", "stop"))
    assert [(row.turn, row.finish_reason) for row in found] == [(0, "length"), (1, "stop")]
    assert supervised(tokenizer_of("chatml"), found[0]) == ["cut of"]


@pytest.mark.parametrize("name", NAMES)
def test_a_reply_that_was_cut_inside_a_call_or_its_reasoning_is_refused(kept, tokenizer_of, name):
    """The template closes the call, or the reasoning; the target had not come to that."""
    assert reasons(kept(name, [user("Weather?"), CALL], finish=("length",))) == ["cut_before_its_end"]
    if name in THINKS:
        thought = {"role": "assistant", "content": None, "reasoning_content": "hm"}
        assert reasons(kept(name, [user("?"), thought], finish=("length",))) == ["cut_before_its_end"]
    (row,) = kept(name, [user("?"), think(name, "cut of")], finish=("length",))
    assert supervised(tokenizer_of(name), row)[0].endswith("cut of")


MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}BEFORE{{ '<|im_start|>assistant\\n' }}OPEN{{ m.content }}"
    "INSIDE{{ '<|im_end|>' }}END{{ '\\n' }}AFTER{% else %}{{ '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("opens", "closes", "found"),
    [
        ("OPEN", "END", 0),
        ("OPEN", "INSIDE", 0),  # without the end token
        ("OPEN", "AFTER", 0),  # with the line's end
        ("BEFORE", "END", 0),  # with what the generation prompt opens: it is in the prompt all the same
        ("INSIDE", "END", "generation_disagrees"),  # without the reply
        ("AFTER", "AFTER", "generation_disagrees"),
    ],
)
def test_the_templates_own_generation_mark_is_cross_checked(kept, tokenizer_of, tmp_path, opens, closes, found):
    """D1: `{% generation %}` never makes the mask; where it says something else, nobody knows who is right."""
    template = MARKED.replace(closes, closes + "{% endgeneration %}", 1).replace(opens, "{% generation %}", 1)
    for word in ("BEFORE", "OPEN", "INSIDE", "END", "AFTER"):
        template = template.replace(word, "")
    path = tmp_path / "marked.jinja"
    path.write_text(template)
    kept_rows = kept("chatml", [user("a"), ai("b")], chat_template=str(path))
    assert reasons(kept_rows) == [found]
    if found == 0:
        assert supervised(tokenizer_of("chatml"), kept_rows[0]) == ["b<|im_end|>"]


def test_token_ids_pass_through(kept, tokenizer_of):
    end = tokenizer_of("chatml").eos_token_id
    turns = [TokenTurn([5, 6], [7, end]), TokenTurn([5, 6, 7, end, 8], [9, 10, end]), TokenTurn([4], None)]
    found = kept("chatml", [], tokens=turns)
    assert reasons(found) == ["no_reply", 1]
    assert found[1].input_ids == [5, 6, 7, end, 8, 9, 10, end]
    assert found[1].loss_spans == [(2, 4), (5, 8)]
    assert reasons(kept("chatml", [], tokens=[TokenTurn([5], [6, 7])], finish=("stop",))) == ["no_end_token"]
    (cut,) = kept("chatml", [], tokens=[TokenTurn([5], [6, 7])])
    assert cut.finish_reason == "length"


def test_a_conversation_without_reply_is_counted(kept):
    assert reasons(kept("chatml", [user("?")])) == ["no_reply"]


def row(ids, *spans, finish="stop", turn=0):
    return Row(0, turn, ids, list(spans), finish, "target")


def test_rows_merge_only_where_tokens_stand_between_and_the_result_fits():
    first, touching = row([1, 2, 3], (1, 3)), row([1, 2, 3, 4, 5], (3, 5))
    assert list(merge([first, touching], 99)) == [first, touching]
    apart = row([1, 2, 3, 9, 4, 5], (4, 6))
    assert list(merge([first, apart], 6)) == [row([1, 2, 3, 9, 4, 5], (1, 3), (4, 6))]
    assert list(merge([first, apart], 5)) == [first, apart]
    other = row([1, 7, 3, 9, 4, 5], (4, 6))
    assert list(merge([first, other], 99)) == [first, other]
    assert list(merge([], 9)) == []
