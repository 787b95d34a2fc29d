"""What the tests of the data stage share: sources on disk, and the stage's own reading of them."""

import json
from types import SimpleNamespace

import pytest

from draftsmith.core.conversations import Conversation
from draftsmith.core.target import load_tokenizer, resolve_target
from draftsmith.data.inputs import read_inputs, source_names
from draftsmith.data.tally import Tally


@pytest.fixture
def source(tmp_path):
    """`source(row, ...)`: path of a JSONL file; rows are objects, or raw lines."""

    def write(*rows, name="s.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8")
        return str(path)

    return write


@pytest.fixture
def target(make_config):
    return resolve_target(make_config().target)


@pytest.fixture
def tokenizer(make_config, target):
    return load_tokenizer(target, make_config().target)


@pytest.fixture
def tally_of(tmp_path):
    """`tally_of(names)`: a tally of its own; `listed(tally)` closes it and gives what it listed."""
    made = []

    def make(names):
        made.append(tmp_path / f"listing-{len(made)}")
        return Tally(names, made[-1])

    def listed(tally):
        tally.close()
        return [SimpleNamespace(**json.loads(line)) for line in made[-1].read_text().splitlines()]

    make.listed = listed
    return make


@pytest.fixture
def read(make_config, target, tokenizer, tally_of, tmp_path):
    """`read(path, ..., data={}, seed=0, **source)`: conversations, held_out, what was listed, the tally."""

    def read_all(*paths, data=None, seed=0, eval_sets=(), **options):
        sources = [{"path": p, **options} for p in paths]
        config = make_config(
            run={"seed": seed}, data={"sources": sources, **(data or {})}, eval={"sets": list(eval_sets)}
        )
        tally = tally_of(source_names(config))
        folder = tmp_path / f"scratch-{len(list(tmp_path.glob('scratch-*')))}"
        folder.mkdir()
        inputs = read_inputs(config, tokenizer, target.vocab_size, folder, tally)
        return SimpleNamespace(
            conversations=list(inputs.conversations),
            held_out=inputs.held_out,
            listed=tally_of.listed(tally),
            tally=tally,
            inputs=inputs,
        )

    return read_all


@pytest.fixture
def talk():
    """`talk(text, ...)`: conversations of one user turn each."""

    def make(*texts):
        return [
            Conversation(f"id-{i}", "s", f"f, line {i + 1}", ({"role": "user", "content": t},))
            for i, t in enumerate(texts)
        ]

    return make
