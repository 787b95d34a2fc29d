"""Drafts on a real engine: every architecture flag reaches it, and what it takes without a word is caught."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from draftsmith.core.checkpoint import final_checkpoint, read_checkpoint
from draftsmith.core.config_io import load_config
from draftsmith.core.errors import UserError
from draftsmith.core.run import RunFolder
from draftsmith.core.target import resolve_target
from draftsmith.export.draft import from_checkpoint
from draftsmith.export.served_proof import choose_turns, served_checks
from draftsmith.export.verify import contract_check
from draftsmith.hidden_state_capture.reader import HiddenStateStore

pytestmark = [pytest.mark.vllm, pytest.mark.long]
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "export" / "variants.py"
# Between them all five variants, both layouts; the benchmark has each alone (benchmarks/export).
COMBINED = ["norms, 4 aux, speculators", "norm_before_fc, 4 aux"]


def test_every_variant_computes_the_trainers_logits_on_vllm(tmp_path):
    out = tmp_path / "rows.json"
    command = [sys.executable, str(SCRIPT), "--only", *COMBINED, "--dtype", "float32", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(out.read_text())["rows"]
    assert [r["variant"] for r in rows] == COMBINED
    for row in rows:
        assert row["relative_error"] < 1e-4 and row["equal"] == row["compared"] == 12, row


def test_what_vllm_takes_without_a_word_is_caught(smollm_run, tmp_path):
    """No hidden_norm, and layers off by one: the engine starts and serves; contract and served proof say so."""
    config = load_config(smollm_run["config"])
    run, folder = RunFolder.of(config), tmp_path / "export"
    shutil.copytree(run.export, folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["midlayer.hidden_norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    written = json.loads((folder / "config.json").read_text())
    written["eagle_aux_hidden_state_layer_ids"] = [3, 16, 28]
    (folder / "config.json").write_text(json.dumps(written))
    checkpoint = read_checkpoint(final_checkpoint(run, "test"))
    draft, target = from_checkpoint(checkpoint), resolve_target(config.target)
    contract = contract_check(folder, draft)
    assert contract.passed is False
    assert (
        "missing tensor midlayer.hidden_norm.weight" in contract.detail
        and "names layers [3, 16, 28]" in contract.detail
    )
    turns = choose_turns(HiddenStateStore(run.hidden_states), 3)
    checks = {c.name: c for c in served_checks(config, target, draft, "rms", folder, turns)}
    assert checks["served states"].passed is False
    assert all(error > 0.05 for error in checks["served states"].measured.values())
    # A norm left out is ones to vLLM, and this little trained draft's is near that: the contract is what sees it.
    assert checks["served logits"].measured["relative_error"] > 0.002


def test_a_run_is_converted_and_reads_back(smollm_run, cli, tmp_path):
    export = smollm_run["root"] / "export"
    target = "smollm2-135m-instruct"
    cli("export", "convert", export, tmp_path / "spec", "--format", "speculators", "--target", target)
    cli("export", "convert", tmp_path / "spec", tmp_path / "back", "--target", target)
    assert (tmp_path / "back/model.safetensors").read_bytes() == (export / "model.safetensors").read_bytes()
    assert json.loads((tmp_path / "back/config.json").read_text()) == json.loads((export / "config.json").read_text())


def test_an_export_for_sglang_is_refused_by_the_served_proof(smollm_run, cli, tmp_path):
    run = tmp_path / "small"
    for name in ("samples", "hidden_states", "checkpoints", "vocab_mapping.safetensors"):
        run.mkdir(exist_ok=True)
        (run / name).symlink_to(smollm_run["root"] / name)
    done = cli("export", "--config", smollm_run["config"], f"run.dir={tmp_path}", "export.layer_id_convention=sglang")
    assert "not run: the layer ids are SGLang's" in done.stdout
    with pytest.raises(UserError, match="is not proven on a server"):
        from draftsmith.export.hub import push_to_hub

        push_to_hub(run / "export", "owner/draft")
