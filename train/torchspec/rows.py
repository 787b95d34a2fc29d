"""The samples as TorchSpec's data rows: our token ids, as served, and which rows are supervised.

TorchSpec renders and tokenises conversations itself, and finds the replies by their markers; the ids and masks that
come out are not those that the engine was given and emitted. It keeps what it has tokenised in a cache, though, by a
key of the file's name, size and time and of its settings; so the cache is what we write, beside the rows in its
`conversations` form that the key is about. A log line says whether it took the cache (see log.py); where it did not,
training is ended.

THE MASK. With its mask m, row t is supervised at step j where m[t+j-1] = 1; the token of step j is x[t+j], its label
P[t+j]. Ours is supervised where x[t+1] .. x[t+j+1] are tokens of one reply (core/unroll.py). For one of x[s] .. x[e-1]:

    m = 1 on s-1 .. e-3      step 1: rows s-1 .. e-3, as ours
                             step j: rows s-j .. e-j-2, ours s-1 .. e-j-2: up to j - 1 rows of the prompt come on top

so the first draft of a reply is trained, no label lies behind a reply's end, and a row that its own mask would leave
out (s-1) or put in (those that ask for what follows the end) is as the server needs it.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from draftsmith.core.atomic import write_atomic
from draftsmith.core.samples import Sample


def supervised_spans(sample: Sample) -> list[tuple[int, int]]:
    """[start, end) of the mask's ones; a reply of one token has none, for nothing is drafted in it."""
    spans = [(max(start - 1, 0), end - 2) for start, end in sample.loss_spans]
    return [(start, end) for start, end in spans if end > start]


def packed_mask(sample: Sample) -> str:
    """The mask as TorchSpec packs it: lengths of zeros and ones in turn, zeros first."""
    lengths, at = [], 0
    for start, end in supervised_spans(sample):
        lengths += [start - at, end - start]
        at = end
    if at < len(sample.input_ids):
        lengths.append(len(sample.input_ids) - at)
    return ",".join(str(n) for n in lengths)


def usable(samples: Iterable[Sample], longest: int) -> Iterator[Sample]:
    """Samples with something to learn that the engine can read.

    One without a supervised row is skipped by the training process that drew it, which then waits for another while the
    others wait for it.
    """
    return (s for s in samples if len(s.input_ids) <= longest and supervised_spans(s))


def write_rows(path: Path, samples: list[Sample], tokenizer: Any) -> None:
    """The rows as text, in `conversations` form: for people, and for the cache's key; training reads the cache."""

    def write(tmp: Path) -> None:
        with tmp.open("w", encoding="utf-8") as file:
            for sample in samples:
                said = [
                    {"role": "assistant" if replied else "user", "content": tokenizer.decode(ids)}
                    for replied, ids in sample.segments
                ]
                file.write(json.dumps({"id": sample.sample_id, "conversations": said}, ensure_ascii=False) + "\n")

    write_atomic(path, write)


def write_cache(path: Path, samples: list[Sample]) -> None:
    """What `load_conversation_dataset` keeps of the rows: a list, one dict a row, by torch.save."""
    entries: list[dict[str, Any]] = [
        {
            "data_id": sample.sample_id,
            "metadata": {},
            "multimodal_inputs": None,
            "formatted_prompt": "",
            "input_ids": torch.tensor([sample.input_ids]),
            "packed_loss_mask": packed_mask(sample),
        }
        for sample in samples
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, lambda tmp: torch.save(entries, tmp))


def cache_path(rows: Path, tree: dict[str, Any]) -> Path:
    """Where TorchSpec looks for the tokenised form of `rows`: its key, of `load_conversation_dataset`.

    Args:
        rows: the file as it lies there now; its time is part of the key.
        tree: TorchSpec's config.
    """
    about, data = rows.stat(), tree["dataset"]
    key = (
        f"{rows.name}-{rows}-{about.st_size}-{about.st_mtime}-{tree['model']['target_model_path']}"
        f"-{tree['training']['max_seq_length']}-{data['chat_template']}-ltlo={data['last_turn_loss_only']}"
        f"-defer={data['defer_tokenization']}-decode=False-mlt={data['min_loss_tokens']}"
    )
    name = hashlib.md5(key.encode(), usedforsecurity=False).hexdigest()
    return Path(tree["cache_dir"]) / "tokenized_dataset" / f"{name}.pt"
