"""Run under torchrun: saves a draft as DeepSpeed's shards, one file a rank, and its config.json."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import deepspeed
import torch
from deepspeed.ops import __compatible_ops__

sys.path.insert(0, str(Path(__file__).parents[1]))
from drafts import make_checkpoint, make_shape

from draftsmith.core.draft import DraftModel
from draftsmith.export.draft import from_checkpoint
from draftsmith.export.layout import plain_config

folder, stage = Path(sys.argv[1]), int(sys.argv[2])
checkpoint = make_checkpoint(folder, make_shape(draft_vocab_size=512))
draft = DraftModel(checkpoint.shape, torch.zeros(512, 64))
draft.load_state_dict(checkpoint.tensors)
config = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}
__compatible_ops__["deepspeed_shm_comm"] = False  # compiled C++ that two processes on gloo can do without
deepspeed.init_distributed("gloo")
engine, *_ = deepspeed.initialize(model=draft, model_parameters=list(draft.parameters()), config=config)
engine.save_checkpoint(str(folder))
target = SimpleNamespace(hf_config=SimpleNamespace(model_type="llama"))
(folder / "config.json").write_text(json.dumps(plain_config(from_checkpoint(checkpoint), target)))
