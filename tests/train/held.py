"""Under torchrun: bytes of tensors that an engine holds, between backward pass and optimizer step and after it.

Its arguments are a file to write, and train options as JSON. The first process writes {"bytes": of the parameters in
float32, "before": .., "after": ..}, in bytes above those of the batch and of what is not trained.
"""

import gc
import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

from draftsmith.core.config import Config
from draftsmith.core.run import RunFolder
from draftsmith.train.engine import make_accelerator, open_engine
from draftsmith.train.loop import Trainer
from draftsmith.train.optim import make_optimizer
from draftsmith.train.state import TrainState
from draftsmith.train.step import TrainingStep, fused_dtype

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "training"))
from step import build, documents, make_batch, shape

torch.set_num_threads(1)
SIZES = dict(hidden_size=128, num_heads=4, num_kv_heads=4, head_dim=32, intermediate_size=256, vocab_size=4096)


def held():
    gc.collect()
    storages = {}
    for thing in [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]:
        for tensor in (thing, thing.grad if thing.is_leaf else None):
            if tensor is not None:
                storage = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(size for place, size in storages.items() if place)  # none: a meta tensor


def measure(options):
    config = Config.model_validate({"train": {"ttt_steps": 2, "tokens_per_batch": 64, **options}})
    accelerator, of, found = make_accelerator(RunFolder.of(config)), shape(1024, **SIZES), {}
    engine = open_engine(config, accelerator)
    bare = build(1024, "cpu", of)
    found["bytes"] = sum(4 * p.numel() for p in bare.draft.parameters())
    step = TrainingStep(bare, config.train, fused_dtype(config.train, of, accelerator.device, engine.half))
    works = [step.lay_out(make_batch(documents("dense", 64, accelerator.process_index), "cpu", of))]
    before = held() - found["bytes"]
    engine.prepare(step, lambda named: make_optimizer(config.train, named))
    state = TrainState(0, 10**6, 0, accelerator.num_processes, {})
    trainer = Trainer(config, accelerator, None, engine, engine.step, None, [], None, None, state)
    take = engine.take_step

    def take_and_count(norm):
        found["before"] = held() - before
        return take(norm)

    engine.take_step = take_and_count
    batches = SimpleNamespace(works=works, take=itertools.cycle(works).__next__)
    for _ in range(2):
        trainer._optimizer_step(batches, (False, False))
        state.step += 1
    found["after"] = held() - before
    return found


measured = measure(json.loads(sys.argv[2]))
if torch.distributed.get_rank() == 0:
    Path(sys.argv[1]).write_text(json.dumps(measured))
