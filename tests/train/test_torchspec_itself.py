"""Against TorchSpec itself, where it is installed (requirements/torchspec.txt): what it reads, computes and writes."""

import dataclasses
import importlib
import subprocess
from types import SimpleNamespace

import pytest
import torch
import yaml

from draftsmith.core.batch import Batch
from draftsmith.core.checkpoint import build_objective, read_checkpoint
from draftsmith.core.manifest import require_manifest
from draftsmith.core.target_weights import load_target_weights
from draftsmith.core.unroll import unroll
from draftsmith.train.torchspec import entry
from draftsmith.train.torchspec.checkpoints import newest_whole
from draftsmith.train.torchspec.config import draft_json
from draftsmith.train.torchspec.plan import make_plan
from draftsmith.train.torchspec.rows import supervised_spans
from draftsmith.train.torchspec.stage import _aside, take_over, write_inputs


def needed(name):
    try:
        return importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"TorchSpec cannot be loaded here ({error}); see requirements/torchspec.txt")


@pytest.fixture(autouse=True)
def _eager(one_thread):
    needed("torchspec.models.eagle3")
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


@pytest.fixture
def torchspec_run(synthetic_run, changed):
    """`torchspec_run(torchspec={...}, **sections)`: a plan whose files are written."""

    def make(torchspec=None, train=None, **sections):
        train = {"engine": "torchspec", "torchspec": torchspec or {}, **(train or {})}
        plan = make_plan(changed(synthetic_run, train=train, **sections))
        write_inputs(plan, "rms")
        return plan

    return make


def their_model(plan, dtype=torch.bfloat16):
    """Its `Eagle3Model` as its trainer builds it, from the file that it is given."""
    from torchspec import AutoDraftModelConfig, AutoEagle3DraftModel, Eagle3Model

    said = draft_json(plan.shape)
    config = AutoDraftModelConfig.from_file(str(plan.files.draft))
    config.rope_scaling, config.rope_theta = said["rope_scaling"], said["rope_theta"]
    draft = AutoEagle3DraftModel.from_config(config, attention_backend="sdpa", torch_dtype=torch.bfloat16)
    return Eagle3Model(draft, length=plan.config.train.ttt_steps, attention_backend="sdpa").to(dtype)


@pytest.fixture
def one_process(monkeypatch, tmp_path):
    """What its checkpoint code asks of a process: a group of one, and a device to wait for, which a CPU has not."""
    import torch.distributed as dist

    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", list)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def actor_of(plan, model, **args):
    from torchspec.training.optimizer import BF16Optimizer

    optimizer = BF16Optimizer(model.draft_model, lr=1e-3, total_steps=plan.steps)
    args = {"checkpoint_dir": str(plan.files.output / "checkpoints"), **args}
    return SimpleNamespace(
        args=SimpleNamespace(**args), model=model, draft_model=model.draft_model, optimizer=optimizer,
        lr_scheduler=optimizer.lr_scheduler, global_step=0,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_it_accepts_the_yaml(torchspec_run, backend):
    needed("torchspec.train_entry")
    plan = torchspec_run({"backend": backend, "overrides": {"training.distributed_timeout_minutes": 30}})
    done = subprocess.run([*plan.command(), "--print-config-only"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    resolved = yaml.safe_load((plan.files.output / "config.yaml").read_text())

    def within(ours, theirs, at=""):
        for key, value in ours.items():
            if isinstance(value, dict):
                within(value, theirs[key], f"{at}{key}.")
            else:
                assert theirs[key] == value, f"{at}{key}"

    within(plan.tree(), resolved)
    wrong = plan.folder / "wrong.yaml"
    wrong.write_text(yaml.safe_dump({**plan.tree(), "training": {"ttt_steps": 3}}))
    command = [str(wrong) if part.endswith(".yaml") else part for part in plan.command()]
    done = subprocess.run([*command, "--print-config-only"], capture_output=True, text=True)
    assert done.returncode and "ttt_steps" in done.stderr


def flat(plan):
    from torchspec.config.train_config import config_to_flat_args, load_config

    return config_to_flat_args(load_config(str(plan.folder / "torchspec.yaml")))


def test_it_reads_our_ids_and_masks(torchspec_run):
    """Its own loader, which would tokenise the text where it did not find the cache."""
    from torchspec.data.dataset import load_conversation_dataset
    from torchspec.data.utils import unpack_loss_mask

    plan = torchspec_run()
    loaded = load_conversation_dataset(flat(plan))
    assert [e["data_id"] for e in loaded] == [s.sample_id for s in plan.train]
    for kept, sample in zip(loaded, plan.train, strict=True):
        assert kept["input_ids"][0].tolist() == sample.input_ids
        mask = unpack_loss_mask(kept["packed_loss_mask"])
        ones = [i for start, end in supervised_spans(sample) for i in range(start, end)]
        assert mask.nonzero()[:, 0].tolist() == ones and len(mask) == len(sample.input_ids)


def test_its_own_buffers_hold_a_batch(torchspec_run):
    from draftsmith.train.torchspec.config import sample_bytes

    needed("torchspec.config.mooncake_config")
    from torchspec.config.mooncake_config import MooncakeConfig

    plan = torchspec_run({"micro_batch_size": 2})
    args = flat(plan)
    args.per_dp_rank_batch_size = 2
    made = MooncakeConfig.from_flat_args(args)
    assert made.host_buffer_size >= 2 * sample_bytes(plan.config, plan.shape)
    assert made.hidden_dim == plan.shape.hidden_size and made.max_seq_len == 65


ROPES = [
    {"rope_type": "default", "rope_theta": 5e6},
    {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
]  # fmt: skip


@pytest.mark.parametrize("rope", ROPES, ids=[r["rope_type"] for r in ROPES])
def test_its_rope_is_ours_or_it_does_not_start(torchspec_run, rope):
    """Through the hook of entry.py; without it this transformers gives it another rope, or none."""
    from torchspec.train_entry import AutoDraftModelConfig

    train_entry = needed("torchspec.train_entry")
    plan = torchspec_run(draft={"rope": rope})
    tensors, args = _aside(plan), SimpleNamespace(draft_model_config=str(plan.files.draft))
    read = train_entry._get_draft_model_config
    try:
        entry._set_rope(train_entry, args, tensors)
        config = train_entry._get_draft_model_config(args)
        assert config.rope_theta == rope["rope_theta"]
        with pytest.raises(SystemExit, match="rope is not the draft's"):
            entry._check_rope(config, {**tensors, "cos": tensors["cos"].roll(1, 1)})
    finally:
        train_entry._get_draft_model_config = read
    with pytest.raises((SystemExit, ValueError, AttributeError)):
        plain = AutoDraftModelConfig.from_file(str(plan.files.draft))
        entry._check_rope(plain, tensors)
        raise SystemExit  # linear: its base is the default one, so nothing is lost


def test_it_starts_from_our_first_weights(torchspec_run, one_process):
    """A checkpoint that we wrote, into its model, by its own `load`; frozen embedding and vocabulary too."""
    from torchspec.training import checkpoint

    plan = torchspec_run()
    actor = actor_of(plan, their_model(plan), load_path=str(plan.files.start), continual_training=True)
    assert checkpoint.load(actor)["iteration"] == 0
    weights = load_target_weights(plan.target)
    assert torch.equal(actor.draft_model.embed_tokens.weight, weights.embed_VH.bfloat16())
    ids = torch.from_numpy(plan.mapping.target_ids)
    assert torch.equal(actor.draft_model.lm_head.weight, weights.head_VH[ids].bfloat16())
    assert torch.equal(actor.draft_model.t2d.nonzero()[:, 0], ids)
    assert torch.equal(actor.draft_model.d2t, torch.from_numpy(plan.mapping.d2t))


def batch_of(plan, spans, length=24):
    generator = torch.Generator().manual_seed(3)
    states = torch.randn(length, 4, plan.shape.hidden_size, generator=generator)
    mask = torch.zeros(length, dtype=torch.bool)
    for start, end in spans:
        mask[start:end] = True
    ids = torch.randint(0, plan.shape.vocab_size, (length,), generator=generator)
    at = torch.arange(length)
    return Batch(("a/0",), (0, length), ids, mask, at, states[:, :3], states[:, 3], at)


def their_losses(plan, model, batch, spans):
    """As `Eagle3Trainer._forward` calls it: ids and target shifted by one, the mask not."""
    from torchspec.models.eagle3 import compute_lazy_target_padded, compute_target_p_padded
    from torchspec.utils.tensor import padding

    weights = load_target_weights(plan.target)
    head, steps = weights.head("rms"), plan.config.train.ttt_steps
    last = batch.last_MH[None]
    normed = padding(last, left=False)
    normed = normed * torch.rsqrt(normed.pow(2).mean(-1, keepdim=True) + head.eps) * weights.norm_H.float()
    mask = torch.zeros(1, batch.num_tokens, dtype=torch.long)
    for start, end in spans:
        mask[0, max(start - 1, 0) : max(end - 2, 0)] = 1
    if plan.mapping.is_full:
        target = compute_lazy_target_padded(normed, weights.head_VH.float(), steps)
    else:
        target = compute_target_p_padded(normed, weights.head_VH.float(), model.draft_model.t2d, mask, steps)
    losses, _, hits = model(
        input_ids=padding(batch.input_ids_T[None], left=False),
        attention_mask=torch.ones_like(mask),
        target=target,
        loss_mask=mask,
        hidden_states=batch.aux_TAH.flatten(1)[None],
    )
    return torch.stack(losses), torch.stack(hits), target


def in_float32(model):
    """To compare with: its products, and its table of the rope, which bfloat16 has rounded."""
    model = model.float()
    model.draft_model.midlayer.self_attn._init_rope()
    return model


def loaded_alike(plan):
    """Its model with the weights of the first checkpoint, disturbed, and what its trainer is to its checkpoints."""
    from torchspec.training import checkpoint

    model = their_model(plan)
    actor = actor_of(plan, model, load_path=str(plan.files.start), continual_training=True)
    assert checkpoint.load(actor)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.draft_model.parameters():
            if parameter.requires_grad and parameter is not model.draft_model.embed_tokens.weight:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
    return model, actor


def our_objective(plan, model):
    objective = build_objective(plan.target, plan.shape, torch.from_numpy(plan.mapping.target_ids), "rms")
    names = objective.draft.state_dict().keys()
    theirs = model.draft_model.state_dict()
    objective.draft.load_state_dict({name: theirs[name].float() for name in names})
    return objective.float()


@pytest.mark.parametrize("spans", [[(1, 24)], [(8, 24)], [(4, 9), (12, 20)]], ids=["no prompt", "prompt", "two turns"])
def test_the_loss_is_ours_where_the_rows_are(torchspec_run, one_process, spans):
    """Step 1 always; deeper steps where no row of a prompt comes on top, and there theirs is a mean over those too."""
    plan = torchspec_run()
    model, _ = loaded_alike(plan)
    model = in_float32(model)
    batch = batch_of(plan, spans)
    objective = our_objective(plan, model)
    losses, _, target = their_losses(plan, model, batch, spans)
    in_vocabulary = target.position_mask[0].bool()  # row t: the target's favourite at t+1 can be drafted
    label_at = {}
    for step, loss_R, _ in objective.judge(batch, plan.config.train.ttt_steps):
        # With a reduced vocabulary it leaves out rows whose label's favourite the draft does not have.
        weights = load_target_weights(plan.target)
        logits = weights.head("rms")(batch.last_MH[step.rows_R + step.j])
        kept = torch.from_numpy(plan.mapping.t2d)[logits.argmax(-1)]
        label_at[step.j] = loss_R[kept].mean().item()
    assert losses[0].item() == pytest.approx(label_at[1], rel=2e-5)
    if spans == [(1, 24)]:
        assert losses.tolist() == pytest.approx([label_at[j] for j in (1, 2, 3)], rel=2e-5)
    # Step 2 has row s - 2 on top, where the target's favourite at s can be drafted.
    on_top = any(in_vocabulary[start - 1] for start, _ in spans if start > 1)
    assert (losses[1].item() == pytest.approx(label_at[2], rel=2e-5)) == (not on_top)
    assert on_top == (len(spans) == 2)  # both are seen


def test_its_checkpoint_as_ours_has_its_logits(torchspec_run, one_process):
    """Saved by its own code from its own model; taken over; every step's logits."""
    from torchspec.training import checkpoint

    plan = torchspec_run()
    model, actor = loaded_alike(plan)
    actor.global_step = 7
    checkpoint.save(actor, step=7)
    newest = newest_whole(plan.files.output / "checkpoints")
    assert newest.step == 7 and newest.folder.name == "iter_0000008"
    states = require_manifest(plan.run.hidden_states, "capture", "train")
    inputs = {"made": "here"}
    assert take_over(dataclasses.replace(plan, newest=newest), states, inputs) == 7
    taken = read_checkpoint(plan.run.checkpoints / "step-0000007")
    assert taken.shape == plan.shape and taken.layer_ids == plan.layer_ids and taken.state["inputs"] == inputs
    ours = build_objective(plan.target, taken.shape, taken.target_ids, taken.norm_form).draft
    ours.load_state_dict(taken.tensors)
    ours, theirs = ours.float(), in_float32(model).draft_model
    batch = batch_of(plan, [(8, 24)])
    ids = torch.cat([batch.input_ids_T[1:], torch.zeros(1, dtype=torch.int64)])[None]
    with torch.no_grad():
        hidden = theirs.project_hidden_states(batch.aux_TAH.flatten(1)[None])
        mask = theirs.prepare_decoder_attention_mask(torch.ones(1, 24), hidden, 1, 24, 0)
        keys = values = None
        for step in unroll(ours, batch, 3):
            hidden, keys, values = theirs.backbone(
                theirs.embed_input_ids(ids), hidden, mask, batch.positions_T[None], keys, values, True
            )
            expected = theirs.compute_logits(hidden)[0, step.rows_R]
            assert torch.allclose(ours.lm_head(step.hidden_RH), expected, rtol=1e-4, atol=1e-4), step.j
            ids = torch.cat([ids[:, 1:], torch.zeros(1, 1, dtype=torch.int64)], dim=1)


def test_a_cut_save_is_not_gone_on_from(torchspec_run, one_process):
    from torchspec.training import checkpoint

    plan = torchspec_run()
    _, actor = loaded_alike(plan)
    folder = plan.files.output / "checkpoints"
    for step in (4, 8):
        actor.global_step = step
        checkpoint.save(actor, step=step)
    assert newest_whole(folder).step == 8
    cut = max((folder / "iter_0000009" / "optimizer").glob("*.distcp"), key=lambda p: p.stat().st_size)
    cut.write_bytes(cut.read_bytes()[:-8])
    assert newest_whole(folder).step == 4
    (folder / "iter_0000005" / "meta.json").unlink()
    assert newest_whole(folder) is None
    # and by its own loader, what it resumes from
    actor.global_step = 12
    checkpoint.save(actor, step=12)
    again = actor_of(plan, their_model(plan), load_path=str(folder))
    loaded = checkpoint.load(again)
    assert loaded["metadata"]["global_step"] == 12
    saved = actor.draft_model.state_dict()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in again.draft_model.state_dict().items())
