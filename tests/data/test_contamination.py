"""Prompts of evaluation sets: found where words in a row are shared or the prompt is nearly equal, and named."""

import random

import pytest

from draftsmith.core.conversations import Conversation
from draftsmith.core.errors import UserError

RNG = random.Random(0)
WORDS = [f"word{i}" for i in range(500)]


def text(count):
    return " ".join(RNG.choices(WORDS, k=count))


LONG, SHORT, TINY = text(40), text(9), text(4)
FILL = [text(30) for _ in range(20)]


@pytest.fixture
def bench(source):
    return source({"id": 1, "turns": [LONG, SHORT]}, {"prompt": TINY}, name="bench.jsonl")


@pytest.fixture
def found(read, source, bench):
    """`found(prompt)`: what a training prompt among innocent ones is found to share, or None."""

    def look(prompt, **contamination):
        row = prompt if isinstance(prompt, dict) else {"prompt": prompt}
        path = source(*({"prompt": p} for p in FILL), row)
        made = read(path, data={"contamination": {"sets": [bench], **contamination}})
        assert len(made.conversations) + len(made.listed) == 21 and len(made.listed) <= 1
        for row in made.listed:
            assert (row.reason, row.place) == ("contaminated", f"{path}, line 21")
            return row.detail
        return None

    return look


def words(t, a, b):
    return " ".join(t.split()[a:b])


@pytest.mark.parametrize(
    ("prompt", "line"),
    [
        (LONG, 1),
        (f"{text(30)} {words(LONG, 5, 18)} {text(30)}", 1),
        (f"{text(10)}\n{words(LONG, 0, 13).upper().replace(' ', ', ')}!", 1),
        (f"Please answer: {SHORT}", 1),
        (TINY, 2),
        ({"turns": [text(20), f"{text(5)} {SHORT}"]}, 1),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]}, 1),
    ],
)
def test_what_gives_an_evaluation_prompt_away_is_found_and_named(found, bench, prompt, line):
    assert f"{bench}, line {line}" in found(prompt)


@pytest.mark.parametrize(
    "prompt",
    [
        f"{text(30)} {words(LONG, 5, 17)} {text(30)}",
        f"{text(10)} {words(SHORT, 0, 8)} {text(10)}",
        f"{text(10)} {TINY} {text(10)}",
        {"messages": [{"role": "system", "content": LONG}, {"role": "user", "content": text(10)}]},
    ],
)
def test_what_does_not_is_not(found, prompt):
    assert found(prompt) is None


def test_a_prompt_of_token_ids_is_read_as_text(found, tokenizer):
    ids = tokenizer.encode(f"<|im_start|>user\n{LONG}<|im_end|>\n<|im_start|>assistant\n")
    assert "words in a row" in found({"prompt_token_ids": ids})


def test_a_nearly_equal_prompt_is_found_where_no_n_words_in_a_row_are_shared(found):
    changed = " ".join("new" if i == 20 else w for i, w in enumerate(LONG.split()))
    assert "nearly equal" in found(changed, ngram=39)


def test_the_number_of_words_is_a_setting(found):
    prompt = f"{text(10)} {words(LONG, 5, 13)} {text(10)}"
    assert found(prompt) is None and "8 words in a row" in found(prompt, ngram=8)


def test_warn_lists_it_and_uses_it(read, source, bench):
    made = read(source({"prompt": LONG}), data={"contamination": {"sets": [bench], "action": "warn"}})
    assert [c.messages[0]["content"] for c in made.conversations] == [LONG]
    assert [row.reason for row in made.listed] == ["contaminated"]
    assert made.tally.sources["s"].removed == {"contaminated (used)": 1}


def test_the_sets_of_the_evaluation_count_too_and_nothing_counts_as_skipped(read, source, bench):
    made = read(source({"prompt": LONG}, {"prompt": FILL[0]}), eval_sets=[bench])
    assert [c.messages[0]["content"] for c in made.conversations] == [FILL[0]]
    source_tally = made.tally.sources["s"]
    assert source_tally.removed == {"contaminated": 1} and not source_tally.skipped


def test_a_set_that_is_missing_or_gives_nothing_is_refused(read, source):
    with pytest.raises(UserError, match="nowhere"):
        read(source({"prompt": "a"}), data={"contamination": {"sets": ["nowhere.jsonl"]}})
    empty = source("{", name="empty.jsonl")
    with pytest.raises(UserError, match=r"evaluation set `.*empty\.jsonl`: no prompt"):
        read(source({"prompt": "a"}), data={"contamination": {"sets": [empty]}})


def test_where_everything_is_of_an_evaluation_set_that_is_said(read, source, bench):
    with pytest.raises(UserError, match="every conversation is in an evaluation set"):
        read(source({"prompt": LONG}), eval_sets=[bench])


def test_reading_the_row_keeps_it_a_conversation(read, source, bench):
    assert all(isinstance(c, Conversation) for c in read(source({"prompt": FILL[0]}), eval_sets=[bench]).conversations)
