"""`eval`: replay, serving with and without the draft, and the report."""

from pathlib import Path
from typing import Any

from draftsmith.core.atomic import sha256_file
from draftsmith.core.config import Config
from draftsmith.core.draft_folder import read_draft_folder
from draftsmith.core.engine import engine_dtype, require_vllm
from draftsmith.core.lineage import check_upstream
from draftsmith.core.manifest import (
    check_inputs,
    manifest_hash,
    package_versions,
    read_manifest,
    write_manifest,
)
from draftsmith.core.progress import say
from draftsmith.core.revisions import content, recorded_revisions
from draftsmith.core.run import RunFolder
from draftsmith.core.samples import iter_samples
from draftsmith.core.target import Target, resolve_target
from draftsmith.eval.columns import captured_for, check_fits
from draftsmith.eval.diagnose import diagnose, longest_sample
from draftsmith.eval.journal import PassJournal
from draftsmith.eval.offline import Replay, objective_figures, release_memory, replay
from draftsmith.eval.prompts import PromptSets, write_prompts
from draftsmith.eval.remarks import remarks
from draftsmith.eval.replay_rows import replay_rows, source_rows
from draftsmith.eval.report import write_report
from draftsmith.eval.rows import agreement_rows, served_row
from draftsmith.eval.subject import Subject, other_draft, own_draft, report_place
from draftsmith.eval.sweep import Measured, Variant, serve, serve_on_server
from draftsmith.hidden_state_capture.reader import HiddenStateStore

PROMPTS = "served_prompts.parquet"


def evaluate(config: Config, draft: Path | None = None) -> None:
    """Replay and serve the exported draft, and write `eval/report.{json,md,html}`.

    Args:
        config: of the run.
        draft: folder of another EAGLE3 draft for the run's target, e.g. one of a sibling of it; it is replayed where
            its layers were captured, and the report goes to `eval-NAME/`.

    Raises:
        UserError: an earlier stage has not been run, or there is nothing to evaluate on.
        StageFailed: an engine died.
    """
    run = RunFolder.of(config)
    subject = other_draft(draft) if draft else own_draft(config, run)
    run = report_place(run, draft) if draft else run
    inputs = eval_inputs(config, run, subject)
    if manifest := read_manifest(run.eval):
        check_inputs(run.eval, manifest, inputs)
        say(f"report: {run.eval}/report.html (already there)")
        return
    target = resolve_target(config.target)
    store = HiddenStateStore(run.hidden_states, "eval")
    check_upstream(config, run, target, store.manifest)
    read = read_draft_folder(subject.folder, target)
    check_fits(subject.folder, read, target)
    sets = PromptSets(config, target)
    if not config.eval.server:
        require_vllm("eval")
    run.open(config)
    batches = captured_for(config, store, subject.folder.name, read)
    report: dict[str, Any] = {"replay": [], "replay_by_source": [], "agreement": [], "objective": None}
    replayed: Replay | None = None
    if batches is not None and len(batches):
        norm_form = store.manifest["last_state"]["norm_form"]
        replayed = replay(config, target, read, norm_form, batches)
        sources = {s.sample_id: s.source for s in iter_samples(run.samples, "eval")}
        report["replay"] = replay_rows(config, replayed)
        report["replay_by_source"] = source_rows(config, replayed, sources)
        if subject.checkpoint:
            logits_bytes = config.train.logits_bytes
            report["objective"] = objective_figures(target, subject.checkpoint, batches, logits_bytes)
        release_memory()
    journal = PassJournal(run.passes, inputs)
    measured, servers = _served(config, target, subject.folder, sets, journal)
    report["served"] = [served_row(config, m) for m in measured]
    if replayed:
        report["agreement"] = agreement_rows(config, replayed, measured)
    write_prompts(run.eval / PROMPTS, sets.sets)
    report["diagnosis"] = _diagnosis(config, target, subject, run, store, report["agreement"])
    report["remarks"] = remarks(report, config.data.sampling.temperature)
    for remark in report["remarks"]:
        say(f"remark: {remark}")
    report["settings"] = settings(config, run, subject, store)
    report["settings"] |= {"servers": servers, "cells_of_an_earlier_start": journal.used}
    report["versions"] = package_versions()
    write_report(run, config, report)
    write_manifest(run.eval, "eval", inputs, {"report": "report.json"})
    journal.clear()
    say(f"report: {run.eval}/report.html")


def _served(
    config: Config, target: Target, draft: Path, sets: PromptSets, journal: PassJournal
) -> tuple[list[Measured], list[dict[str, Any]]]:
    """Passes, and what the servers said of themselves."""
    if config.eval.server:
        measured, sides = serve_on_server(config, sets)
        return measured, [side.settings for side in sides]
    return serve(config, target, sets, [Variant(draft, k) for k in config.eval.k], journal), []


def _diagnosis(
    config: Config,
    target: Target,
    subject: Subject,
    run: RunFolder,
    store: HiddenStateStore,
    agreement: list[dict[str, Any]],
) -> dict[str, Any] | None:
    """Why serving falls short of replay; None where it does not, or where there is no trained draft to compare with."""
    short = [r for r in agreement if r["falls_short"] and r["method"] == "exact"]
    if not short or not subject.checkpoint:
        return None
    worst = min(short, key=lambda r: r["difference"])
    say(f"K = {worst['k']}: served {worst['served']:.3f}, replayed {worst['replayed']:.3f}: looking for the reason")
    found = diagnose(config, target, subject.checkpoint, run.export, longest_sample(store))
    say(f"first difference between trainer and engine: {found['first_difference'] or 'none'}")
    return found


def eval_inputs(config: Config, run: RunFolder, subject: Subject) -> dict[str, Any]:
    """Everything that decides the report, machine and chance apart."""
    return {
        **subject.inputs,
        "hidden_states_manifest_sha256": manifest_hash(run.hidden_states),
        "eval": config.eval.model_dump(mode="json"),
        "sets": [content(path, recorded_revisions(run)) for path in config.eval.sets],
        "sampling": config.data.sampling.model_dump(mode="json"),
        "tensor_parallel": config.target.tensor_parallel,
        "engine_args": config.target.engine_args,
        "seed": config.run.seed,
    }


def settings(config: Config, run: RunFolder, subject: Subject, store: HiddenStateStore) -> dict[str, Any]:
    """What it takes to get the same figures again."""
    return {
        "target": store.manifest["target"],
        "layer_ids": store.manifest["layer_ids"],
        "checkpoint": subject.name,
        "export_weights_sha256": subject.weights_sha256,
        "hidden_states_manifest_sha256": manifest_hash(run.hidden_states),
        "sets_sha256": {path: content(path, recorded_revisions(run)) for path in config.eval.sets},
        "prompts": PROMPTS,
        "prompts_sha256": sha256_file(run.eval / PROMPTS),
        "prefix_caching": False,
        "chat_template": "applied",
        "chat_template_kwargs": config.target.chat_template_kwargs,
        "draft_sampling": config.eval.draft_sampling,
        "max_tokens": config.data.sampling.max_tokens,
        "max_tokens_of_sets": config.eval.max_tokens or config.data.sampling.max_tokens,
        "max_length": config.data.max_length,
        "dtype": engine_dtype(config.target),
        "tensor_parallel": config.target.tensor_parallel,
        "engine_args": config.target.engine_args,
        "seed": config.run.seed,
    }
