"""`export`: the newest finished checkpoint -> `export/`, which vLLM loads."""

import json
from pathlib import Path
from typing import Any

from draftsmith.core.atomic import atomic_folder, sha256_file, write_json, write_text
from draftsmith.core.checkpoint import DRAFT, WEIGHTS, Checkpoint, final_checkpoint, read_checkpoint
from draftsmith.core.config import Config
from draftsmith.core.errors import StageFailed
from draftsmith.core.lineage import check_training, check_upstream
from draftsmith.core.manifest import check_inputs, read_manifest, write_manifest
from draftsmith.core.progress import say
from draftsmith.core.run import RunFolder
from draftsmith.core.target import Target, resolve_target
from draftsmith.data.batching import collate
from draftsmith.export.card import model_card
from draftsmith.export.contract import find_problems
from draftsmith.export.hf import export_config, export_tensors, write_export
from draftsmith.export.verify import reload_error
from draftsmith.hidden_state_capture.reader import HiddenStateStore

CARD, VERIFICATION = "README.md", "verification.json"


def export(config: Config) -> None:
    """Export and verify; where the export is there already, only its card is brought up to date with the evaluation.

    Raises:
        UserError: there is no finished training, or the export was made from another one.
        StageFailed: the export is not complete or not the trained draft; the findings stay in `export-failed/`.
    """
    run = RunFolder.of(config)
    folder = final_checkpoint(run, "export")
    store = HiddenStateStore(run.hidden_states, "export")
    target = resolve_target(config.target)
    check_upstream(config, run, target, store.manifest)
    checkpoint = read_checkpoint(folder)
    check_training(config, run, checkpoint)
    inputs = export_inputs(config, folder)
    if manifest := read_manifest(run.export):
        check_inputs(run.export, manifest, inputs)
        write_text(run.export / CARD, model_card(config, checkpoint, checkpoint.layer_ids, _report(run)))
        say(f"export: {run.export} (already there)")
        return
    with atomic_folder(run.export) as tmp:
        described = export_config(checkpoint.shape, checkpoint.layer_ids, target)
        tensors = export_tensors(checkpoint)
        write_export(tmp, tensors, described)
        write_text(tmp / CARD, model_card(config, checkpoint, checkpoint.layer_ids, None))
        proof = _prove(config, target, store, tmp, checkpoint) if config.export.verify else {"passed": None}
        write_json(tmp / VERIFICATION, proof)
        write_manifest(
            tmp,
            "export",
            inputs,
            {"checkpoint": folder.name, "weights_sha256": sha256_file(tmp / "model.safetensors")},
        )
        if proof["passed"] is False:
            failed = run.root / "export-failed"
            write_json(failed / VERIFICATION, proof)
            problems = "; ".join(map(str, proof["problems"] or []))
            raise StageFailed(f"the export is not the trained draft: {problems} ({failed / VERIFICATION}).")
    say(f"export: {len(tensors)} tensors of {folder.name}, verified: {proof['passed']} -> {run.export}")


def export_inputs(config: Config, checkpoint: Path) -> dict[str, Any]:
    """Everything that decides the export."""
    return {
        "checkpoint": checkpoint.name,
        "weights_sha256": sha256_file(checkpoint / WEIGHTS),
        "draft_sha256": sha256_file(checkpoint / DRAFT),
        "format": config.export.format,
        "verify": config.export.verify,
    }


def _prove(
    config: Config, target: Target, store: HiddenStateStore, folder: Path, checkpoint: Checkpoint
) -> dict[str, Any]:
    """Completeness by the contract, then logits after reloading."""
    from safetensors.torch import load_file

    written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    problems = find_problems(checkpoint.shape, load_file(folder / "model.safetensors"), written)
    if written["eagle_aux_hidden_state_layer_ids"] != checkpoint.layer_ids:
        problems.append(
            f"config.json names layers {written['eagle_aux_hidden_state_layer_ids']}, not {checkpoint.layer_ids}"
        )
    if problems:
        return {"passed": False, "problems": problems}
    some = (store.numbers("eval") or store.numbers("train"))[:8]
    figures = reload_error(
        folder, checkpoint, resolve_target(config.target), collate(store, some), config.train.ttt_steps
    )
    if not figures["relative_error"] <= config.export.max_logit_error:
        problems.append(f"reloaded logits are off by {figures['relative_error']:.4f}, above export.max_logit_error")
    return {"passed": not problems, "problems": problems, "reload": figures}


def _report(run: RunFolder) -> dict[str, Any] | None:
    path = run.eval / "report.json"
    if not path.is_file():
        return None
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    export = read_manifest(run.export)
    return report if export and report["settings"].get("export_weights_sha256") == export["weights_sha256"] else None
