"""The prompts that are served: rendered as a server renders them, both turns of a dialogue, ids on disk."""

import json

import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from draftsmith.core.config_io import load_config
from draftsmith.core.errors import UserError
from draftsmith.core.target import resolve_target
from draftsmith.eval.prompts import HELD_OUT, PromptSets, spread, write_prompts


@pytest.fixture
def sets_of(synthetic_run, changed, tmp_path):
    """`sets_of({"turns": [...]}, ..., max_prompts=2)`: the sets of a run whose `my set.jsonl` holds these rows."""

    def make(*rows, **values):
        path = tmp_path / "my set.jsonl"
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        config = changed(synthetic_run, eval={"sets": [str(path)], **values})
        return PromptSets(config, resolve_target(config.target))

    return make


@pytest.fixture
def tokenizer(tiny_target):
    return AutoTokenizer.from_pretrained(tiny_target)


def test_the_held_out_prompts_are_a_set_of_their_own(synthetic_run, synthetic_samples):
    [held_out] = PromptSets(synthetic_run, resolve_target(synthetic_run.target)).sets
    samples = [s for s in synthetic_samples if s.split == "eval"]
    assert held_out.name == HELD_OUT
    assert [p.ids for p in held_out.prompts] == [s.input_ids[: s.loss_spans[0][0]] for s in samples]
    assert [p.id for p in held_out.prompts] == [s.sample_id for s in samples]
    assert [p.max_tokens for p in held_out.prompts] == [16] * 4


def test_a_set_is_named_after_its_file_and_the_chat_template_is_applied(sets_of, tokenizer):
    """E3."""
    mine = sets_of({"prompt": "the user"}).sets[1]
    text = "<|im_start|>user\nthe user<|im_end|>\n<|im_start|>assistant\n"
    assert mine.name == "my set" and [tokenizer.decode(p.ids) for p in mine.prompts] == [text]


def test_a_second_turn_holds_the_targets_own_reply(sets_of, tokenizer):
    sets = sets_of({"id": "d", "turns": ["one", "two", "three"]}, {"id": "e", "turns": ["alone"]})
    mine, asked = sets.sets[1], []
    assert [p.id for p in mine.prompts] == ["d/0", "e/0"]
    longest = sets.longest

    def answer(prompts, max_tokens):
        asked.append([tokenizer.decode(p) for p in prompts])
        end = tokenizer.eos_token_id
        return [([*tokenizer.encode(f"reply {len(asked)}"), end], "stop") for _ in prompts]

    sets.complete(answer)
    first = "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
    second = first + "reply 1<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n"
    third = second + "reply 2<|im_end|>\n<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\n"
    assert asked == [[first], [second]]
    assert [(p.id, tokenizer.decode(p.ids)) for p in mine.dialogues[0].prompts] == [
        ("d/0", first), ("d/1", second), ("d/2", third),
    ]  # fmt: skip
    assert longest >= sets.longest  # what was set aside before the replies were known was enough


def test_replies_within_a_set_of_dialogues_are_history(sets_of, tokenizer):
    messages = [{"role": r, "content": r} for r in ("user", "assistant", "user")]
    [prompt] = sets_of({"messages": messages}).sets[1].prompts
    assert tokenizer.decode(prompt.ids).count("<|im_start|>assistant") == 2


def test_rows_of_ids_are_served_as_they_are(sets_of):
    assert sets_of({"prompt_token_ids": [5, 6, 7]}).sets[1].prompts[0].ids == [5, 6, 7]


def test_replies_on_sets_may_be_longer_than_the_samples(sets_of):
    sets = sets_of({"prompt": "a"}, max_tokens=40)
    assert [p.max_tokens for p in sets.sets[1].prompts] == [40]
    assert [p.max_tokens for p in sets.sets[0].prompts] == [16] * 4  # replay knows them at this length


def test_a_set_is_limited_evenly(sets_of):
    rows = [{"id": f"r{i}", "prompt": "x"} for i in range(10)]
    assert [p.id for p in sets_of(*rows, max_prompts=3).sets[1].prompts] == ["r0/0", "r3/0", "r6/0"]
    assert spread("abc", None) == spread("abc", 7) == list("abc")


def test_a_pass_takes_whole_dialogues(sets_of):
    sets = sets_of(*({"id": f"r{i}", "turns": ["x", "y"]} for i in range(6)))
    sets.complete(lambda prompts, max_tokens: [([1], "length") for _ in prompts])
    assert [p.id for p in sets.sets[1].some(4)] == ["r0/0", "r0/1", "r3/0", "r3/1"]
    assert len(sets.sets[1].some(1)) == 2 and len(sets.sets[1].some(None)) == len(sets.sets[1].some(99)) == 12


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ("{", r"my set\.jsonl, line 1: not_json"),
        ("", "no prompt to serve"),
        (
            {"id": "far", "prompt": "a b " * 200},
            "`far`, turn 1: its prompt of .* is longer than the target's context of 256",
        ),
    ],
)
def test_a_set_that_cannot_be_served_is_refused(sets_of, row, named):
    with pytest.raises(UserError, match=named):
        sets_of(row)


def test_the_requests_are_kept_id_for_id(sets_of, tmp_path):
    sets = sets_of({"id": "d", "prompt": "a"})
    write_prompts(tmp_path / "prompts.parquet", sets.sets)
    rows = pq.read_table(tmp_path / "prompts.parquet").to_pylist()
    assert rows == [
        {"set": s.name, "prompt_id": p.id, "prompt_ids": p.ids, "max_tokens": p.max_tokens}
        for s in sets.sets
        for p in s.prompts
    ]
    assert len(rows) == 5


# ---- sets by name ----------------------------------------------------------------------------------------------------


def test_named_sets_are_files_of_a_folder(config_file):
    path = config_file("eval: {sets: [mt_bench, own.jsonl], sets_dir: bench/}")
    config = load_config(path)
    assert config.eval.sets == ["bench/mt_bench.jsonl", "own.jsonl"]
    assert type(config).model_validate(config.model_dump()) == config


def test_a_named_set_without_a_folder_is_refused(config_file):
    with pytest.raises(UserError, match=r"mt_bench by name needs eval\.sets_dir, the folder with mt_bench\.jsonl"):
        load_config(config_file("eval: {sets: [mt_bench]}"))


def test_a_k_that_is_given_twice_is_refused(config_file):
    with pytest.raises(UserError, match="given twice: 3"):
        load_config(config_file("eval: {k: [3, 5, 3]}"))
