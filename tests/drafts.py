"""Small drafts of random weights for tests; like `families.py` it can be imported."""

import torch

from draftsmith.core.checkpoint import Checkpoint
from draftsmith.core.draft import DraftModel
from draftsmith.core.draft_shape import DraftShape

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64}


def make_shape(**values):
    sizes = {
        "hidden_size": 64, "num_aux": 3, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "intermediate_size": 96,
        "vocab_size": 512, "draft_vocab_size": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 256,
        "rope": {"rope_type": "default", "rope_theta": 10000.0},
    }  # fmt: skip
    return DraftShape(**{**sizes, **values})


def make_checkpoint(tmp_path, shape):
    """A checkpoint of random weights whose draft vocabulary is every fourth id."""
    torch.manual_seed(0)
    draft = DraftModel(shape, torch.randn(shape.vocab_size, shape.hidden_size))
    for norm in (p for p in draft.parameters() if p.dim() == 1):
        torch.nn.init.uniform_(norm, 0.5, 1.5)
    full = shape.vocab_size == shape.draft_vocab_size
    ids = torch.arange(shape.draft_vocab_size) * (1 if full else 4)
    t2d = torch.zeros(shape.vocab_size, dtype=torch.bool)
    t2d[ids] = True
    d2t = ids - torch.arange(len(ids))
    layer_ids = [1, 2, 4, 5][: shape.num_aux]
    return Checkpoint(tmp_path, shape, draft.state_dict(), d2t, t2d, layer_ids, "rms", {"total_steps": 1})
