"""A draft is read from wherever it lies, and nothing of a stranger's is executed on the way."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from drafts import make_checkpoint, make_shape

from draftsmith.core.errors import UserError
from draftsmith.core.run import RunFolder
from draftsmith.export.sources import kind_of, read_source

pytestmark = pytest.mark.usefixtures("one_thread")


def torchspec_config(shape, **changes):
    """As TorchSpec writes it: post-layer ids."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size, "num_attention_heads": shape.num_heads, "head_dim": 16,
        "num_key_value_heads": shape.num_kv_heads, "num_hidden_layers": 1, "vocab_size": shape.vocab_size,
        "draft_vocab_size": shape.draft_vocab_size, "rms_norm_eps": shape.rms_norm_eps, "rope_theta": 10000.0,
        "max_position_embeddings": 256, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]},
    }  # fmt: skip
    return {**config, **changes}


@pytest.fixture
def torchspec(tmp_path):
    """`torchspec(shape, **extra tensors)`: (checkpoint, folder) as its trainer saves: iter_N/model, bf16, buffers."""

    def save(shape=None, absolute=False, config=True, **more):
        checkpoint = make_checkpoint(tmp_path, shape or make_shape())
        tensors = {k: v.to(torch.bfloat16) for k, v in checkpoint.tensors.items()}
        ids = checkpoint.target_ids
        tensors |= {"d2t": ids if absolute else checkpoint.d2t, "t2d": checkpoint.t2d, **more}
        model = {f"draft_model.{k}": v for k, v in tensors.items()} | {"target_lm_head.weight": torch.zeros(2, 2)}
        folder = tmp_path / "iter_0000010"
        (folder / "model").mkdir(parents=True)
        state = {"model_state": {"model": model}}
        dcp.save(state, checkpoint_id=str(folder / "model"), no_dist=True)
        if config:
            (folder / "config.json").write_text(json.dumps(torchspec_config(checkpoint.shape)))
        return checkpoint, folder

    return save


def same(draft, checkpoint):
    assert draft.shape == checkpoint.shape and draft.layer_ids == [1, 2, 4]
    assert torch.equal(draft.target_ids, checkpoint.target_ids)
    assert draft.tensors.keys() == checkpoint.tensors.keys()
    for name, tensor in checkpoint.tensors.items():
        assert torch.equal(draft.tensors[name].float(), tensor.to(torch.bfloat16).float()), name


@pytest.mark.parametrize("absolute", [False, True], ids=["offsets", "absolute ids"])
@pytest.mark.parametrize("inner", ["", "model"])
def test_torchspecs_pruned_vocabulary(torchspec, absolute, inner):
    checkpoint, folder = torchspec(absolute=absolute)
    assert kind_of(folder / inner) == "distributed"
    same(read_source(folder / inner, None, None, None), checkpoint)


def test_torchspecs_full_vocabulary(torchspec):
    checkpoint, folder = torchspec(make_shape(draft_vocab_size=512))
    same(read_source(folder, None, None, None), checkpoint)


def test_torchspecs_own_embedding_is_kept_until_the_target_is_known(torchspec):
    checkpoint, folder = torchspec(make_shape(own_embedding=True))
    same(read_source(folder, None, None, None), checkpoint)


def test_torchspecs_config_lies_elsewhere(torchspec, tmp_path):
    checkpoint, folder = torchspec(config=False)
    with pytest.raises(UserError, match=r"without a config\.json.*--draft-config"):
        read_source(folder, None, None, None)
    file = tmp_path / "draft.json"
    file.write_text(json.dumps(torchspec_config(checkpoint.shape)))
    same(read_source(folder, None, None, file), checkpoint)


def test_torchspecs_ids_may_be_vllms_already(torchspec):
    _, folder = torchspec()
    assert read_source(folder, None, "vllm", None).layer_ids == [0, 1, 3]


def test_torchspecs_mapping_that_contradicts_itself(torchspec):
    _, folder = torchspec(t2d=torch.arange(512) < 128)
    with pytest.raises(UserError, match="neither as offsets nor as absolute ids"):
        read_source(folder, None, None, None)


def test_a_distributed_checkpoint_that_is_cut_or_of_something_else(torchspec, tmp_path):
    _, folder = torchspec()
    shard = next((folder / "model").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:1000])
    with pytest.raises(UserError, match="missing or damaged"):
        read_source(folder, None, None, None)
    dcp.save({"other": torch.zeros(3)}, checkpoint_id=str(tmp_path / "else"), no_dist=True)
    with pytest.raises(UserError, match=r"no tensor `\.\.\.draft_model\.\*` in it"):
        read_source(tmp_path / "else", None, None, None)


class Evil:
    """Runs when it is unpickled."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return Path.touch, (self.trace,)


def test_a_distributed_checkpoints_metadata_runs_nothing(torchspec, tmp_path):
    _, folder = torchspec()
    metadata, trace = folder / "model" / ".metadata", tmp_path / "ran"
    metadata.write_bytes(pickle.dumps(Evil(trace)))
    with pytest.raises(UserError, match="runs no code out of a checkpoint"):
        read_source(folder, None, None, None)
    assert not trace.exists()
    metadata.write_bytes(b"\x80\x04garbage")
    with pytest.raises(UserError, match=r"\.metadata: "):
        read_source(folder, None, None, None)


def test_a_distributed_checkpoint_reads_no_file_outside(torchspec, tmp_path):
    _, folder = torchspec()
    file = folder / "model" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../../secret"
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(UserError, match="names files outside the folder"):
        read_source(folder, None, None, None)


def test_a_checkpoint_of_ours(trained_run):
    folder = RunFolder.of(trained_run).checkpoints / "step-0000011"
    assert kind_of(folder) == "ours"
    draft = read_source(folder, None, None, None)
    assert draft.layer_ids == [3, 4, 5] and draft.origin == "step-0000011"
    (folder / "COMPLETE").unlink()
    with pytest.raises(UserError, match="an incomplete checkpoint"):
        read_source(folder, None, None, None)


def test_a_folder_of_nothing_known(tmp_path):
    with pytest.raises(UserError, match="neither a draft folder"):
        read_source(tmp_path, None, None, None)


# ---- DeepSpeed (X6) --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def zero_folder(tmp_path_factory):
    """A ZeRO-3 checkpoint of two ranks, by real DeepSpeed."""
    pytest.importorskip("deepspeed")
    folder = tmp_path_factory.mktemp("zero")
    script = Path(__file__).with_name("zero_checkpoint.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, str(script), str(folder), "3"], capture_output=True, text=True, timeout=400, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.slow
def test_zero_3_shards_are_gathered(zero_folder, tmp_path):
    checkpoint = make_checkpoint(tmp_path, make_shape(draft_vocab_size=512))
    assert len(list(zero_folder.glob("global_step0/*_optim_states.pt"))) == 2
    assert kind_of(zero_folder) == "zero"
    same(read_source(zero_folder, None, None, None), checkpoint)


@pytest.mark.slow
def test_zero_3_with_a_rank_missing_or_a_pickle_planted(zero_folder, tmp_path):
    import shutil

    folder, trace = tmp_path / "copy", tmp_path / "ran"
    shutil.copytree(zero_folder, folder)
    first, _ = sorted(folder.glob("global_step0/*_optim_states.pt"))
    torch.save({"optimizer_state_dict": Evil(trace)}, first)
    with pytest.raises(UserError, match="runs no code out of a checkpoint"):
        read_source(folder, None, None, None)
    assert not trace.exists()
    first.unlink()
    with pytest.raises(UserError, match="missing or damaged"):
        read_source(folder, None, None, None)
