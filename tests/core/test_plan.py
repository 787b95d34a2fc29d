"""`draftsmith plan`: against what was measured and what the design says, and each thing that does not fit."""

import json
from pathlib import Path

import pytest

from draftsmith.core.draft_shape import DraftShape
from draftsmith.core.errors import UserError
from draftsmith.core.estimate import amount_of, stated
from draftsmith.core.plan import make_plan
from draftsmith.core.plan_hours import Rates
from draftsmith.core.run import RunFolder
from draftsmith.core.sizes import (
    H200_TRAINING_FLOPS,
    Workload,
    batch_bytes,
    draft_parameters,
    target_parameters,
    training_flops,
    training_memory,
)

TARGETS = Path(__file__).parents[2] / "configs" / "targets"
RESULTS = Path(__file__).parents[2] / "benchmarks" / "training" / "results"
H200 = Rates(gpus=1, gpu_bytes=141e9)


# ---- against what was measured -------------------------------------------------------------------------------------


def test_memory_and_speed_are_those_that_were_measured():
    files = (RESULTS / f"h200-{name}.jsonl" for name in ("a", "b", "c", "c-lines", "d"))
    cells = [json.loads(line) for file in files for line in file.open()]
    cells = [c for c in cells if "peak_gb" in c and "rows" in c]  # the peers' rows say other things
    assert len(cells) > 40
    for cell in cells:
        matmul, dense = cell.get("matmul", "bf16"), cell["workload"] == "dense"
        length = cell["tokens"] / cell["documents"] if "documents" in cell else cell["tokens"] if dense else 1000
        shape = DraftShape(3072, 3, 48, 48, 128, 9216, 200064, cell["draft_vocab"], 1e-6, 204800)
        work = Workload(cell["tokens"], cell["rows"] / cell["tokens"], length, cell["ttt"], matmul=matmul)
        memory, speed = (0.09, 0.09) if matmul == "bf16" else (0.12, 0.22)
        memory = 0.14 if cell["draft_vocab"] > 32000 else memory
        assert sum(training_memory(shape, work).values()) / 1e9 == pytest.approx(cell["peak_gb"], rel=memory), cell
        rate = H200_TRAINING_FLOPS[matmul] / training_flops(shape, work)
        assert rate == pytest.approx(cell["tokens_per_second"], rel=speed), cell


def test_a_drafts_parameters_are_the_models(synthetic_run):
    import torch

    from draftsmith.core.checkpoint import build_objective
    from draftsmith.core.draft_shape import resolve_shape
    from draftsmith.core.target import resolve_target

    target = resolve_target(synthetic_run.target)
    for flags in ({}, {"fc_norm": True}, {"norm_before_fc": True}, {"train_embedding": True}):
        config = synthetic_run.draft.model_copy(update=flags)
        shape = resolve_shape(config, target, 3, 128)
        draft = build_objective(target, shape, torch.arange(128), "rms").draft
        assert sum(draft_parameters(shape).values()) == sum(p.numel() for p in draft.parameters()), flags


def test_a_targets_parameters_are_the_models(tiny_target):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(tiny_target)
    model = AutoModelForCausalLM.from_pretrained(tiny_target)
    every, active = target_parameters(config)
    assert every == pytest.approx(sum(p.numel() for p in model.parameters()), rel=0.02)
    assert active == every - model.get_input_embeddings().weight.numel()


# ---- MiniMax-M2.5, as the design has it ---------------------------------------------------------------------------


def test_minimax_is_as_the_design_says(minimax, roomy):
    config = minimax()
    made = make_plan(config, stated(config, 10**9, 1000, 0.26), H200)
    assert made["target"]["parameters"] == pytest.approx(229e9, rel=0.01)
    assert made["target"]["active_parameters"] == pytest.approx(10e9, rel=0.05)
    assert made["target"]["bytes"] == pytest.approx(229e9, rel=0.01)  # fp8
    assert made["draft"]["layer_ids"] == [2, 31, 59] and made["draft"]["parameters"] == 343683072
    assert made["disk"]["states"]["bf16"] == pytest.approx(20e12, rel=0.01)
    assert made["disk"]["states"]["fp8"] == pytest.approx(10e12, rel=0.01)
    assert made["hours"]["capture_rate"] == pytest.approx(34800, rel=0.01)
    assert made["problems"] == []


def test_a_tokens_bytes_are_the_designs(minimax, roomy):
    config = minimax()

    def nbytes(share):
        return make_plan(config, stated(config, 10**6, 1000, share), H200)["disk"]["states"]["bf16"] / 10**6

    assert nbytes(0) == 3 * 2 * 3072 + 5  # 18.4 KB, and ids and mask
    assert nbytes(1) - nbytes(0) == 2 * 3072 + 4  # 6.1 KB, and its row


def test_hours_are_tokens_by_rates(minimax, roomy):
    config = minimax(train={"epochs": 3, "tokens_per_batch": 16384})
    made = make_plan(config, stated(config, 3_600_000, 1000, 0.6), Rates(1000.0, 500.0, 1, 141e9))
    assert made["hours"]["capture"] == pytest.approx(1.0)
    assert made["hours"]["train"] == pytest.approx(3 * 0.9 * 2.0)
    assert made["hours"]["train_rate_of"] == made["hours"]["capture_rate_of"] == "as stated"
    assert made["hours"]["together"] == pytest.approx(1.0 + 3 * 0.9 * 2.0)


def test_memory_follows_the_optimizer_and_the_number_of_gpus(minimax, roomy):
    def used(gpus=1, **train):
        config = minimax(train={"tokens_per_batch": 16384, **train})
        return sum(make_plan(config, stated(config, 10**6, 1000, 0.6), Rates(gpus=gpus))["gpu"]["training"].values())

    parameters = 343683072
    assert used(ema_decay=0.999) - used() == pytest.approx(4 * parameters)
    assert used(gpus=2) - used() == pytest.approx(4 * parameters)
    assert used() - used(optimizer="muon") == pytest.approx(4 * (parameters - 32000 * 3072 - 4 * 3072))


def test_a_spool_captures_every_epoch_while_it_trains(minimax, roomy):
    spool = {"mode": "spool", "spool_bytes": 10 * 10**9}
    config = minimax(train={"epochs": 3, "tokens_per_batch": 16384}, capture=spool)
    made = make_plan(config, stated(config, 3_600_000, 1000, 0.6), Rates(1000.0, 500.0, 1, 141e9))
    assert made["hours"]["capture"] == pytest.approx(0.1 + 3 * 0.9)
    assert made["hours"]["together"] == pytest.approx(3 * 0.9 * 2.0)
    states = made["disk"]["states"]["bf16"]
    assert made["disk"]["states_needed"] == pytest.approx(0.1 * states + 10 * 10**9, rel=1e-6)
    roomy(free=5e9)
    (problem,) = make_plan(config, stated(config, 3_600_000, 1000, 0.6), H200)["problems"]
    assert "Lower capture.spool_bytes by" in problem["mend"]


def test_the_size_of_a_shard_is_the_plans(synthetic_run):
    """What the plan says a run's states take is what they take, headers apart."""
    from draftsmith.hidden_state_capture.reader import HiddenStateStore

    store = HiddenStateStore(RunFolder.of(synthetic_run).hidden_states)
    tensors = sum(sum(t.nbytes for t in store.stored(i).values()) for i in range(len(store.index)))
    tokens = sum(r["length"] for r in store.index)
    replies = sum(r["supervised_tokens"] for r in store.index)
    amount = stated(synthetic_run, tokens, 10, replies / tokens)
    assert make_plan(synthetic_run, amount, H200)["disk"]["states"]["bf16"] == tensors


@pytest.mark.parametrize("storage", ["bf16", "fp8"])
def test_the_size_of_a_batch_is_the_plans(synthetic_run, storage):
    """What training holds beside the batch that it works on; in float8 what is decoded, and what it is decoded from."""
    from draftsmith.data.batching import collate
    from draftsmith.hidden_state_capture.reader import HiddenStateStore

    store = HiddenStateStore(RunFolder.of(synthetic_run).hidden_states)
    numbers = store.numbers("train")
    batch = collate(store, numbers)
    shape = DraftShape(64, 3, 4, 2, 16, 128, 512, 128, 1e-6, 256)
    rows = len(batch.last_rows_M)
    work = Workload(batch.num_tokens, rows / batch.num_tokens, batch.num_tokens / len(numbers), 3)
    states = batch.aux_TAH.nbytes + batch.last_MH.nbytes
    others = batch.input_ids_T.nbytes + batch.loss_mask_T.nbytes + batch.positions_T.nbytes
    held = states if storage == "bf16" else states + states // 2
    assert batch_bytes(shape, work, storage == "fp8") == pytest.approx(held + others)
    amount = stated(synthetic_run, batch.num_tokens, 10, rows / batch.num_tokens)
    config = synthetic_run.model_copy(update={"capture": synthetic_run.capture.model_copy(update={"storage": storage})})
    parts = make_plan(config, amount, H200)["gpu"]["training"]
    assert parts["next batch"] == pytest.approx((held + others) * config.train.tokens_per_batch / work.tokens, rel=0.01)


# ---- what does not fit ----------------------------------------------------------------------------------------------


def problems(config, tokens=10**9, gpu_bytes=141e9):
    amount = stated(config, tokens, min(1000, config.data.max_length), 0.26)
    made = make_plan(config, amount, Rates(gpus=1, gpu_bytes=gpu_bytes))
    return [p["what"] + " " + p["mend"] for p in made["problems"]]


def test_a_disk_that_is_too_small_gets_fp8_and_then_a_spool_as_its_mend(minimax, roomy):
    roomy(free=15e12)
    (said,) = problems(minimax())
    assert "20,0" in said and "15,000.0 GB are free" in said and "capture.storage=fp8" in said
    roomy(free=1e12)
    (said,) = problems(minimax(capture={"storage": "fp8"}))
    assert "capture.mode=spool and capture.spool_bytes=" in said


def test_a_batch_that_is_too_large_gets_the_largest_that_fits(minimax, roomy):
    (said,) = problems(minimax(train={"tokens_per_batch": 300_000, "epochs": 1}))
    assert "a training step of 300,000 tokens takes" in said
    fits = int(said.split("train.tokens_per_batch to ")[1].split(" ")[0])
    assert problems(minimax(train={"tokens_per_batch": fits})) == []
    assert problems(minimax(train={"tokens_per_batch": fits + 1000})) != []


def test_a_gpu_that_cannot_hold_one_sample_is_said(minimax, roomy):
    said = problems(minimax(target={"tensor_parallel": 64}), gpu_bytes=8e9)
    assert any("Lower data.draft_vocab_size, share the draft out" in line for line in said)


def test_what_makes_one_sample_too_large_is_named(minimax, roomy):
    def said(**sections):
        return problems(minimax(**sections))

    long = {"max_length": 190_000}
    (named,) = said(data=long, train={"ttt_steps": 14})
    steps, length = (int(named.split(key + " to ")[1].split(" ")[0]) for key in ("train.ttt_steps", "data.max_length"))
    assert "(it is 14)" in named and "(it is 190,000)" in named
    assert said(data=long, train={"ttt_steps": steps}) == []
    assert "train.ttt_steps" in said(data=long, train={"ttt_steps": steps + 1})[0]
    assert said(data={"max_length": length}, train={"ttt_steps": 14}) == []
    assert said(data={"max_length": length + 300}, train={"ttt_steps": 14})


def test_steps_that_no_reply_is_long_enough_for_are_refused(minimax, roomy):
    short = {"max_length": 400, "sampling": {"max_tokens": 20}}
    assert problems(minimax(data=short, train={"ttt_steps": 19})) == []
    (named,) = problems(minimax(data=short, train={"ttt_steps": 20}))
    assert "a reply has 20 tokens at most (data.sampling.max_tokens)" in named
    assert "Set train.ttt_steps to 19 or less" in named
    kept = {"replies": "keep", "max_length": 16, "sampling": {"max_tokens": 15}}
    assert problems(minimax(data=kept, train={"ttt_steps": 14})) == []
    (named,) = problems(minimax(data=kept, train={"ttt_steps": 15}))
    assert "samples of 16 tokens at most" in named and "to 14 or less" in named


@pytest.mark.parametrize(
    ("options", "quarters"),
    [  # of 4 P bytes, on four GPUs: held, whole in a pass, exchange
        ({}, (16, 0, 4)),
        ({"shard": "fsdp2"}, (4, 8, 4)),
        *(({"engine": "deepspeed", "deepspeed_config": name}, parts)
          for name, parts in {"zero1": (8, 4, 1), "zero2": (8, 4, 2), "zero3": (5, 8, 1),
                              "zero2_offload": (4, 4, 2), "zero3_offload": (1, 8, 1)}.items()),
    ],
)  # fmt: skip
def test_memory_follows_the_engine(minimax, roomy, options, quarters):
    config = minimax(train=options)
    found = make_plan(config, stated(config, 10**6, 1000, 0.6), Rates(gpus=4))["gpu"]["training"]
    whole = 4 * 343683072
    held, in_a_pass, exchange = quarters
    assert found["weights and optimizer"] == pytest.approx(whole * (held / 4 + 0.5))
    assert found.get("whole in a pass", 0) == pytest.approx(whole * in_a_pass / 4)
    buckets = 4.0 * 200_000_000 * exchange if "engine" in options else whole
    assert found["exchange of gradients"] == pytest.approx(buckets)
    averaged = minimax(train={**options, "ema_decay": 0.999})
    average = make_plan(averaged, stated(config, 10**6, 1000, 0.6), Rates(gpus=4))["gpu"]["training"]
    shared = "shard" in options or "zero3" in options.get("deepspeed_config", "")
    assert average["average of the weights"] == pytest.approx(whole / 4 if shared else whole)


@pytest.mark.parametrize(
    ("zero", "numbers"),
    [
        ({"reduce_bucket_size": "auto"}, 5e8),
        ({"reduce_bucket_size": "300"}, 300),
        ({"reduce_bucket_size": 3e8, "overlap_comm": "false"}, 3e8),
        ({"reduce_bucket_size": None, "overlap_comm": True}, 1e9),
        ({"reduce_bucket_size": [], "offload_optimizer": "cpu"}, 5e8),  # what DeepSpeed refuses is told by training
        ({"reduce_bucket_size": float("inf"), "offload_optimizer": True}, 5e8),
    ],
)
def test_deepspeeds_file_is_read_as_deepspeed_does(minimax, roomy, tmp_path, zero, numbers):
    file = tmp_path / "own.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2, **zero}}))
    config = minimax(train={"engine": "deepspeed", "deepspeed_config": str(file)})
    made = make_plan(config, stated(config, 10**6, 1000, 0.6), Rates(gpus=4))
    assert made["gpu"]["training"]["exchange of gradients"] == 4.0 * numbers


def test_a_target_that_is_too_large_for_its_gpus_is_said(minimax, roomy):
    (said,) = problems(minimax(target={"tensor_parallel": 1}))
    assert "230 GB on each of 1 GPUs of 141 GB" in said and "target.tensor_parallel to 2" in said


def test_host_memory_that_is_too_small_is_said(minimax, roomy):
    roomy(total=2e9)
    assert any("Lower capture.pending_bytes" in line for line in problems(minimax()))


# ---- how many tokens ---------------------------------------------------------------------------------------------


def test_a_prepared_run_is_counted(synthetic_run, tmp_path):
    run = RunFolder.of(synthetic_run)
    path = run.samples / "manifest.json"
    tree = json.loads(path.read_text()) | {"tokens": 777, "reply_tokens": 333, "lengths": {"max": 20}}
    path.write_text(json.dumps(tree))
    amount = amount_of(synthetic_run, run)
    assert (amount.samples, amount.tokens, amount.reply_tokens, amount.longest) == (24, 777, 333, 20)
    assert amount.train_share == 20 / 24 and "counted" in amount.how


def test_an_unprepared_run_is_estimated_and_says_so(make_config, tmp_path):
    rows = [{"messages": [{"role": "user", "content": "x" * 40}]} for _ in range(1000)]
    source = tmp_path / "p.jsonl"
    source.write_text("".join(json.dumps(r) + "\n" for r in rows))
    config = make_config(data={"sources": [{"path": str(source)}]})
    amount = amount_of(config, RunFolder.of(config))
    assert amount.samples == 1000 and amount.tokens == 1000 * (10 + 16) and amount.reply_tokens == 16000
    assert "estimated" in amount.how and "max_tokens (16), which is the most" in amount.how
    half = make_config(data={"sources": [{"path": str(source), "weight": 0.5, "limit": 300}]})
    assert amount_of(half, RunFolder.of(half)).samples == 150
    sampling = {"max_tokens": 16, "temperature": 1.0, "replies": 3}
    three = amount_of(
        make_config(data={"sources": [{"path": str(source)}], "sampling": sampling}), RunFolder.of(config)
    )
    assert (three.samples, three.tokens, three.reply_tokens) == (3000, 3 * amount.tokens, 48000)
    assert "3 replies (data.sampling.replies) to every prompt" in three.how


@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_rows_are_counted_in_other_formats(make_config, tmp_path, kind):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"prompt": f"question {i:04d}"} for i in range(1000)]
    source = tmp_path / f"p.{kind}"
    if kind == "json":
        source.write_text(json.dumps(rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), source)
    config = make_config(data={"sources": [{"path": str(source)}]})
    assert amount_of(config, RunFolder.of(config)).samples == pytest.approx(1000, rel=0.01)


def test_kept_replies_count_by_their_length(make_config, tmp_path):
    row = {"messages": [{"role": "user", "content": "u" * 40}, {"role": "assistant", "content": "a" * 80}]}
    source = tmp_path / "p.jsonl"
    source.write_text(json.dumps(row) + "\n")
    config = make_config(data={"sources": [{"path": str(source)}], "replies": "keep"})
    amount = amount_of(config, RunFolder.of(config))
    assert (amount.tokens, amount.reply_tokens) == (30, 20)


def test_a_source_of_unknown_size_asks_for_its_limit(make_config, tmp_path):
    import gzip

    source = tmp_path / "p.jsonl.gz"
    source.write_bytes(gzip.compress(b'{"prompt": "q"}\n' * 500))
    config = make_config(data={"sources": [{"path": str(source)}]})
    with pytest.raises(UserError, match=r"p\.jsonl\.gz.*not known.*Give its `limit`"):
        amount_of(config, RunFolder.of(config))
