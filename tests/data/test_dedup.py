"""Duplicates: equal or nearly equal prompts are found, unlike ones never are, and alike ones share a group."""

import random
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.core.config import DedupConfig
from draftsmith.core.conversations import Conversation, TokenTurn
from draftsmith.data.dedup import alike_groups, content_key, exact_duplicates, near_duplicates, opening_key, setting_key
from draftsmith.data.similarity import Signatures, Signer, bands, ngram_hashes, prompt_words, word_hashes

CONFIG = DedupConfig()
WORDS = [f"word{i}" for i in range(400)]


@pytest.fixture
def signed(tmp_path):
    """`signed(texts)`: their signatures."""

    def sign(texts, config=CONFIG):
        signer = Signer(config)
        made = Signatures(tmp_path / f"signatures-{len(list(tmp_path.iterdir()))}", config.permutations)
        for text in texts:
            made.append(signer.sign(word_hashes(text)))
        return made

    return sign


def sentence(rng, words=60):
    return " ".join(rng.choices(WORDS, k=words))


def jaccard(a, b, n=CONFIG.ngram):
    grams = [{tuple(t.split()[i : i + n]) for i in range(len(t.split()) - n + 1)} for t in (a, b)]
    return len(grams[0] & grams[1]) / len(grams[0] | grams[1])


def settings_of(signatures, *values):
    return np.array(values or [0] * len(signatures), dtype=np.uint64)


def near(signatures, threshold=CONFIG.threshold):
    return near_duplicates(signatures, np.arange(len(signatures)), threshold, settings_of(signatures)).tolist()


def test_a_changed_word_in_a_long_prompt_is_a_near_duplicate_and_another_prompt_is_none(signed):
    rng = random.Random(0)
    texts = [sentence(rng) for _ in range(200)]
    changed = [t.replace(t.split()[30], "other", 1) for t in texts[:50]]
    found = near(signed([*texts, *changed]))
    assert found[:200] == list(range(200))
    assert sum(a == b for a, b in zip(found[200:], range(50), strict=True)) >= 45  # similarity 0.87 to 0.91


def test_questions_of_one_form_are_no_duplicates(signed):
    forms = ["What is the capital of {}?", "Write a short poem about {}.", "Translate '{}' to French."]
    texts = [form.format(word) for form in forms for word in WORDS[:48]]
    assert near(signed(texts)) == list(range(len(texts)))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("1 + 2", "1 - 2"),
        ("hi", "ho"),
        ("???", "!!!"),
        ("日本語の文です", "日本人の話です"),
        ("x", "x x"),
        ("a b c", "c b a"),
    ],
)
def test_short_prompts_that_differ_differ(signed, a, b):
    assert near(signed([a, b])) == [0, 1]


def test_case_and_white_space_make_no_difference(signed):
    assert near(signed(["Name the  largest\nplanet", "name the largest planet"])) == [0, 0]


def test_the_same_question_in_another_setting_is_no_duplicate_but_of_one_group(signed):
    text = sentence(random.Random(4))
    signatures = signed([text, text, text])
    settings = settings_of(signatures, 1, 2, 1)
    assert near_duplicates(signatures, np.arange(3), 0.8, settings).tolist() == [0, 1, 0]
    assert len(set(alike_groups(signatures, np.arange(3), 0.8, np.arange(3, dtype=np.uint64)).tolist())) == 1


def test_the_estimate_is_the_similarity(signed):
    rng = random.Random(1)
    pairs = []
    for cut in range(0, 60, 6):
        a = sentence(rng)
        pairs += [a, " ".join([*a.split()[cut:], *sentence(rng, cut or 1).split()])]
    signatures = signed(pairs)
    firsts, seconds = np.arange(0, len(pairs), 2), np.arange(1, len(pairs), 2)
    estimated = signatures.similarity(firsts, seconds)
    true = [jaccard(pairs[i], pairs[i + 1]) for i in firsts]
    assert np.abs(estimated - true).max() < 0.15  # five standard deviations of 128 permutations
    assert max(true) > 0.9 and min(true) < 0.1


def test_what_is_left_is_unlike_and_what_was_dropped_names_one_it_is_like(signed):
    rng = random.Random(2)
    texts = [sentence(rng, 20) for _ in range(30)]
    for _ in range(300):  # families: copies of copies, each with a word changed
        words = rng.choice(texts).split()
        words[rng.randrange(len(words))] = rng.choice(WORDS)
        texts.append(" ".join(words))
    signatures = signed(texts)
    found = np.array(near(signatures, 0.6))
    dropped = np.flatnonzero(found != np.arange(len(texts)))
    kept = np.flatnonzero(found == np.arange(len(texts)))
    assert (found <= np.arange(len(texts))).all() and len(dropped) > 50
    assert (signatures.similarity(dropped, found[dropped]) >= 0.6).all()
    a, b = np.triu_indices(len(kept), 1)
    alike = signatures.similarity(kept[a], kept[b]) >= 0.6
    assert alike.sum() <= 0.02 * len(dropped) + 1


def test_bands_find_nearly_all_pairs_at_the_threshold():
    for threshold in (0.5, 0.8, 0.95):
        count, rows = bands(threshold, 128)
        assert count * rows <= 128 and 1 - (1 - threshold**rows) ** count >= 0.98
        if rows < 128:
            more = 128 // (rows + 1)
            assert 1 - (1 - threshold ** (rows + 1)) ** more < 0.98


@settings(deadline=None, derandomize=True, database=None)
@given(st.lists(st.integers(0, 5), max_size=30))
def test_the_first_of_equal_keys_stands_for_the_others(keys):
    found = exact_duplicates(np.array(keys, dtype=np.uint64))
    assert found.tolist() == [keys.index(k) for k in keys]


@settings(deadline=None, derandomize=True, database=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(10, 16)), min_size=1, max_size=30))
def test_groups_are_the_connected_components(keys):
    a, b = (np.array(side, dtype=np.uint64) for side in zip(*keys, strict=True))
    with tempfile.TemporaryDirectory() as folder:
        unlike = Signatures(Path(folder, "signatures"), 16)
        for i in range(len(keys)):
            unlike.append(np.full(16, i, dtype=np.uint32))
        groups = alike_groups(unlike, np.arange(len(keys)), 0.8, a, b).tolist()
    parent = list(range(len(keys)))
    for _ in keys:
        for i, (x, y) in enumerate(keys):
            for j, (v, w) in enumerate(keys):
                if x == v or y == w:
                    parent[i] = parent[j] = min(parent[i], parent[j])
    assert len(set(zip(groups, parent, strict=True))) == len(set(groups)) == len(set(parent))


def test_alike_prompts_share_a_group_through_others_too(signed):
    base = sentence(random.Random(3), 100).split()
    chain = [" ".join([*(f"new{j}" for j in range(i)), *base[i:]]) for i in range(0, 30, 2)]
    signatures = signed([*chain, "something else entirely"])
    keys = np.arange(len(signatures), dtype=np.uint64)
    groups = alike_groups(signatures, np.arange(len(signatures)), 0.8, keys)
    assert jaccard(chain[0], chain[-1]) < 0.8
    assert len(set(groups[:-1].tolist())) == 1 and groups[-1] not in groups[:-1]


def talk(*turns, tools=()):
    return Conversation("i", "s", "p", tuple({"role": r, "content": c} for r, c in turns), tools)


def test_a_conversations_key_is_what_it_says_and_replies_count_where_they_are_kept():
    a = talk(("user", "naive  question\n"), ("assistant", "x"))
    b = talk(("user", " naive question"), ("assistant", "y"))
    assert content_key(a, replies=False) == content_key(b, replies=False)
    assert content_key(a, replies=True) != content_key(b, replies=True)
    others = [talk(("user", "Naive question")), talk(("system", "s"), ("user", "naive question"))]
    assert len({content_key(c, replies=False) for c in (a, *others)}) == 3
    assert content_key(talk(("user", "q"), tools=({"name": "t"},)), False) != content_key(talk(("user", "q")), False)
    composed, decomposed = talk(("user", "caf\u00e9")), talk(("user", "cafe\u0301"))
    assert content_key(composed, False) == content_key(decomposed, False)


def test_a_setting_is_system_text_and_tools():
    kinds = [talk(("user", "q")), talk(("system", "s"), ("user", "q")), talk(("user", "q"), tools=({"name": "t"},))]
    assert len({setting_key(k) for k in kinds}) == 3
    assert setting_key(kinds[1]) == setting_key(talk(("system", " s"), ("user", "other")))


def test_an_opening_is_the_first_user_turn_alone():
    short, long = talk(("user", "q")), talk(("system", "s"), ("user", " q "), ("assistant", "a"), ("user", "r"))
    assert opening_key(short) == opening_key(long) != opening_key(talk(("user", "r")))


def test_token_ids_are_compared_as_words_are():
    def tokens(ids, reply=None):
        return Conversation("i", "s", "p", (), tokens=(TokenTurn(ids, reply),))

    assert content_key(tokens([1, 2], [3]), False) == content_key(tokens([1, 2], [4]), False)
    assert content_key(tokens([1, 2], [3]), True) != content_key(tokens([1, 2], [4]), True)
    assert prompt_words(tokens([5, 6, 7])).tolist() == [5, 6, 7]


@settings(deadline=None, derandomize=True, database=None)
@given(st.lists(st.integers(0, 3), max_size=12), st.integers(1, 5))
def test_ngrams_of_equal_words_are_equal_and_of_others_are_not(words, longest):
    array = np.array(words, dtype=np.uint64)
    seen = {}
    for n, hashes in ngram_hashes(array, range(1, longest + 1)):
        assert len(hashes) == len(words) - n + 1
        for i, value in enumerate(hashes.tolist()):
            assert seen.setdefault(value, tuple(words[i : i + n])) == tuple(words[i : i + n])
    assert len(seen) == len({tuple(words[i : i + n]) for n in range(1, longest + 1) for i in range(len(words) - n + 1)})
