"""`prepare`: sources -> conversations -> rows as served -> `samples/` and `vocab_mapping.safetensors`.

Everything streams: conversations and rows wait on disk, memory holds hashes and counts.
"""

import json
import shutil
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from draftsmith.core.atomic import atomic_folder, remove, sha256_json, write_json, write_text
from draftsmith.core.config import Config
from draftsmith.core.conversations import Conversation, Skipped
from draftsmith.core.damage import reading
from draftsmith.core.engine import engine_dtype, require_vllm
from draftsmith.core.errors import UserError
from draftsmith.core.lineage import NOT_OF_THE_SAMPLES
from draftsmith.core.manifest import check_inputs, read_manifest, write_manifest
from draftsmith.core.progress import say
from draftsmith.core.revisions import Revisions, content, hub_revisions, pinned
from draftsmith.core.run import RunFolder
from draftsmith.core.samples import Sample, SampleWriter
from draftsmith.core.sources import fingerprint
from draftsmith.core.target import Target, end_token_ids, load_tokenizer, resolve_target
from draftsmith.core.target_weights import load_target_weights
from draftsmith.core.vocab import build_mapping
from draftsmith.core.vocabulary import always_kept, make_vocabulary, sample_figures
from draftsmith.data.contamination import contamination_sets
from draftsmith.data.dialogues import ENDED_EARLY
from draftsmith.data.disk_list import DiskList
from draftsmith.data.inputs import Inputs, read_inputs, source_names
from draftsmith.data.keep import keep
from draftsmith.data.length import Unfit, fit
from draftsmith.data.regenerate import regenerate
from draftsmith.data.replies import SAME_REPLY, place, sample_id
from draftsmith.data.rows import Row
from draftsmith.data.sheet import Examples, sheet_html
from draftsmith.data.tally import Tally

SKIPPED = "skipped.jsonl"
SHEET = "sheet.html"
REVISIONS = "revisions.json"


def prepare(config: Config) -> None:
    """Make the samples of a run; does nothing where they are there already.

    Raises:
        UserError: a source is missing or empty, too many rows are unusable, or the run has other samples.
        StageFailed: the engine died.
    """
    run = RunFolder.of(config)
    target = resolve_target(config.target)
    tokenizer = load_tokenizer(target, config.target)
    if manifest := read_manifest(run.samples):
        revisions = manifest.get("revisions", {})
        _already_there(config, run, manifest, prepare_inputs(config, target, revisions), revisions)
        make_vocabulary(config, run, target)
        return
    revisions = hub_revisions([*config.data.sources, *contamination_sets(config)], _kept_revisions(run))
    inputs = prepare_inputs(config, target, revisions)
    if config.data.replies == "regenerate" and config.data.server is None:
        require_vllm("prepare")
    with run.scratch() as scratch:
        tally = Tally(source_names(config), scratch / SKIPPED)
        read = read_inputs(config, tokenizer, target.vocab_size, scratch, tally, revisions)
        tally.check(config, len(read.conversations))
        end_ids = end_token_ids(target, tokenizer)
        _check_target(config, target)
        if read.held_out.all():
            raise UserError(
                f"all {len(read.conversations)} conversations are held out from training (alike ones stay together).",
                "Add different prompts, or set data.eval_share to 0.",
            )
        run.open(config)
        write_json(run.journal / REVISIONS, revisions)
        # Evaluation sets take conversations out, and so decide which number the others have.
        checked = {path: content(path, revisions) for path in contamination_sets(config)}
        journal = _journal(config, run, {**inputs, "not_in": checked})
        rows = _made(config, target, read.conversations, journal)
        samples = _fitting(config, end_ids, read, rows, tally, scratch / "rows")
        with atomic_folder(run.samples) as folder:
            examples = _write(folder, samples, tally)
            figures = tally.figures()
            tally.close()
            shutil.move(scratch / SKIPPED, folder / SKIPPED)
            write_text(folder / SHEET, sheet_html(config, tokenizer, folder, figures, examples))
            write_manifest(folder, "prepare", inputs, {**figures, "not_in": checked, "revisions": revisions})
    remove(run.journal)
    make_vocabulary(config, run, target, quiet=True)
    _say_figures(config, run, target, sample_figures(run, figures))


def prepare_inputs(config: Config, target: Target, revisions: Revisions = MappingProxyType({})) -> dict[str, Any]:
    """Everything that decides the samples, the evaluation sets of `eval.sets` apart."""
    data = config.data.model_dump(mode="json", exclude=NOT_OF_THE_SAMPLES)
    for given, source in zip(data["sources"], config.data.sources, strict=True):
        given |= {"sha256": fingerprint(source), "revision": pinned(source, revisions).revision}
    described = target.fingerprint(config.target)
    if config.data.replies == "regenerate" and config.data.server is None:
        described["dtype"] = engine_dtype(config.target)  # what `auto` is on this machine decides the replies
    return {
        "data": data,
        "contamination_sha256": [content(path, revisions) for path in config.data.contamination.sets],
        "seed": config.run.seed,
        "target": described,
    }


def _journal(config: Config, run: RunFolder, inputs: dict[str, Any]) -> Path:
    """Where the replies of an unfinished `prepare` are kept, by what decides them."""
    # Begun by an earlier version, whose inputs had the draft vocabulary's size: the replies in it are these.
    with_size = {**inputs, "data": {**inputs["data"], "draft_vocab_size": config.data.draft_vocab_size}}
    old, new = (run.journal / sha256_json(each)[:16] for each in (with_size, inputs))
    return old if old.is_dir() and not new.is_dir() else new


def _kept_revisions(run: RunFolder) -> Revisions:
    """What a run that was stopped had found."""
    path = run.journal / REVISIONS
    if not path.is_file():
        return {}
    with reading(path, f"Delete {run.journal}; the replies in it are made again."):
        kept: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    return kept


def _already_there(
    config: Config, run: RunFolder, manifest: dict[str, Any], inputs: dict[str, Any], revisions: Revisions
) -> None:
    made_in = manifest["inputs"]["target"]["dtype"]
    if config.target.dtype == "auto" and (config.data.server or made_in == "auto"):
        inputs["target"]["dtype"] = made_in  # what `auto` is on a server, nobody says
    # An earlier version took the draft vocabulary's size for something that decides the samples.
    recorded = {key: value for key, value in manifest["inputs"]["data"].items() if key not in NOT_OF_THE_SAMPLES}
    check_inputs(run.samples, {**manifest, "inputs": {**manifest["inputs"], "data": recorded}}, inputs)
    say(f"samples: {manifest['counts']['train']} train, {manifest['counts']['eval']} held out (already there)")
    # An evaluation set that comes later does not undo a capture; but nobody has looked for it in the samples.
    checked, sets = manifest.get("not_in", {}), contamination_sets(config)
    if new := [path for path in sets if path not in checked or checked[path] != content(path, revisions)]:
        say(
            f"warning: the samples were made before {', '.join(new)}; "
            "`draftsmith prepare --fresh` would look for it in them"
        )


def _check_target(config: Config, target: Target) -> None:
    """What would fail a later stage fails here, before the target answers a single prompt."""
    none = np.zeros(target.vocab_size, dtype=np.int64)
    build_mapping(none, always_kept(config, target), config.data.draft_vocab_size)
    load_target_weights(target)
    context = getattr(target.hf_config, "max_position_embeddings", None)
    spare = max(2, max(config.eval.k) + 1)  # capture makes a token more than a sample holds, serving drafts K more
    if isinstance(context, int) and config.data.max_length + spare > context:
        raise UserError(
            f"data.max_length is {config.data.max_length}, and the target's context of {context} tokens must also hold "
            f"{spare} more while serving.",
            f"Set data.max_length to {context - spare} or less.",
        )


def _made(
    config: Config, target: Target, conversations: Sequence[Conversation], journal: Path
) -> Iterator[Row | Skipped]:
    if config.data.replies == "keep":
        yield from keep(config, target, conversations)
    else:
        yield from regenerate(config, target, conversations, journal)


def _fitting(
    config: Config, end_ids: list[int], read: Inputs, rows: Iterator[Row | Skipped], tally: Tally, file: Path
) -> Iterator[Sample]:
    """Rows that fit, as samples, in the conversations' order: engines answer in any order, runs must be the same."""
    made: DiskList[Row] = DiskList(file)
    at, reply, turn = array("Q"), array("L"), array("L")
    for row in rows:
        kept = row if isinstance(row, Skipped) else fit(row, config.data, end_ids)
        if isinstance(kept, Unfit):
            assert isinstance(row, Row)
            conversation = read.conversations[row.conversation]
            tally.skip(Skipped(place(conversation, row.reply), *kept, conversation.source))
        elif isinstance(kept, Skipped):
            # A conversation that ends early, or that has a reply twice, has rows all the same: no fault of the source.
            (tally.remove if kept.reason in (*ENDED_EARLY, SAME_REPLY) else tally.skip)(kept)
        else:
            made.append(kept)
            at.append(kept.conversation)
            reply.append(kept.reply)
            turn.append(kept.turn)
    tally.check(config, len(made))
    if not len(made) or read.held_out[np.asarray(at, dtype=np.int64)].all():
        raise UserError("no training sample came out of the sources.", "Add prompts, or lower data.eval_share.")
    for i in np.lexsort([np.asarray(key) for key in (turn, reply, at)]):
        row = made[int(i)]
        conversation = read.conversations[row.conversation]
        yield Sample(
            sample_id=sample_id(conversation.id, row.turn, row.reply),
            input_ids=row.input_ids,
            loss_spans=row.loss_spans,
            source=conversation.source,
            finish_reason=row.finish_reason,
            split="eval" if read.held_out[row.conversation] else "train",
            author=row.author,
            conversation_id=conversation.id,
            turn=row.turn,
        )


def _write(folder: Path, samples: Iterator[Sample], tally: Tally) -> Examples:
    examples = Examples()
    with SampleWriter(folder) as writer:
        for sample in samples:
            writer.write(sample)
            tally.use(sample)
            examples.see(sample)
    return examples


def _say_figures(config: Config, run: RunFolder, target: Target, figures: dict[str, Any]) -> None:
    def counted(key: str) -> str:
        return ", ".join(f"{n:,} {what}" for what, n in figures[key].items()) or "none"

    say(
        f"samples: {figures['counts']['train']:,} train, {figures['counts']['eval']:,} held out, "
        f"{figures['reply_tokens']:,} reply tokens; the draft vocabulary holds {figures['coverage_train']:.1%} of them "
        f"({figures['coverage_eval']:.1%} held out) -> {run.samples}"
    )
    say(f"rows by shape: {counted('shapes')}; skipped: {counted('skipped')}; removed: {counted('removed')}")
    if cut := figures["finish_reasons"].get("length"):
        say(f"{cut:,} replies were cut by length and are used as far as they go")
    ours = {"target", config.target.path, Path(config.target.path).name}
    others = {name: n for name, n in figures["authors"].items() if name not in ours}
    if others:
        say(
            f"warning: {sum(others.values()):,} samples hold replies that the target is not known to have written "
            f"({', '.join(others)}); a draft learns another model's habits from them: data.replies=regenerate"
        )
    size = config.data.draft_vocab_size or 0
    if size % 128 and size < target.vocab_size:
        say(f"data.draft_vocab_size is {size}; {size + 128 - size % 128}, a multiple of 128, would be faster to serve")
