"""Sources: every line is a conversation or is skipped for a stated reason at a stated place; nothing is guessed."""

import json
from collections import Counter

import pytest

from draftsmith.core.config import TargetConfig
from draftsmith.core.conversations import DEMO, Conversation, Skipped, read_conversations, render_prompt
from draftsmith.core.errors import UserError
from draftsmith.core.target import load_tokenizer, resolve_target
from draftsmith.data.stage import _check_skips, _held_out, _read_sources, prepare_inputs


def user(text="hi"):
    return {"role": "user", "content": text}


def assistant(text="hello"):
    return {"role": "assistant", "content": text}


def system(text="be kind"):
    return {"role": "system", "content": text}


@pytest.fixture
def source(tmp_path):
    """`source(row, ...)`: path of a JSONL file; rows are objects, or raw lines."""

    def write(*rows, name="s.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8")
        return str(path)

    return write


def chats(*conversations):
    return [{"messages": list(c)} for c in conversations]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{not json", "not_json"),
        ('{"prompt": "cut', "not_json"),
        ("[1, 2]", "not_an_object"),
        ('"text"', "not_an_object"),
        ("null", "not_an_object"),
        ({}, "no_messages"),
        ({"messages": []}, "no_messages"),
        ({"messages": None}, "no_messages"),
        ({"messages": "hi"}, "no_messages"),
        ({"prompt": ["hi"]}, "no_messages"),
        ({"prompt": ""}, "empty_content"),
        ({"messages": ["hi"]}, "unknown_role"),
        ({"messages": [{"content": "hi"}]}, "unknown_role"),
        ({"messages": [{"from": "human", "value": "hi"}]}, "unknown_role"),
        ({"messages": [{"role": "human", "content": "hi"}]}, "unknown_role"),
        ({"messages": [user(), {"role": "tool", "content": "4"}]}, "unknown_role"),
        ({"messages": [{"role": ["user"], "content": "hi"}]}, "unknown_role"),
        ({"messages": [{"role": "user"}]}, "empty_content"),
        ({"messages": [user("")]}, "empty_content"),
        ({"messages": [user(" \n")]}, "empty_content"),
        ({"messages": [{"role": "user", "content": None}]}, "empty_content"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}, "empty_content"),
        ({"messages": [user(), {"role": "assistant", "content": None}]}, "empty_content"),
        ({"messages": [user(), system()]}, "late_system"),
        ({"messages": [system(), system(), user()]}, "late_system"),
        ({"messages": [system()]}, "no_user_turn"),
        ({"messages": [assistant()]}, "no_user_turn"),
        ({"messages": [assistant(), user()]}, "turns_out_of_order"),
        ({"messages": [user(), user()]}, "turns_out_of_order"),
        ({"messages": [user(), assistant(), assistant()]}, "turns_out_of_order"),
    ],
)
def test_a_bad_row_is_skipped_with_its_reason_and_place(source, row, reason):
    path = source({"prompt": "fine"}, row)
    good, bad = read_conversations(path)
    assert isinstance(good, Conversation) and isinstance(bad, Skipped)
    assert (bad.reason, bad.place) == (reason, f"{path}, line 2")
    assert bad.detail


@pytest.mark.parametrize(
    ("row", "roles", "turns"),
    [
        ({"prompt": "hi"}, "user", [0]),
        ({"messages": [user()]}, "user", [0]),
        ({"messages": [user(), assistant()]}, "user assistant", [0]),
        ({"messages": [system(), user(), assistant(), user()]}, "system user assistant user", [1, 3]),
        ({"messages": [{**user(), "name": "Ann"}], "prompt": "ignored"}, "user", [0]),
    ],
)
def test_good_shapes(source, row, roles, turns):
    (conversation,) = read_conversations(source(row))
    assert " ".join(m["role"] for m in conversation.messages) == roles
    assert conversation.user_turns == turns
    assert all(m.keys() == {"role", "content"} for m in conversation.messages)


def test_text_is_kept_as_it_is(source):
    text = "  naïve 日本語 🙂\u2028 <|im_end|>\r\n"
    (conversation,) = read_conversations(source({"prompt": text}))
    assert conversation.messages == (user(text),)


def test_ids_are_the_rows_own_or_file_and_line(source):
    rows = read_conversations(
        source({"prompt": "a", "id": "x"}, {"prompt": "b"}, {"prompt": "c", "id": 7}, "", {"prompt": "d"})
    )
    assert [r.id for r in rows] == ["x", "s-0000002", "7", "s-0000005"]


def test_windows_line_ends_and_blank_lines_are_no_rows(tmp_path):
    path = tmp_path / "w.jsonl"
    path.write_bytes(b'{"prompt": "a"}\r\n\r\n  \r\n{"prompt": "b"}')
    rows = list(read_conversations(str(path)))
    assert [r.place for r in rows] == [f"{path}, line 1", f"{path}, line 4"]
    assert [r.messages[0]["content"] for r in rows] == ["a", "b"]


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path):
    path = tmp_path / "bom.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n{"prompt": "b"}\n')
    assert [type(r) for r in read_conversations(str(path))] == [Conversation, Conversation]


def test_a_file_that_is_not_utf8_is_refused(tmp_path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes('{"prompt": "naïve"}'.encode("latin-1"))
    with pytest.raises(UserError, match=r"latin\.jsonl: not UTF-8 text"):
        list(read_conversations(str(path)))


def test_a_missing_source_is_named():
    with pytest.raises(UserError, match=r"data source `nowhere\.jsonl`: no such file"):
        list(read_conversations("nowhere.jsonl"))


# ---- the sources of a config -----------------------------------------------------------------------------------------


@pytest.fixture
def read(make_config):
    def read_all(*paths, seed=0, **source):
        return _read_sources(make_config(run={"seed": seed}, data={"sources": [{"path": p, **source} for p in paths]}))

    return read_all


def prompts(count, start=0):
    return [{"prompt": f"question {i}"} for i in range(start, start + count)]


@pytest.mark.parametrize("rows", [[], ["", "  "]])
def test_an_empty_source_is_refused(read, source, rows):
    with pytest.raises(UserError, match=r"s\.jsonl.*gives no conversation"):
        read(source(*rows))


def test_a_source_of_bad_rows_only_is_refused_with_the_first_of_them(read, source):
    with pytest.raises(UserError, match=r"gives no conversation\. The first skipped: .*s\.jsonl, line 1: not_json"):
        read(source("{", "{}"))


def test_the_first_skipped_row_that_is_named_belongs_to_the_empty_source(read, source):
    with pytest.raises(UserError) as error:
        read(source({"prompt": "a"}, "{", name="a.jsonl"), source("{}", name="b.jsonl"))
    assert "b.jsonl, line 1" in str(error.value) and "a.jsonl" not in str(error.value)


def test_a_repeated_id_is_skipped_and_names_the_other_place(read, source):
    path = source({"prompt": "a", "id": "x"}, {"prompt": "b", "id": "x"})
    conversations, (skipped,) = read(path)
    assert [c.messages[0]["content"] for c in conversations] == ["a"]
    assert (skipped.reason, skipped.place) == ("duplicate_id", f"{path}, line 2")
    assert f"{path}, line 1" in skipped.detail


def test_two_files_of_one_name_keep_all_their_rows(read, source):
    paths = [source(*prompts(2), name="a/train.jsonl"), source(*prompts(2, 2), name="b/train.jsonl")]
    conversations, skipped = read(*paths)
    assert skipped == [] and len({c.id for c in conversations}) == 4


def test_an_id_with_half_a_surrogate_pair_does_not_stop_the_others(read, source):
    conversations, skipped = read(source('{"prompt": "a", "id": "\\ud83d"}', {"prompt": "b"}))
    assert len(conversations) + len(skipped) == 2 and conversations[-1].messages == (user("b"),)


def test_limit_takes_the_first_good_rows(read, source):
    conversations, _ = read(source("{", *prompts(5)), limit=3)
    assert [c.messages[0]["content"] for c in conversations] == ["question 0", "question 1", "question 2"]


def test_rows_beyond_the_limit_are_not_counted_as_skipped(read, source):
    _, skipped = read(source(*prompts(3), "{", "{", "{", *prompts(1, 3)), limit=3)
    assert skipped == []


def test_weight_draws_its_share_by_seed(read, source):
    path = source(*prompts(400))
    drawn, _ = read(path, weight=0.25)
    again, _ = read(path, weight=0.25)
    other, _ = read(path, weight=0.25, seed=1)
    assert drawn == again != other
    assert 60 < len(drawn) < 140  # 100 expected, 4.6 standard deviations either way
    assert len(read(path, weight=1.0)[0]) == 400


def test_a_larger_weight_draws_the_same_rows_and_more(read, source):
    path = source(*prompts(100))
    few, many = ({c.id for c in read(path, weight=w)[0]} for w in (0.2, 0.6))
    assert few < many


def test_too_many_unusable_rows_stop_with_counts_and_the_first_place(make_config):
    config = make_config(data={"max_skip_share": 0.1})
    skipped = [Skipped("f, line 3", "not_json", "x"), Skipped("f, line 4", "not_json", "x"), Skipped("g", "late", "y")]
    with pytest.raises(UserError) as error:
        _check_skips(config, 17, skipped)
    for part in ("3 of 20 rows", "15.0%", "2 not_json, 1 late", "f, line 3", "data.max_skip_share"):
        assert part in str(error.value)
    _check_skips(config, 27, skipped)


# ---- the held-out split ----------------------------------------------------------------------------------------------


def talks(*texts):
    return [Conversation(f"id-{i}", "s", f"f, line {i}", (user(t),)) for i, t in enumerate(texts)]


def test_the_held_out_count_is_exact(make_config):
    config = make_config(data={"eval_share": 0.1})
    for count in (10, 11, 57, 300):
        assert len(_held_out(config, talks(*map(str, range(count))))) == round(count / 10)


def test_something_is_held_out_of_a_small_source_and_nothing_where_nothing_is_asked(make_config):
    some = talks("a", "b", "c")
    assert len(_held_out(make_config(data={"eval_share": 0.01}), some)) == 1
    assert _held_out(make_config(data={"eval_share": 0.0}), some) == set()


def test_a_repeated_prompt_is_never_on_both_sides(make_config):
    texts = [str(i % 40) for i in range(200)]
    for seed in range(5):
        held = _held_out(make_config(run={"seed": seed}, data={"eval_share": 0.2}), talks(*texts))
        sides = {(text, i in held) for i, text in enumerate(texts)}
        assert len(sides) == 40 and 0 < len(held) < 200


def test_the_split_follows_content_and_seed_and_not_the_order(make_config):
    texts = [str(i) for i in range(50)]

    def held(order, seed=0):
        found = _held_out(make_config(run={"seed": seed}), talks(*order))
        return {order[i] for i in found}

    assert held(texts) == held(texts[::-1]) != held(texts, seed=1)


# ---- the packaged prompts, and what a sample depends on --------------------------------------------------------------


@pytest.fixture
def tokenizer(tiny_target):
    config = TargetConfig(path=str(tiny_target))
    return load_tokenizer(resolve_target(config), config)


def test_the_demo_prompts_are_many_unique_and_all_usable(tokenizer):
    rows = list(read_conversations(DEMO))
    assert len(rows) >= 500 and all(isinstance(r, Conversation) for r in rows)
    assert not [text for text, n in Counter(str(r.messages) for r in rows).items() if n > 1]
    assert len({r.id for r in rows}) == len(rows)
    assert all(render_prompt(tokenizer, list(r.messages), r.place) for r in rows)


def test_a_conversation_that_the_template_refuses_is_named(tokenizer):
    tokenizer.chat_template = "{{ raise_exception('no system, please') }}"
    with pytest.raises(UserError, match=r"f, line 3: the chat template refuses it \(no system, please\)"):
        render_prompt(tokenizer, [system()], "f, line 3")


def test_text_that_no_tokenizer_takes_is_named(tokenizer):
    with pytest.raises(UserError, match="f, line 3"):
        render_prompt(tokenizer, [user("half a pair: \ud83d")], "f, line 3")


def test_the_rendered_prompt_ends_with_the_generation_prompt(tokenizer):
    ids = render_prompt(tokenizer, [user("hi"), assistant("yo"), user("<|im_end|>?")], "f")
    assert all(isinstance(i, int) for i in ids)
    assert tokenizer.decode(ids).endswith("<|im_end|>?<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    "change",
    [
        {"run": {"seed": 1}},
        {"data": {"max_length": 65}},
        {"data": {"draft_vocab_size": 100}},
        {"data": {"eval_share": 0.3}},
        {"data": {"sampling": {"temperature": 0.5, "max_tokens": 16}}},
        {"target": {"dtype": "float32"}},
    ],
)
def test_every_setting_that_decides_the_samples_is_an_input(synthetic_run, changed, change):
    target = resolve_target(synthetic_run.target)
    assert prepare_inputs(changed(synthetic_run, **change), target) != prepare_inputs(synthetic_run, target)


def test_a_changed_source_file_is_another_input(make_config, source):
    config = make_config(data={"sources": [{"path": source(*prompts(3))}]})
    target = resolve_target(config.target)
    before = prepare_inputs(config, target)
    source(*prompts(4))
    assert prepare_inputs(config, target) != before
