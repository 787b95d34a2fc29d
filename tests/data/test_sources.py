"""Sources: whatever the file format, every row comes out, at its place, in bounded memory."""

import gzip
import json
import tracemalloc
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.core import sources
from draftsmith.core.config import SourceConfig
from draftsmith.core.conversations import Conversation, Skipped
from draftsmith.core.errors import UserError
from draftsmith.core.rendering import render_prompt
from draftsmith.core.sources import DEMO, fingerprint, read_conversations, source_name

ROWS = [{"prompt": f"question {i} naïve 日本"} for i in range(5)]


def prompts(rows):
    return [row.messages[0]["content"] for row in rows]


def write_parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)


WRITERS = {
    "rows.jsonl": lambda path: path.write_text("".join(json.dumps(r) + "\n" for r in ROWS)),
    "rows.ndjson": lambda path: path.write_text("\n".join(json.dumps(r, ensure_ascii=False) for r in ROWS)),
    "rows.jsonl.gz": lambda path: path.write_bytes(gzip.compress("\n".join(map(json.dumps, ROWS)).encode())),
    "rows.json": lambda path: path.write_text(json.dumps(ROWS, indent=2)),
    "lines.json": lambda path: path.write_text("".join(json.dumps(r) + "\n" for r in ROWS)),
    "rows.parquet": lambda path: write_parquet(path, ROWS),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_its_rows_in_order_and_says_where_they_stand(tmp_path, name):
    path = tmp_path / name
    WRITERS[name](path)
    shapes = Counter()
    rows = list(read_conversations(str(path), shapes=shapes))
    assert prompts(rows) == [r["prompt"] for r in ROWS] and shapes == {"prompt": 5}
    assert all(row.place.startswith(f"{path}, ") and row.place.endswith(f" {i + 1}") for i, row in enumerate(rows))
    assert [row.id for row in rows] == [f"{name.split('.')[0]}-{i:07d}" for i in range(1, 6)]


def test_a_folder_is_all_its_files_and_made_up_ids_differ(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        for name in ("rows.jsonl", "rows.parquet"):
            WRITERS[name](tmp_path / folder / name)
    (tmp_path / "README.md").write_text("not a source")
    rows = list(read_conversations(str(tmp_path)))
    assert prompts(rows) == [r["prompt"] for r in ROWS] * 4
    # Two formats of one stem in one folder are the same shard twice: those ids may repeat, and are told apart later.
    assert len({row.id for row in rows}) == 10


def test_a_json_file_of_one_object_is_one_row(tmp_path):
    path = tmp_path / "one.json"
    path.write_text(json.dumps({"prompt": "a"}, indent=2))
    assert prompts(read_conversations(str(path))) == ["a"]
    path.write_text('{"prompt":\n "a"')
    (row,) = read_conversations(str(path))
    assert row.reason == "not_json" and row.place == str(path)


def test_hidden_files_of_a_folder_are_no_sources(tmp_path):
    for name in ("a.jsonl", ".cache/b.jsonl", ".c.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"prompt": "x"}\n')
    assert len(list(read_conversations(str(tmp_path)))) == 1


def test_a_folder_without_files_is_refused(tmp_path):
    with pytest.raises(UserError, match="the folder holds no"):
        list(read_conversations(str(tmp_path)))


@pytest.mark.parametrize("name", ["nowhere.jsonl", "data/nowhere.jsonl", "/no/where"])
def test_a_missing_source_is_named(name):
    with pytest.raises(UserError, match=f"data source `{name}`: no such file or folder"):
        list(read_conversations(name))


def test_bad_lines_are_skipped_at_their_places_and_the_others_are_read(tmp_path):
    path = tmp_path / "w.jsonl"
    lines = [b'{"prompt": "a"}', b"{not json", b'{"prompt": "na\xefve"}', b"", b" \r", b'{"prompt": "cut', b"[1]"]
    path.write_bytes(b"\n".join([*lines, b"[" * 100_000, b'{"prompt": "b"}\r']))
    rows = list(read_conversations(str(path)))
    assert prompts(r for r in rows if isinstance(r, Conversation)) == ["a", "b"]
    skipped = [(r.reason, r.place) for r in rows if isinstance(r, Skipped)]
    assert skipped == [
        ("not_json", f"{path}, line 2"),
        ("not_utf8", f"{path}, line 3"),
        ("not_json", f"{path}, line 6"),
        ("not_an_object", f"{path}, line 7"),
        ("not_json", f"{path}, line 8"),
    ]
    assert {r.source for r in rows} == {"w"}


@pytest.mark.parametrize("name", ["bom.jsonl", "bom.json"])
def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path, name):
    path = tmp_path / name
    text = '{"prompt": "a"}\n{"prompt": "b"}\n' if name == "bom.jsonl" else '[{"prompt": "a"}, {"prompt": "b"}]'
    path.write_text(text, encoding="utf-8-sig")
    assert prompts(read_conversations(str(path))) == ["a", "b"]


@pytest.mark.parametrize("text", ['[{"prompt": "a"}, {"prompt": ]', '[{"prompt": "a"}', '[{"prompt": "a"},'])
def test_a_broken_json_file_is_named_with_the_element(tmp_path, text):
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"broken\.json, element [12]: not valid JSON"):
        list(read_conversations(str(path)))


@pytest.mark.parametrize("name", ["bad.parquet", "bad.jsonl.gz"])
def test_a_damaged_file_is_named(tmp_path, name):
    (tmp_path / name).write_bytes(b"no such format")
    with pytest.raises(UserError, match=name):
        list(read_conversations(str(tmp_path / name)))


def test_rows_of_other_shapes_in_one_array_are_told_apart(tmp_path):
    path = tmp_path / "mixed.json"
    rows = [1, "a, b ] [", None, {"prompt": "a"}, [], {"prompt_token_ids": [1]}, 2.5]
    path.write_text(json.dumps(rows))
    shapes = Counter()
    read = list(read_conversations(str(path), shapes=shapes))
    assert [isinstance(r, Conversation) for r in read] == [False, False, False, True, False, True, False]
    assert shapes == {"prompt": 1, "token_ids": 1}


@settings(deadline=None, derandomize=True, database=None, max_examples=60)
@given(st.lists(st.text(max_size=40), max_size=8), st.integers(2, 60), st.sampled_from([None, 2]))
def test_an_array_is_read_alike_whatever_the_size_of_the_portions(tmp_path_factory, texts, chunk, indent):
    path = tmp_path_factory.mktemp("array") / "a.json"
    path.write_text(json.dumps([{"prompt": t} for t in texts], indent=indent, ensure_ascii=True))
    whole = list(read_conversations(str(path)))
    before, sources._CHUNK = sources._CHUNK, chunk
    try:
        assert list(read_conversations(str(path))) == whole and len(whole) == len(texts)
    finally:
        sources._CHUNK = before


@pytest.mark.parametrize("name", ["big.jsonl", "big.json", "big.parquet"])
def test_a_large_file_is_read_in_bounded_memory(tmp_path, name):
    path, rows = tmp_path / name, [{"prompt": f"{i} " + "x" * 20_000} for i in range(2000)]
    if name.endswith("jsonl"):
        path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    elif name.endswith("json"):
        path.write_text(json.dumps(rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=200)
    del rows
    tracemalloc.start()
    assert sum(isinstance(r, Conversation) for r in read_conversations(str(path))) == 2000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16e6  # of 40 MB


# ---- Hugging Face data sets ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streaming", [False, True])
def test_a_data_set_is_read_through_the_library(tmp_path, monkeypatch, streaming):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    WRITERS["rows.parquet"](folder / "rows.parquet")
    config = SourceConfig(path=f"hf:{folder}", streaming=streaming)
    rows = list(read_conversations(config))
    assert prompts(rows) == [r["prompt"] for r in ROWS]
    assert rows[1].place == f"hf:{folder}[train], row 2" and rows[1].id == "set-0000002"
    with pytest.raises(UserError, match="split `test`"):
        list(read_conversations(SourceConfig(path=f"hf:{folder}", streaming=streaming, split="test")))


@pytest.mark.parametrize("path", ["hf:nobody/nothing-of-this-name", "nobody/nothing-of-this-name"])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_hub_that_cannot_be_reached_is_said(path, streaming, monkeypatch):
    import datasets
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"nothing-of-this-name.*could not be read.*network"):
        list(read_conversations(SourceConfig(path=path, streaming=streaming)))


def test_names_of_sources():
    assert [source_name(p) for p in ("a/x.jsonl.gz", "hf:org/set", "org/set", "folder/", DEMO)] == [
        "x",
        "set",
        "set",
        "folder",
        DEMO,
    ]


def test_a_fingerprint_follows_content_and_not_the_place(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        WRITERS["rows.jsonl"](tmp_path / name / "rows.jsonl")
    a, b = tmp_path / "a", tmp_path / "b"
    assert fingerprint(str(a)) == fingerprint(str(b)) and fingerprint(str(a / "rows.jsonl"))
    (b / "rows.jsonl").write_text('{"prompt": "other"}\n')
    assert fingerprint(str(a)) != fingerprint(str(b))
    assert fingerprint("hf:org/name") is None  # its revision is in the config


# ---- the packaged prompts --------------------------------------------------------------------------------------------


def test_the_demo_prompts_are_many_unique_and_all_usable(tokenizer):
    rows = list(read_conversations(DEMO))
    assert len(rows) >= 500 and all(isinstance(r, Conversation) for r in rows)
    assert not [text for text, n in Counter(str(r.messages) for r in rows).items() if n > 1]
    assert len({r.id for r in rows}) == len(rows)
    assert all(render_prompt(tokenizer, list(r.messages), r.place) for r in rows)
