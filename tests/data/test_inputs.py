"""The sources of a config: limits, weights, duplicates, ids, and everything that decides the samples is an input."""

import pickle

import pytest

from draftsmith.core.conversations import Skipped
from draftsmith.core.errors import UserError
from draftsmith.core.manifest import check_inputs
from draftsmith.core.target import resolve_target
from draftsmith.data.disk_list import DiskList
from draftsmith.data.stage import prepare_inputs


def prompts(count, start=0):
    return [{"prompt": f"question {i}"} for i in range(start, start + count)]


def said(made):
    return [c.messages[0]["content"] for c in made.conversations]


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


def test_every_row_is_used_or_counted_and_listed(read, source):
    path = source(
        "{", {"prompt": "a b c d"}, {"prompt": ""}, {"prompt": "a b  c d"}, {"messages": []}, {"turns": ["e"]}
    )
    made = read(path)
    tally = made.tally.sources["s"]
    assert tally.skipped == {"not_json": 1, "empty_content": 1, "no_messages": 1}
    assert tally.removed == {"exact_duplicate": 1} and tally.shapes == {"prompt": 3, "turns": 1}
    assert sorted(row.place for row in made.listed) == [f"{path}, line {i}" for i in (1, 3, 4, 5)]
    assert said(made) == ["a b c d", "e"]


ODD_REPLIES = [
    {"content": ""}, {"content": None}, {"content": " "}, {"content": "", "reasoning_content": "hm"},
    {"content": [{"type": "image_url", "image_url": {"url": "x"}}]}, {"content": 7}, {"tool_calls": "f(1)"},
    {"content": None, "function_call": {"name": "f"}},
]  # fmt: skip


@pytest.mark.parametrize("reply", ODD_REPLIES, ids=str)
def test_a_row_whose_replies_are_dropped_needs_no_usable_reply(read, source, reply):
    row = {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", **reply},
                        {"role": "user", "content": "two"}]}  # fmt: skip
    path = source(
        row, {"prompt": "x", "response": ""}, {"messages": row["messages"], "finish_reason": "content_filter"}
    )
    made = read(path, data={"dedup": {"exact": False, "near": False}})
    assert not made.listed and [len(c.user_turns) for c in made.conversations] == [2, 1, 2]
    for data in ({"history": "source"}, {"replies": "keep"}):  # where they are used they are looked at
        assert len(read(source(row, {"prompt": "y"}), data=data).listed) == 1


def test_a_repeated_id_gets_one_of_its_own_and_no_row_is_lost(read, source):
    made = read(source({"prompt": "a", "id": "x"}, {"prompt": "b", "id": "x"}, {"prompt": "c", "id": "x"}))
    assert [c.id for c in made.conversations] == ["x", "x@1", "x@2"] and said(made) == ["a", "b", "c"]


def test_two_files_of_one_name_keep_all_their_rows(read, source):
    made = read(source(*prompts(2), name="a/train.jsonl"), source(*prompts(2, 2), name="b/train.jsonl"))
    assert len({c.id for c in made.conversations}) == 4 and set(made.tally.sources) == {"train-0", "train-1"}


def test_duplicates_name_the_row_that_is_kept_and_are_no_bad_rows(read, source, make_config):
    long = " ".join(f"w{i}" for i in range(60))
    path = source({"prompt": "a"}, {"prompt": long}, {"prompt": " a"}, {"prompt": long.replace("w30", "x")})
    made = read(path)
    assert said(made) == ["a", long]
    assert [(r.reason, r.place, r.detail) for r in made.listed] == [
        ("exact_duplicate", f"{path}, line 3", f"of {path}, line 1"),
        ("near_duplicate", f"{path}, line 4", f"of {path}, line 2"),
    ]
    made.tally.check(make_config(data={"max_skip_share": 0.0}), 2)
    assert len(read(path, data={"dedup": {"near": False}}).conversations) == 3
    assert len(read(path, data={"dedup": {"near": False, "exact": False}}).conversations) == 4


@pytest.mark.parametrize("dedup", [{}, {"near": False}, {"near": False, "exact": False}])
def test_alike_conversations_are_never_on_both_sides(read, source, dedup):
    families = [[f"{a}{i}" for i in range(100)] for a in "abcdefghij"]
    rows = []
    for words in families:
        rows += [{"prompt": " ".join(words)}, {"prompt": " ".join([*words[:20], "new", *words[21:]])}]
        talk = [{"role": "user", "content": " ".join(words)}, {"role": "assistant", "content": "y"}]
        rows += [{"messages": [*talk, {"role": "user", "content": f"and {words[0]}?"}]}, rows[-2]]
    for seed in range(5):
        made = read(source(*rows), data={"dedup": dedup, "eval_share": 0.3}, seed=seed)
        sides = {(c.messages[0]["content"][0], bool(h)) for c, h in zip(made.conversations, made.held_out, strict=True)}
        assert len(sides) == 10 and made.held_out.any() and not made.held_out.all()


def test_the_split_follows_content_and_seed_and_not_the_order(read, source):
    def held(rows, seed=0):
        made = read(source(*rows), seed=seed)
        return {c.messages[0]["content"] for c, h in zip(made.conversations, made.held_out, strict=True) if h}

    assert held(prompts(50)) == held(prompts(50)[::-1]) != held(prompts(50), seed=1)


def test_limit_takes_the_first_good_rows_and_what_comes_after_is_not_read(read, source):
    made = read(source("{", *prompts(3), "{", "{"), limit=3)
    assert said(made) == ["question 0", "question 1", "question 2"]
    assert len(made.listed) == 1 and made.tally.sources["s"].shapes == {"prompt": 3}


def test_weight_draws_its_share_by_seed(read, source):
    path = source(*prompts(400))
    drawn, again, other = (said(read(path, weight=0.25, seed=s)) for s in (0, 0, 1))
    assert drawn == again != other
    assert 60 < len(drawn) < 140  # 100 expected, 4.6 standard deviations either way
    assert len(read(path, weight=1.0).conversations) == 400


def test_a_larger_weight_draws_the_same_rows_and_more(read, source):
    path = source(*prompts(100))
    few, many = ({c.id for c in read(path, weight=w).conversations} for w in (0.2, 0.6))
    assert few < many


def test_token_ids_beyond_the_vocabulary_are_skipped(read, source):
    path = source({"prompt_token_ids": [1, 2], "response_token_ids": [511]}, {"prompt_token_ids": [512]})
    made = read(path)
    assert len(made.conversations) == 1 and [r.reason for r in made.listed] == ["bad_token_ids"]


def test_roles_of_the_config_are_those_of_the_sources(read, source):
    path = source({"messages": [{"role": "visitor", "content": "a"}]}, {"prompt": "b"})
    assert said(read(path)) == ["b"]
    assert said(read(path, data={"roles": {"visitor": "user"}})) == ["a", "b"]


def test_too_many_unusable_rows_stop_with_counts_and_the_first_place(make_config, tally_of):
    config, tally = make_config(data={"max_skip_share": 0.1}), tally_of(["f"])
    for place, reason in (("f, line 3", "not_json"), ("f, line 4", "not_json"), ("g", "late")):
        tally.skip(Skipped(place, reason, "x", "f"))
    tally.remove(Skipped("f, line 9", "exact_duplicate", "of f, line 1", "f"))
    with pytest.raises(UserError) as error:
        tally.check(config, 17)
    for part in ("3 of 20 rows", "15.0%", "2 not_json, 1 late", "f, line 3", "data.max_skip_share"):
        assert part in str(error.value)
    tally.check(config, 27)


def test_what_is_listed_may_be_no_unicode(tally_of):
    tally = tally_of(["f"])
    tally.skip(Skipped("f, line 1", "unknown_role", "'\ud83d'", "f"))
    assert tally_of.listed(tally)[0].reason == "unknown_role"


def test_a_list_on_disk_is_a_list_and_crosses_process_borders(tmp_path):
    items, on_disk = [{"a": [i] * i} for i in range(50)], DiskList(tmp_path / "list")
    for i, item in enumerate(items):
        on_disk.append(item)
        assert on_disk[i] == item  # reading between writes
    assert list(on_disk) == items and on_disk[-1] == items[-1] and on_disk[3:6] == items[3:6]
    assert list(pickle.loads(pickle.dumps(on_disk))) == items
    with pytest.raises(IndexError):
        on_disk[50]


def test_the_conversations_cross_process_borders(read, source):
    made = read(source({"prompt": "a", "id": 1}, {"prompt": "b", "id": 1}))
    assert list(pickle.loads(pickle.dumps(made.inputs.conversations))) == made.conversations


def test_the_demos_prompts_come_in_families_and_none_is_taken_for_a_duplicate(read):
    made = read("demo-prompts")
    assert len(made.conversations) == 576 and made.listed == []


# ---- D9: a changed setting is never ignored --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"run": {"seed": 1}},
        {"data": {"max_length": 65}},
        {"data": {"too_long": "truncate"}},
        {"data": {"eval_share": 0.3}},
        {"data": {"roles": {"visitor": "user"}}},
        {"data": {"dedup": {"near": False}}},
        {"data": {"dedup": {"threshold": 0.9}}},
        {"data": {"contamination": {"action": "warn"}}},
        {"data": {"contamination": {"sets": ["demo-prompts"]}}},
        {"data": {"sampling": {"temperature": 0.5, "max_tokens": 16}}},
        {"data": {"sampling": {"presence_penalty": 0.5, "max_tokens": 16}}},
        {"data": {"sampling": {"temperature": 0.5, "replies": 2, "max_tokens": 16}}},
        {"target": {"dtype": "float32"}},
    ],
)
def test_every_setting_that_decides_the_samples_is_an_input(synthetic_run, changed, change):
    target = resolve_target(synthetic_run.target)
    before, after = prepare_inputs(synthetic_run, target), prepare_inputs(changed(synthetic_run, **change), target)
    with pytest.raises(UserError, match="was made with other settings"):
        check_inputs(synthetic_run.run.dir, {"stage": "prepare", "inputs": before}, after)


def test_every_key_of_the_data_section_is_an_input_or_decides_nothing(synthetic_run):
    inputs = prepare_inputs(synthetic_run, resolve_target(synthetic_run.target))
    left_out = {"max_skip_share", "server", "draft_vocab_size"}  # the last decides what is made from the samples
    assert set(type(synthetic_run.data).model_fields) - set(inputs["data"]) == left_out


def test_a_changed_source_file_or_evaluation_set_is_another_input(make_config, source):
    bench = source({"prompt": "x"}, name="bench.jsonl")
    config = make_config(data={"sources": [{"path": source(*prompts(3))}], "contamination": {"sets": [bench]}})
    target = resolve_target(config.target)
    first = prepare_inputs(config, target)
    source(*prompts(4))
    second = prepare_inputs(config, target)
    source({"prompt": "y"}, name="bench.jsonl")
    assert first != second != prepare_inputs(config, target)


def test_a_changed_template_is_another_input(make_config, tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages }}")
    config = make_config(target={"chat_template": str(template)})
    first = prepare_inputs(config, resolve_target(config.target))
    template.write_text("{{ messages }} ")
    assert prepare_inputs(config, resolve_target(config.target)) != first
