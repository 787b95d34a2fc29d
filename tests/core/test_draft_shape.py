"""The draft's shape: the config's word first, then the target's, and nothing that vLLM would run in another way."""

from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError

from draftsmith.core.config_train import DraftConfig
from draftsmith.core.draft import DraftModel
from draftsmith.core.draft_shape import resolve_shape
from draftsmith.core.errors import UserError
from draftsmith.core.rope import rotary_embedding

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 256,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 512}


def shape_of(target=None, **draft):
    """The shape of a draft on a target of 8 heads of 16; `target`: more keys of its config."""
    keys = {
        "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 256, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }  # fmt: skip
    hf_config = SimpleNamespace(**{**keys, **(target or {})})
    like = SimpleNamespace(hf_config=hf_config, hidden_size=128, vocab_size=512, local_path="/models/x")
    return resolve_shape(DraftConfig(**draft), like, 3, 64)


def refusal(target=None, **draft):
    with pytest.raises(UserError) as error:
        shape_of(target, **draft)
    return str(error.value)


# ---- rope ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rope", [LLAMA3, YARN], ids=["llama3", "yarn"])
def test_rope_is_the_targets(rope):
    assert shape_of({"rope_parameters": rope}).rope == rope


def test_the_target_may_rotate_a_part_and_the_draft_rotates_what_it_is_told():
    partial = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5, "rope_dim": 8}
    whole = shape_of({"rope_parameters": partial})
    assert whole.rope == {"rope_type": "default", "rope_theta": 1e6} and whole.rotary_dim == 16
    assert shape_of({"rope_parameters": partial}, partial_rotary_factor=0.25).rotary_dim == 4
    assert "partial_rotary_factor" not in shape_of(partial_rotary_factor=1.0).rope


def test_a_rope_of_the_drafts_own_takes_the_place_of_the_targets():
    own = {"rope_type": "default", "rope_theta": 5000.0}
    assert shape_of({"rope_parameters": YARN}, rope=own).rope == own
    assert shape_of({"rope_parameters": YARN}, rope={}).rope == {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "proportional"])
def test_a_rope_that_depends_on_the_length_is_refused_with_the_mend(kind):
    message = refusal({"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}})
    assert f"the target's rope is of type {kind}" in message and "Set draft.rope, e.g." in message


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        ({"rope_type": "yarn", "factor": 4.0}, r"draft.rope (yarn) lacks original_max_position_embeddings"),
        ({"rope_type": "default", "base": 1e4}, r"draft.rope (default) has unknown keys: base"),
        ({**YARN, "factor": 2.0}, r"covers 1024 positions in vLLM, and the target has 2048. Raise its factor"),
    ],
)
def test_a_rope_with_wrong_parameters_is_refused(rope, said):
    assert said in refusal(rope=rope)


@pytest.mark.parametrize("factor", [0.01, 0.2])
def test_an_odd_or_empty_rotated_part_is_refused(factor):
    assert "rotary embeddings need an even one" in refusal(partial_rotary_factor=factor)


def test_yarn_scales_attention():
    cos, _ = rotary_embedding(YARN, 16, 2048)(torch.zeros(()), torch.zeros(1, 1, dtype=torch.int64))
    assert torch.allclose(cos, torch.full_like(cos, 0.1 * torch.tensor(4.0).log() + 1.0))


@pytest.mark.vllm
@pytest.mark.parametrize("partial", [None, 0.5])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1e6},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        LLAMA3,
        YARN,
        {**YARN, "attention_factor": 1.5, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    ],
    ids=["default", "linear", "llama3", "yarn", "yarn with all its keys"],
)
def test_rotated_queries_equal_vllms(rope, partial):
    """Through the draft's own attention code, against vLLM's rotary layer on the exported parameters."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    shape = shape_of(rope=rope, partial_rotary_factor=partial)
    draft = DraftModel(shape, torch.empty(shape.vocab_size, shape.hidden_size))
    positions = torch.tensor([0, 1, 7, 300, 1023, 2047])
    x = torch.randn(len(positions), 2 * shape.hidden_size)
    attention, (embed, feature) = draft.midlayer.self_attn, x.chunk(2, dim=-1)
    ours = attention.query(attention.embedding_half(embed)[0], feature, draft.rope(positions))
    plain = attention.q_proj(x)
    with set_current_vllm_config(VllmConfig()):
        layer = get_rope(shape.head_dim, shape.max_position_embeddings, True, shape.rope, dtype=torch.float32)
        theirs, _ = layer.forward_native(positions, plain.clone(), plain.clone())
    assert torch.allclose(ours.flatten(1), theirs, atol=1e-4)


# ---- the rest --------------------------------------------------------------------------------------------------------


def test_a_window_is_the_configs():
    assert shape_of().sliding_window is None
    assert shape_of(sliding_window=64).sliding_window == 64


@pytest.mark.parametrize(
    ("target", "window"),
    [
        ({"sliding_window": 256}, 256),
        ({"sliding_window": 256, "layer_types": ["sliding_attention"] * 2}, 256),
        ({"sliding_window": 256, "layer_types": ["sliding_attention", "full_attention"]}, None),
        ({"sliding_window": None}, None),
        ({"sliding_window": 0}, None),
    ],
)
def test_a_window_that_every_layer_of_the_target_has_is_the_drafts_too(target, window):
    assert shape_of(target).sliding_window == window
    assert shape_of(target, sliding_window=32).sliding_window == 32


def test_an_embedding_of_its_own_starts_as_the_targets_and_is_trained():
    shape = shape_of(train_embedding=True)
    embed = torch.randn(shape.vocab_size, shape.hidden_size).bfloat16()
    draft = DraftModel(shape, embed)
    assert draft.state_dict()["embed_tokens.weight"].dtype == torch.float32
    assert torch.equal(draft.embed(torch.tensor([3, 5])), embed[[3, 5]].float())
    draft.embed(torch.tensor([3])).sum().backward()
    assert draft.embed_tokens.weight.grad.abs().sum(-1).nonzero().flatten().tolist() == [3]


def test_a_frozen_head_of_random_weights_is_refused():
    with pytest.raises(ValidationError, match=r"keeps the initial lm_head; draft.init must be target"):
        DraftConfig(train_lm_head=False, init="random")


def test_both_norms_of_the_auxiliary_states_are_refused():
    assert "Choose one norm" in refusal(norm_before_fc=True, fc_norm=True)
