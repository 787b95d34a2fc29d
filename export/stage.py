"""`export`: a checkpoint of the run -> `export/`, which a server loads; proven before it is called done."""

import importlib.util
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from draftsmith.core.atomic import atomic_folder, remove, sha256_file, write_json, write_text
from draftsmith.core.checkpoint import DRAFT, Checkpoint, chosen_checkpoint, read_checkpoint
from draftsmith.core.checkpoint import WEIGHTS as CHECKPOINT_WEIGHTS
from draftsmith.core.config import Config
from draftsmith.core.errors import StageFailed
from draftsmith.core.lineage import check_training, check_upstream
from draftsmith.core.manifest import check_inputs, read_manifest, write_manifest
from draftsmith.core.progress import say
from draftsmith.core.run import RunFolder
from draftsmith.core.target import Target, resolve_target
from draftsmith.core.target_weights import load_target_weights
from draftsmith.core.vocabulary import sample_figures
from draftsmith.data.batching import collate, plan_batches
from draftsmith.export.card import PLOT, Facts, model_card, plot_acceptance
from draftsmith.export.draft import Draft, from_checkpoint
from draftsmith.export.layout import WEIGHTS, draft_tensors, folder_config, write_draft
from draftsmith.export.licence import target_licence
from draftsmith.export.served_proof import choose_turns, served_checks
from draftsmith.export.verify import Check, contract_check, logits_check, verification
from draftsmith.hidden_state_capture.reader import HiddenStateStore

CARD, VERIFICATION, FAILED = "README.md", "verification.json", "export-failed"
_RELOADED_TOKENS = 4096


def export(config: Config, fresh: bool = False) -> None:
    """Export and verify; where the export is there already, only its card is brought up to date with the evaluation.

    Args:
        config: the run's config.
        fresh: make it anew; what is there stays until the new one is proven.

    Raises:
        UserError: there is no such checkpoint, or the export was made from another one.
        StageFailed: the export is not complete or not the trained draft; it is kept whole in `export-failed/`.
    """
    run = RunFolder.of(config)
    folder = chosen_checkpoint(run, config.export.checkpoint, "export")
    store = HiddenStateStore(run.hidden_states, "export")
    target = resolve_target(config.target)
    check_upstream(config, run, target, store.manifest)
    checkpoint = read_checkpoint(folder)
    check_training(config, run, checkpoint)
    inputs = export_inputs(config, folder)
    if (manifest := read_manifest(run.export)) and not fresh:
        check_inputs(run.export, manifest, inputs)
        proof = json.loads((run.export / VERIFICATION).read_text(encoding="utf-8"))
        _write_card(run, run.export, config, target, checkpoint, proof, _report(run))
        say(f"export: {run.export} (already there)")
        return
    draft = from_checkpoint(checkpoint)
    # A layout that cannot be is said before anything is written.
    described = folder_config(draft, target, config.export, config.export.verify_k)
    with atomic_folder(run.export) as tmp:
        write_draft(tmp, draft_tensors(draft), described)
        proof = prove(config, target, store, draft, checkpoint.norm_form, tmp)
        write_json(tmp / VERIFICATION, proof)
        _write_card(run, tmp, config, target, checkpoint, proof, None)
        made = {"checkpoint": folder.name, "weights_sha256": sha256_file(tmp / WEIGHTS), "verified": proof["passed"]}
        write_manifest(tmp, "export", inputs, made)
        if proof["passed"] is False:
            _keep_failed(run.root / FAILED, tmp, proof)
    remove(run.root / FAILED)
    say(f"export: {folder.name} -> {run.export}")
    say(f"export: {proof['summary']}")


def export_inputs(config: Config, checkpoint: Path) -> dict[str, Any]:
    """Everything that decides the export."""
    return {
        "checkpoint": checkpoint.name,
        "weights_sha256": sha256_file(checkpoint / CHECKPOINT_WEIGHTS),
        "draft_sha256": sha256_file(checkpoint / DRAFT),
        "export": config.export.model_dump(mode="json", exclude={"license"}),
    }


def prove(
    config: Config, target: Target, store: HiddenStateStore, draft: Draft, norm_form: str, folder: Path
) -> dict[str, Any]:
    """Every check that the config asks for and that this machine can make, cheapest first; the content of the file.

    Args:
        config: the run's config.
        target: resolved target.
        store: its hidden states.
        draft: as trained.
        norm_form: of the target's final norm.
        folder: the written export.
    """
    options = config.export
    settings: dict[str, Any] = {"layer_ids": draft.layer_ids, "prompts": options.verify_prompts, "k": options.verify_k}
    if options.verify is False:
        return verification([], "not run: export.verify is false", settings)
    checks = [contract_check(folder, draft)]
    if checks[0].passed:
        numbers = store.numbers("eval") or store.numbers("train")
        some = [numbers[i] for i in plan_batches(store.lengths(numbers), _RELOADED_TOKENS)[0]]
        batch = collate(store, some).to(torch.device("cpu"))  # decodes what is stored in float8
        embed_VH = load_target_weights(target).embed_VH
        steps, bound = config.train.ttt_steps, options.max_logit_error
        checks.append(logits_check(folder, draft, target, embed_VH, batch, steps, bound))
    served = _why_not_served(config, checks)
    if not served:
        turns = choose_turns(store, options.verify_prompts)
        checks += served_checks(config, target, draft, norm_form, folder, turns)
    return verification(checks, served or "checked", settings)


def _why_not_served(config: Config, checks: list[Check]) -> str:
    if not all(c.passed for c in checks):
        return "not run: the export failed before"
    if config.export.verify == "offline":
        return "not run: export.verify is offline"
    if config.export.layer_id_convention != "vllm":
        return "not run: the layer ids are SGLang's, which vLLM would read as other layers"
    if not _vllm_installed():
        return "not run: vLLM is not installed"
    return ""


def _vllm_installed() -> bool:
    return importlib.util.find_spec("vllm") is not None


def _keep_failed(failed: Path, folder: Path, proof: dict[str, Any]) -> None:
    with atomic_folder(failed) as kept:
        shutil.copytree(folder, kept, dirs_exist_ok=True)
    problems = "; ".join(proof["problems"])
    raise StageFailed(f"the export is not the trained draft: {problems} ({failed / VERIFICATION}).")


def _write_card(
    run: RunFolder,
    folder: Path,
    config: Config,
    target: Target,
    checkpoint: Checkpoint,
    proof: dict[str, Any],
    report: dict[str, Any] | None,
) -> None:
    draft = replace(from_checkpoint(checkpoint), origin=f"{config.run.name}, {checkpoint.folder.name}")
    facts = Facts(
        draft=draft,
        target=target,
        options=config.export,
        licence=config.export.license or target_licence(target),
        proof=proof,
        report=report,
        config=config,
        training=checkpoint.state,
        samples=sample_figures(run, samples) if (samples := read_manifest(run.samples)) else None,
    )
    if report and report["served"]:
        plot_acceptance(report, folder / PLOT)
    write_text(folder / CARD, model_card(facts))


def _report(run: RunFolder) -> dict[str, Any] | None:
    path = run.eval / "report.json"
    if not path.is_file():
        return None
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    export = read_manifest(run.export)
    return report if export and report["settings"].get("export_weights_sha256") == export["weights_sha256"] else None
