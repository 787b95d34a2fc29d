"""speculators 0.9 trained on our store, read back by us: its loss falls, and our replay is what its own model says.

Needs speculators==0.9.0 and hs-connectors==0.9.0 (benchmarks/quality/README.md); skipped without them.
"""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
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


class Own:
    """speculators' own forward pass over one held-out sample of ours, as its own loader makes it of our store."""

    def __init__(self, folder, store):
        sys.path.insert(0, str(FOLDER))
        try:
            from speculators.models.eagle3 import Eagle3DraftModel, shift_batch
            from speculators.train.data import CollateFn
            from store_dataset import StoreDataset
        finally:
            sys.path.remove(str(FOLDER))
        config = Eagle3DraftModel.config_class.from_pretrained(folder)
        config.transformer_layer_config._attn_implementation = "eager"  # its flex attention needs a compiler
        self.model = Eagle3DraftModel.from_pretrained(folder, config=config).float().eval()
        self.sample = StoreDataset(store.folder, "eval", 64)[0]
        self.collate = CollateFn(len(self.sample["input_ids"]) - 1, 64, dtype=torch.float32, preprocess=shift_batch)

    def __call__(self, ids_T):
        """Logits [J, T - 1, V] and proposed draft ids [J, T - 1], row by row as ours but for the last."""
        batch, seen = self.collate([{**self.sample, "input_ids": ids_T}]), []
        hook = self.model.lm_head.register_forward_hook(lambda _m, _a, logits: seen.append(logits[0].detach()))
        given = {k: batch[k] for k in ("hidden_states", "input_ids", "document_ids", "position_ids")}
        with torch.no_grad():
            proposed = self.model(**given, ttt_steps=STEPS)
        hook.remove()
        return torch.stack(seen), torch.stack([p[0] for p in proposed])


def test_its_draft_is_replayed_as_its_own_model_drafts(synthetic_run, config_file, tmp_path):
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
    own, batch = Own(Path(last["folder"]), store), collate(store, store.numbers("eval")[:1])
    theirs_JTV, _ = own(batch.input_ids_T)
    compared = 0
    with torch.no_grad():
        for step in unroll(objective.draft, batch, STEPS):
            ours_RV = objective.draft.lm_head(step.hidden_RH)
            torch.testing.assert_close(ours_RV, theirs_JTV[step.j - 1][step.rows_R], rtol=1e-3, atol=2e-4)
            compared += len(ours_RV)
    assert compared >= 9

    # A reply that says, after its first token, just what its own model drafts there: replay must accept all of it.
    row, ids_T = int(batch.loss_mask_T.nonzero()[0]) - 1, batch.input_ids_T.clone()
    for j in range(STEPS):
        ids_T[row + 2 + j] = draft.target_ids[own(ids_T)[1][j, row]]
    for broken in (None, 0, 1, 2):
        said_T = ids_T.clone()
        if broken is not None:
            said_T[row + 2 + broken] = (said_T[row + 2 + broken] + 1) % target.vocab_size
        leading_T = judge_chains(objective, replace(batch, input_ids_T=said_T), STEPS).leading_T
        assert int(leading_T[row]) == (STEPS if broken is None else broken)
