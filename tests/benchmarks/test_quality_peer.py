"""speculators 0.9 trained on our store, read back by us: its loss falls, and our replay is what its own model says.

Needs speculators==0.9.0 and hs-connectors==0.9.0 (benchmarks/quality/README.md); skipped without them.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from draftsmith.core.chains import judge_chains
from draftsmith.core.checkpoint import build_objective
from draftsmith.core.draft_folder import read_draft_folder
from draftsmith.core.run import RunFolder
from draftsmith.core.target import resolve_target
from draftsmith.core.unroll import unroll
from draftsmith.data.batching import collate
from draftsmith.hidden_state_capture.reader import HiddenStateStore

FOLDER = Path(__file__).parents[2] / "benchmarks" / "quality"
STEPS = 3
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("speculators") is None, reason="speculators 0.9 is not installed"),
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.slow,
]


def _own_logits(folder, store, numbers):
    """Logits of every step by speculators' own forward pass, over what its own loader makes of our samples."""
    sys.path.insert(0, str(FOLDER))
    try:
        from speculators.models.eagle3 import Eagle3DraftModel, shift_batch
        from speculators.train.data import CollateFn
        from store_dataset import StoreDataset
    finally:
        sys.path.remove(str(FOLDER))
    config = Eagle3DraftModel.config_class.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"  # its flex attention needs a compiler
    model = Eagle3DraftModel.from_pretrained(folder, config=config).float().eval()
    data = StoreDataset(store.folder, "eval", 64)
    tokens = sum(len(data[i]["input_ids"]) - 1 for i in numbers)
    batch = CollateFn(tokens, model.hidden_size, dtype=torch.float32, preprocess=shift_batch)([data[i] for i in numbers])
    seen = []
    model.lm_head.register_forward_hook(lambda _m, _a, logits: seen.append(logits[0].detach()))
    given = {k: batch[k] for k in ("hidden_states", "input_ids", "document_ids", "position_ids")}
    with torch.no_grad():
        proposed = model(**given, ttt_steps=STEPS)
    return torch.stack(seen), torch.stack([p[0] for p in proposed])


def test_its_draft_is_served_and_replayed_as_it_was_trained(synthetic_run, config_file, tmp_path):
    out = tmp_path / "speculators"
    command = [sys.executable, FOLDER / "speculators_baseline.py", "--config", config_file(synthetic_run), "--out", out]
    command += ["train.epochs=6", "--", "--total-seq-len", "64", "--checkpoint-freq", "6"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((out / "result.json").read_text())
    first, last = result["epochs"][0], result["epochs"][-1]
    assert len(result["epochs"]) == 6 and last["loss_last"] < 0.9 * first["loss_first"]
    assert result["tokens_seen"] == 6 * result["train_tokens"]

    target, store = resolve_target(synthetic_run.target), HiddenStateStore(RunFolder.of(synthetic_run).hidden_states)
    draft = read_draft_folder(Path(last["folder"]), target)
    assert draft.layout == "speculators" and draft.shape.norm_before_fc and draft.shape.norm_output
    objective = build_objective(target, draft.shape, draft.target_ids, "rms")
    objective.draft.load_state_dict(draft.tensors)
    numbers = list(range(len(store.numbers("eval"))))
    batch = collate(store, [store.numbers("eval")[i] for i in numbers])
    theirs_JTV, proposed_JT = _own_logits(Path(last["folder"]), store, numbers)
    # Its rows are ours without the last of every document, of which it knows no next token.
    place = torch.cat([torch.arange(a, b - 1) for a, b in zip(batch.offsets, batch.offsets[1:], strict=False)])
    where = {int(row): i for i, row in enumerate(place)}
    with torch.no_grad():
        leading_T = judge_chains(objective, batch, STEPS).leading_T
        for step in unroll(objective.draft, batch, STEPS):
            at = torch.tensor([where[int(row)] for row in step.rows_R])
            ours_RV = objective.draft.lm_head(step.hidden_RH)
            torch.testing.assert_close(ours_RV, theirs_JTV[step.j - 1][at], rtol=1e-3, atol=2e-4)
    compared = 0
    for row, i in where.items():
        says = draft.target_ids[proposed_JT[:, i]].tolist()
        follows = batch.input_ids_T[row + 2 : row + 2 + STEPS].tolist()
        matches = next((j for j, (a, b) in enumerate(zip(says, follows, strict=False)) if a != b), min(3, len(follows)))
        if row + 1 + STEPS < len(batch.loss_mask_T) and batch.loss_mask_T[row + 1 : row + 2 + STEPS].all():
            assert int(leading_T[row]) == matches
            compared += 1
    assert compared >= 12
