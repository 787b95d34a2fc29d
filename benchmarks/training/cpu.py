"""Training on a CPU: documents and tokens per second of the eager path, at the shape of `make demo`.

    taskset -c 0 python benchmarks/training/cpu.py          # one core: on a shared machine, look at CPU time
    python benchmarks/training/cpu.py --threads 2 --steps 40

Random states of SmolLM2-135M's width, packed as the demo packs them: a prompt of 60 tokens and a reply of 86 (420
prompts and 36,000 reply tokens, as in the runs that the design quotes), 512 tokens a batch, J = 3, a draft vocabulary
of 4096, float32. One step is what training does: loss, gradients, clipping, AdamW. Reported are CPU time (of all
threads) and wall time, each as the median over steps and as what 2,520 document passes would take.
"""

import argparse
import json
import statistics
import time

import torch

from draftsmith.core.batch import Batch
from draftsmith.core.config_train import TrainConfig
from draftsmith.core.draft import DraftModel
from draftsmith.core.draft_shape import DraftShape
from draftsmith.core.losses import LossOptions
from draftsmith.core.objective import Objective, step_weights, supervised_rows
from draftsmith.core.target_weights import TargetHead
from draftsmith.train.optim import make_optimizer

HIDDEN, VOCAB, DRAFT_VOCAB = 576, 49152, 4096
PROMPT, REPLY, DOCUMENTS_PER_BATCH = 60, 86, 3
STEPS, DECAY, PASSES = 3, 0.8, 2520


def make_objective(kv_heads: int, loss: str) -> Objective:
    shape = DraftShape(
        hidden_size=HIDDEN, num_aux=3, num_heads=9, num_kv_heads=kv_heads, head_dim=64, intermediate_size=1536,
        vocab_size=VOCAB, draft_vocab_size=DRAFT_VOCAB, rms_norm_eps=1e-5, max_position_embeddings=8192,
        rope={"rope_type": "default", "rope_theta": 1e5}, fc_norm=True, norm_output=True,
    )  # fmt: skip
    options = LossOptions(loss)  # type: ignore[arg-type]
    full = torch.randn(VOCAB, HIDDEN).mul_(0.1).bfloat16()
    ids = torch.arange(DRAFT_VOCAB) * (VOCAB // DRAFT_VOCAB)
    whole = full if options.needs_full_vocabulary else None
    head = TargetHead(full[ids], torch.ones(HIDDEN).bfloat16(), "rms", 1e-5, whole)
    return Objective(DraftModel(shape, full), head, ids, options)


def make_batch() -> Batch:
    length = PROMPT + REPLY
    mask = torch.tensor(([False] * PROMPT + [True] * REPLY) * DOCUMENTS_PER_BATCH)
    size = len(mask)
    last_rows = (mask.roll(-1) & (torch.arange(size) % length < length - 1)).nonzero().squeeze(1)
    return Batch(
        tuple(f"s{i}" for i in range(DOCUMENTS_PER_BATCH)),
        tuple(length * i for i in range(DOCUMENTS_PER_BATCH + 1)),
        torch.randint(VOCAB, (size,)),
        mask,
        torch.arange(size) % length,
        torch.randn(size, 3, HIDDEN).bfloat16(),
        torch.randn(len(last_rows), HIDDEN).bfloat16(),
        last_rows,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20, help="measured optimizer steps, after 3 of warm-up")
    parser.add_argument("--kv-heads", type=int, default=9, help="9 as in the demo; 3 is the target's own")
    parser.add_argument("--loss", default="soft_ce")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    objective, batches = make_objective(args.kv_heads, args.loss), [make_batch() for _ in range(4)]
    parameters = list(objective.draft.parameters())
    optimizer = make_optimizer(TrainConfig(), objective.draft.named_parameters())
    times = []
    for i in range(args.steps + 3):
        cpu, wall = time.process_time(), time.perf_counter()
        batch = batches[i % len(batches)]
        (step_weights(supervised_rows(batch, STEPS), DECAY) * objective(batch, STEPS).loss_J).sum().backward()
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        times.append((time.process_time() - cpu, time.perf_counter() - wall))
    cpu, wall = (statistics.median(column) for column in zip(*times[3:], strict=True))
    figures = {
        "parameters": sum(p.numel() for p in parameters),
        "threads": args.threads,
        "tokens_per_cpu_second": round(DOCUMENTS_PER_BATCH * (PROMPT + REPLY) / cpu, 1),
        "documents_per_cpu_second": round(DOCUMENTS_PER_BATCH / cpu, 2),
        "cpu_seconds_for_2520": round(PASSES / DOCUMENTS_PER_BATCH * cpu, 1),
        "least_cpu_seconds_for_2520": round(PASSES / DOCUMENTS_PER_BATCH * min(times[3:])[0], 1),
        "wall_seconds_for_2520": round(PASSES / DOCUMENTS_PER_BATCH * wall, 1),
        "torch": torch.__version__,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
