"""`prepare`: sources -> target's replies -> `samples/` and `vocab_mapping.safetensors`."""

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

from draftsmith.core.atomic import atomic_folder, sha256_file, write_text
from draftsmith.core.config import Config
from draftsmith.core.conversations import Conversation, Skipped, read_conversations, source_file
from draftsmith.core.engine import require_vllm
from draftsmith.core.errors import UserError
from draftsmith.core.manifest import check_inputs, read_manifest, write_manifest
from draftsmith.core.progress import say
from draftsmith.core.run import RunFolder
from draftsmith.core.samples import Sample, write_samples
from draftsmith.core.target import Target, load_tokenizer, resolve_target
from draftsmith.core.target_weights import load_target_weights
from draftsmith.core.vocab import VocabMapping, build_mapping, coverage, save_mapping
from draftsmith.data.regenerate import Reply, regenerate

SKIPPED = "skipped.jsonl"


def prepare(config: Config) -> None:
    """Make the samples of a run; does nothing where they are there already.

    Raises:
        UserError: a source is missing or empty, too many rows are unusable, or the run has other samples.
        StageFailed: the engine died.
    """
    run = RunFolder.of(config)
    target = resolve_target(config.target)
    tokenizer = load_tokenizer(target, config.target)
    inputs = prepare_inputs(config, target)
    if manifest := read_manifest(run.samples):
        check_inputs(run.samples, manifest, inputs)
        if not run.vocab_mapping.is_file() or sha256_file(run.vocab_mapping) != manifest["vocab_mapping_sha256"]:
            raise UserError(f"{run.vocab_mapping}: missing or damaged.", "Run `draftsmith prepare --fresh`.")
        say(f"samples: {manifest['counts']['train']} train, {manifest['counts']['eval']} held out (already there)")
        return
    require_vllm("prepare")
    conversations, skipped = _read_sources(config)
    _check_skips(config, len(conversations), skipped)
    _check_target(config, target, tokenizer.all_special_ids)
    if len(_held_out(config, conversations)) == len(conversations):
        raise UserError(
            f"all {len(conversations)} conversations are held out from training (alike ones stay together).",
            "Add different prompts, or set data.eval_share to 0.",
        )
    run.open(config)
    replies, more = regenerate(config, target, conversations)
    skipped += more
    _check_skips(config, len(conversations) - len({s.place for s in more}), skipped)
    samples = _samples(config, conversations, replies, skipped)
    _check_skips(config, len(samples), skipped)
    mapping = _mapping(config, target, tokenizer.all_special_ids, samples)
    figures = _figures(samples, skipped, mapping)
    save_mapping(run.vocab_mapping, mapping, {k: figures[k] for k in ("coverage_train", "coverage_eval")})
    with atomic_folder(run.samples) as folder:
        write_samples(folder, samples)
        write_text(folder / SKIPPED, "".join(json.dumps(vars(s), ensure_ascii=False) + "\n" for s in skipped))
        outputs = {**figures, "vocab_mapping_sha256": sha256_file(run.vocab_mapping)}
        write_manifest(folder, "prepare", inputs, outputs)
    say(
        f"samples: {figures['counts']['train']} train, {figures['counts']['eval']} held out, "
        f"{figures['reply_tokens']:,} reply tokens; the draft vocabulary holds {figures['coverage_train']:.1%} of them "
        f"({figures['coverage_eval']:.1%} held out); {len(skipped)} rows skipped -> {run.samples}"
    )


def prepare_inputs(config: Config, target: Target) -> dict[str, Any]:
    """Everything that decides the samples."""
    data = config.data.model_dump(mode="json", exclude={"max_skip_share"})
    for source in data["sources"]:
        source["sha256"] = sha256_file(source_file(source["path"]))
    return {"data": data, "seed": config.run.seed, "target": target.fingerprint(config.target)}


def _check_target(config: Config, target: Target, special_ids: list[int]) -> None:
    """What would fail a later stage fails here, before the target answers a single prompt."""
    _mapping(config, target, special_ids, [])
    load_target_weights(target)
    context = getattr(target.hf_config, "max_position_embeddings", None)
    spare = max(2, max(config.eval.k) + 1)  # capture makes a token more than a sample holds, serving drafts K more
    if isinstance(context, int) and config.data.max_length + spare > context:
        raise UserError(
            f"data.max_length is {config.data.max_length}, and the target's context of {context} tokens must also hold "
            f"{spare} more while serving.",
            f"Set data.max_length to {context - spare} or less.",
        )


def _read_sources(config: Config) -> tuple[list[Conversation], list[Skipped]]:
    conversations: list[Conversation] = []
    skipped: list[Skipped] = []
    seen: dict[str, str] = {}
    for source, name in zip(config.data.sources, _source_names(config), strict=True):
        taken, before = 0, len(skipped)
        for row in read_conversations(source.path, name):
            if source.limit is not None and taken >= source.limit:
                break
            if isinstance(row, Skipped):
                skipped.append(row)
                continue
            if _unit_hash(f"weight {config.run.seed} {row.id}") >= source.weight:
                continue
            if row.id in seen:
                skipped.append(Skipped(row.place, "duplicate_id", f"`{row.id}` is also at {seen[row.id]}"))
                continue
            seen[row.id] = row.place
            conversations.append(row)
            taken += 1
        if not taken:
            first = next((f" The first skipped: {s.place}: {s.reason} ({s.detail})." for s in skipped[before:]), "")
            raise UserError(
                f"data source `{source.path}` ({source_file(source.path)}) gives no conversation.{first}",
                "Each line must be an object with `messages` or `prompt`.",
            )
    return conversations, skipped


def _source_names(config: Config) -> list[str]:
    """A name of its own for every source: two files `a/x.jsonl` and `b/x.jsonl` must not share made-up ids."""
    stems = [Path(source.path).stem for source in config.data.sources]
    return [stem if stems.count(stem) == 1 else f"{stem}-{i}" for i, stem in enumerate(stems)]


def _check_skips(config: Config, used: int, skipped: list[Skipped]) -> None:
    share = len(skipped) / max(1, used + len(skipped))
    if skipped and share > config.data.max_skip_share:
        reasons = ", ".join(f"{n} {reason}" for reason, n in Counter(s.reason for s in skipped).most_common())
        raise UserError(
            f"{len(skipped)} of {used + len(skipped)} rows cannot be used ({share:.1%}; data.max_skip_share is "
            f"{config.data.max_skip_share:.1%}): {reasons}. The first: {skipped[0].place}: {skipped[0].detail}.",
            "Mend the rows, or raise data.max_skip_share.",
        )


def _samples(
    config: Config, conversations: list[Conversation], replies: list[Reply], skipped: list[Skipped]
) -> list[Sample]:
    held_out = _held_out(config, conversations)
    samples = []
    for reply in replies:
        conversation = conversations[reply.conversation]
        start, end = len(reply.prompt_ids), len(reply.prompt_ids) + len(reply.reply_ids)
        if end - start < 2:
            skipped.append(Skipped(conversation.place, "reply_too_short", f"{end - start} tokens: nothing to draft"))
            continue
        samples.append(
            Sample(
                sample_id=f"{conversation.id}/{reply.turn}",
                input_ids=reply.prompt_ids + reply.reply_ids,
                loss_spans=[(start, end)],
                source=conversation.source,
                finish_reason=reply.finish_reason,
                split="eval" if reply.conversation in held_out else "train",
            )
        )
    if not any(s.split == "train" for s in samples):
        raise UserError("no training sample came out of the sources.", "Add prompts, or lower data.eval_share.")
    return samples


def _held_out(config: Config, conversations: list[Conversation]) -> set[int]:
    """Conversations with the same messages hash alike, so a repeated prompt is never on both sides of the split."""
    hashes = [_unit_hash(f"split {config.run.seed} {c.messages}") for c in conversations]
    count = round(len(conversations) * config.data.eval_share)
    if config.data.eval_share > 0:
        count = max(1, count)
    bound = sorted(hashes)[count - 1] if count else -1.0
    return {i for i, h in enumerate(hashes) if h <= bound}


def _unit_hash(text: str) -> float:
    """A number in [0, 1) that only the text decides."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48


def _reply_tokens(samples: list[Sample], split: str) -> list[list[int]]:
    return [s.input_ids[start:end] for s in samples if s.split == split for start, end in s.loss_spans]


def _mapping(config: Config, target: Target, special_ids: list[int], samples: list[Sample]) -> VocabMapping:
    eos = getattr(target.hf_config, "eos_token_id", None)
    ends = [eos] if isinstance(eos, int) else list(eos or [])
    # Whatever their count: a draft that cannot end a turn is wrong once in every reply.
    always = [*ends, *special_ids]
    return build_mapping(_reply_tokens(samples, "train"), always, target.vocab_size, config.data.draft_vocab_size)


def _figures(samples: list[Sample], skipped: list[Skipped], mapping: VocabMapping) -> dict[str, Any]:
    splits = Counter(s.split for s in samples)
    return {
        "counts": {"train": splits["train"], "eval": splits["eval"]},
        "tokens": sum(len(s.input_ids) for s in samples),
        "reply_tokens": sum(end - start for s in samples for start, end in s.loss_spans),
        "finish_reasons": dict(Counter(s.finish_reason for s in samples)),
        "skipped": dict(Counter(s.reason for s in skipped)),
        "draft_vocab_size": len(mapping.d2t),
        "coverage_train": coverage(mapping, _reply_tokens(samples, "train")),
        "coverage_eval": coverage(mapping, _reply_tokens(samples, "eval")),
    }
