"""The bound of `benchmarks/export/variants.py` means something: a flag that the server had not got would break it."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftsmith.core.config import Config
from draftsmith.core.draft_probe import draft_chain
from draftsmith.core.target import resolve_target
from draftsmith.core.target_weights import load_target_weights
from draftsmith.export.verify import model_of

pytestmark = pytest.mark.usefixtures("one_thread")
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "export" / "variants.py"


@pytest.fixture(scope="module")
def variants():
    spec = importlib.util.spec_from_file_location("variants", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"])
def test_a_flag_left_out_would_show(variants, flag):
    target = resolve_target(Config().target)
    draft, embed = variants.random_draft(target, {flag: True}), load_target_weights(target).embed_VH
    states, ids = torch.randn(8, 3, target.hidden_size), list(range(100, 109))
    without = replace(draft.shape, **{flag: False})
    kept = {k: v for k, v in draft.tensors.items() if not k.startswith(("fc_norm", "input_norm"))}
    ours = draft_chain(model_of(draft.shape, draft.tensors, embed), draft.target_ids, states, ids, 3)[1]
    theirs = draft_chain(model_of(without, kept, embed), draft.target_ids, states, ids, 3)[1]
    assert float((ours - theirs).norm() / ours.norm()) > 0.01  # 1e-4 is what the engine is held to
