"""A run's draft vocabulary, made from the replies that are there: again whenever it is missing or of another size.

Samples and hidden states do not depend on it, training and all that follows do. What a mapping was made from lies in
its own metadata, so that another `data.draft_vocab_size` leaves `samples/` as it is, to the byte.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from draftsmith.core.atomic import sha256_file
from draftsmith.core.config import Config
from draftsmith.core.damage import reading
from draftsmith.core.errors import UserError
from draftsmith.core.manifest import manifest_hash, read_manifest
from draftsmith.core.progress import say
from draftsmith.core.run import RunFolder
from draftsmith.core.samples import reply_counts
from draftsmith.core.target import Target, end_token_ids, load_tokenizer
from draftsmith.core.vocab import VocabMapping, build_mapping, coverage, load_mapping, save_mapping

_ABOUT = "draftsmith"  # one key: the order of several is not always the same, and the file's hash is an input
_SIZE, _OLD_HASH = "draft_vocab_size", "vocab_mapping_sha256"


def make_vocabulary(config: Config, run: RunFolder, target: Target, quiet: bool = False) -> None:
    """Make `vocab_mapping.safetensors` from the samples, unless it is of these and of the config's size.

    Args:
        config: of the run.
        run: its folder; its samples are there.
        target: resolved.
        quiet: do not say that it was made.

    Raises:
        UserError: there are no samples, or the target's vocabulary cannot give that size.
    """
    size, path = config.data.draft_vocab_size or target.vocab_size, run.vocab_mapping
    there = _read(path)
    if there is not None and len(there.d2t) == size and _of_these(run, there):
        return
    if not read_manifest(run.samples):
        raise UserError(f"{run.samples}: no samples to make {path.name} from.", "Run `draftsmith prepare` first.")
    counts = reply_counts(run.samples, target.vocab_size)
    total = {split: sum(c for (_, s), c in counts.items() if s == split) for split in ("train", "eval")}
    none = np.zeros(target.vocab_size, dtype=np.int64)
    mapping = build_mapping(none + total["train"], always_kept(config, target), config.data.draft_vocab_size)
    about = {
        "samples_manifest_sha256": manifest_hash(run.samples),
        "content_sha256": _content(mapping),
        "coverage_train": coverage(mapping, none + total["train"]),
        "coverage_eval": coverage(mapping, none + total["eval"]),
        "sources": {source: coverage(mapping, c) for (source, s), c in sorted(counts.items()) if s == "train"},
    }
    save_mapping(path, mapping, {_ABOUT: json.dumps(about, sort_keys=True)})
    if quiet:
        return
    before = f"{len(there.d2t):,} -> " if there is not None and len(there.d2t) != size else ""
    say(
        f"draft vocabulary: {before}{size:,} tokens, from the replies that are there; it holds "
        f"{about['coverage_train']:.1%} of them ({about['coverage_eval']:.1%} held out)"
    )


def vocabulary_to_train(config: Config, run: RunFolder, target: Target) -> None:
    """`make_vocabulary` for a training that has not begun; one that has keeps its own, or is refused by its inputs."""
    begun = run.complete_checkpoints() or read_manifest(run.torchspec)
    if not (begun and run.vocab_mapping.is_file()):
        make_vocabulary(config, run, target)


def always_kept(config: Config, target: Target) -> list[int]:
    """In the draft's vocabulary whatever their count: a draft that cannot end a turn is wrong in every reply."""
    tokenizer = load_tokenizer(target, config.target)
    return [*end_token_ids(target, tokenizer), *tokenizer.all_special_ids]


def vocabulary_inputs(config: Config, run: RunFolder) -> dict[str, Any]:
    """What a training depends on: the size that the config asks for, and which mapping there is."""
    mapping, samples = load_mapping(run.vocab_mapping), read_manifest(run.samples) or {}
    named = sha256_file(run.vocab_mapping)
    # Of an earlier version's run, whose mapping was made for another size and is what it was again: by its old name.
    if _about(run.vocab_mapping) and _OLD_HASH in samples and len(mapping.d2t) == _old_size(samples, len(mapping.t2d)):
        named = samples[_OLD_HASH]
    return {"data": {_SIZE: config.data.draft_vocab_size or len(mapping.t2d)}, _OLD_HASH: named}


def recorded_vocabulary(run: RunFolder, recorded: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Any]:
    """A training's recorded inputs, so that another size is named by its setting and not by a hash.

    Args:
        run: its folder.
        recorded: when it was trained; an earlier version wrote no size.
        inputs: of the config at hand.
    """
    recorded = dict(recorded)
    if "data" not in recorded and "data" in inputs:
        samples, size = read_manifest(run.samples) or {}, inputs["data"][_SIZE]
        if recorded.get(_OLD_HASH) == samples.get(_OLD_HASH) is not None:
            size = _old_size(samples, len(load_mapping(run.vocab_mapping).t2d))
        recorded["data"] = {_SIZE: size}
    if recorded.get("data") != inputs.get("data"):
        recorded[_OLD_HASH] = inputs[_OLD_HASH]
    return recorded


def sample_figures(run: RunFolder, manifest: dict[str, Any]) -> dict[str, Any]:
    """What the samples' manifest says, with the coverage by the vocabulary that is there.

    Raises:
        UserError: the mapping is damaged.
    """
    if not run.vocab_mapping.is_file() or not (about := _about(run.vocab_mapping)):
        return manifest
    by_source = about["sources"]
    sources = {k: {**v, "coverage_train": by_source.get(k, 0.0)} for k, v in manifest.get("sources", {}).items()}
    figures = {key: about[key] for key in ("coverage_train", "coverage_eval")}
    size = len(load_mapping(run.vocab_mapping).d2t)
    return {**manifest, **figures, _SIZE: size, **({"sources": sources} if sources else {})}


def _of_these(run: RunFolder, mapping: VocabMapping) -> bool:
    """Whether it was made from the run's samples, and is whole."""
    samples, about = read_manifest(run.samples), _about(run.vocab_mapping)
    if samples is None:
        return True  # nobody can say, and nothing can be made
    if about:
        wanted = (manifest_hash(run.samples), _content(mapping))
        return (about["samples_manifest_sha256"], about["content_sha256"]) == wanted
    return samples.get(_OLD_HASH) == sha256_file(run.vocab_mapping)


def _old_size(samples: dict[str, Any], vocab_size: int) -> int:
    """Of the mapping that an earlier version made with the samples."""
    return int(samples["inputs"].get("data", {}).get(_SIZE) or vocab_size)


def _read(path: Path) -> VocabMapping | None:
    """What is there; None where it is missing or damaged, and so to be made again."""
    try:
        _about(path)
        return load_mapping(path)
    except UserError:
        return None


def _about(path: Path) -> dict[str, Any]:
    """What the mapping was made from; empty where an earlier version made it."""
    with reading(path, "Run `draftsmith prepare`, which makes it again."), safe_open(path, "np") as file:
        about: dict[str, Any] = json.loads((file.metadata() or {}).get(_ABOUT, "{}"))
    return about


def _content(mapping: VocabMapping) -> str:
    return hashlib.sha256(mapping.d2t.astype("<i8").tobytes() + mapping.t2d.tobytes()).hexdigest()
