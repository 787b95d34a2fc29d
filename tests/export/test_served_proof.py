"""What the engine's part of the proof judges: an engine is played by our own model, with every silent fault planted.

That the hooks see a real engine as it is, and that vLLM really takes such drafts without a word, is tests/pipeline's.
"""

import json

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.core.checkpoint import build_objective, final_checkpoint, read_checkpoint
from draftsmith.core.draft_probe import FirstDraft, draft_chain
from draftsmith.core.errors import StageFailed
from draftsmith.core.replay import chain_matches, walk
from draftsmith.core.run import RunFolder
from draftsmith.core.target import resolve_target
from draftsmith.core.target_weights import load_target_weights
from draftsmith.core.unroll import unroll
from draftsmith.export import served_proof, stage
from draftsmith.export.draft import from_checkpoint
from draftsmith.export.observe import Served
from draftsmith.export.served_proof import agreement, choose_turns, served_checks
from draftsmith.export.verify import model_of, verification
from draftsmith.hidden_state_capture.reader import HiddenStateStore

pytestmark = pytest.mark.usefixtures("one_thread")


class Engine:
    """Stands in for `observe`: drafts with our model; a test changes what it sees or says."""

    def __init__(self, config):
        run = RunFolder.of(config)
        self.config, self.target = config, resolve_target(config.target)
        self.store = HiddenStateStore(run.hidden_states)
        self.checkpoint = read_checkpoint(final_checkpoint(run, "test"))
        self.draft = from_checkpoint(self.checkpoint)
        self.turns = choose_turns(self.store, config.export.verify_prompts)
        self.states = lambda aux: aux.float()
        self.tensors = lambda tensors: tensors
        self.ids = lambda ids: ids
        self.replies = lambda reply: reply
        self.accepted = lambda accepted: accepted
        self.along = lambda aux: aux
        self.hooked = True

    def observe(self, config, target, folder, num_aux, prompts, limits):
        embed = load_target_weights(target).embed_VH
        model = model_of(self.draft.shape, self.tensors(dict(self.draft.tensors)), embed)
        ids, first = self.ids(self.draft.target_ids), []
        for turn in self.turns:
            states = self.states(turn.batch.aux_TAH[: len(turn.prompt)])
            tokens, logits = draft_chain(model, ids, states, [*turn.prompt, turn.reply[0]], config.export.verify_k)
            first.append(FirstDraft(states, turn.reply[0], tokens, logits if self.hooked else None))
        return first, [self._serve(turn) for turn in self.turns]

    def _serve(self, turn):
        objective = build_objective(self.target, self.draft.shape, self.draft.target_ids, "rms")
        objective.draft.load_state_dict(self.draft.tensors)
        reply = self.replies(turn.reply)
        batch = turn.batch if reply == turn.reply else self._other(turn, reply)
        [rounds] = walk(batch, chain_matches(objective, batch, 3)[0], 3)
        accepted = list(rounds.accepted)
        if accepted:
            accepted[-1] -= max(0, 1 + sum(n + 1 for n in accepted) - len(reply))
        return Served(reply, self.accepted(accepted), self.along(batch.aux_TAH[: batch.num_tokens - 1]))

    def _other(self, turn, reply):
        """Another reply to a turn's prompt, on states made up for it."""
        size, start = len(turn.prompt) + len(reply), len(turn.prompt)
        made_up = torch.randn(len(reply), *turn.batch.aux_TAH.shape[1:], generator=torch.Generator().manual_seed(1))
        states = torch.cat([turn.batch.aux_TAH[:start], made_up.to(turn.batch.aux_TAH.dtype)])
        ids, at = torch.tensor([*turn.prompt, *reply]), torch.arange(size)
        return type(turn.batch)(("x",), (0, size), ids, at >= start, at, states, states[start:, 0], at[start:])

    def judge(self):
        checks = served_checks(self.config, self.target, self.draft, "rms", None, self.turns)
        return {c.name.removeprefix("served "): c for c in checks}


@pytest.fixture
def engine(trained_run, monkeypatch):
    played = Engine(trained_run)
    monkeypatch.setattr(served_proof, "observe", played.observe)
    return played


def failed(checks):
    return {name for name, check in checks.items() if check.passed is False}


def test_the_same_draft_passes_exactly(engine):
    checks = engine.judge()
    assert list(checks) == ["states", "logits", "drafts", "acceptance"] and all(c.passed for c in checks.values())
    assert list(checks["states"].measured) == ["3", "4", "5"] and max(checks["states"].measured.values()) == 0
    assert checks["logits"].measured["relative_error"] < 1e-6
    assert checks["drafts"].measured["equal"] == checks["drafts"].measured["compared"] == [4, 4, 4]
    assert checks["acceptance"].measured["relative_gap"] == 0 and checks["acceptance"].measured["rounds"] > 20


def test_a_layer_off_by_one_is_named(engine):
    engine.states = lambda aux: torch.stack([aux[:, 0], aux[:, 2], aux[:, 2]], dim=1).float()
    checks = engine.judge()
    assert "states" in failed(checks) and "layer 4 is another one in the engine" in checks["states"].detail
    assert checks["logits"].passed  # on those states the engine computes the right thing


def scramble(name):
    def change(tensors):
        tensors[name] = torch.randn_like(tensors[name])
        return tensors

    return change


FAULTS = ["midlayer.hidden_norm.weight", "midlayer.self_attn.o_proj.weight", "lm_head.weight", "fc.weight"]


@pytest.mark.parametrize("name", FAULTS)
def test_a_tensor_that_the_engine_made_up_shows_in_its_logits(engine, name):
    engine.tensors = scramble(name)
    checks = engine.judge()
    assert "logits" in failed(checks) and checks["states"].passed
    assert checks["logits"].measured["relative_error"] > 0.05


@pytest.mark.parametrize(
    "ids", [lambda i: torch.arange(len(i)), lambda i: i + 1, lambda i: i + torch.arange(len(i))],
    ids=["no d2t", "one off", "absolute"],
)  # fmt: skip
def test_a_mapping_that_the_engine_reads_otherwise_shows_in_its_tokens(engine, ids):
    engine.ids = lambda i: ids(i).clamp_max(511)
    checks = engine.judge()
    assert "drafts" in failed(checks) and "the engine" in checks["drafts"].detail


def test_another_acceptance_than_replayed(engine):
    engine.accepted = lambda accepted: [n + 1 for n in accepted]
    checks = engine.judge()
    assert failed(checks) == {"acceptance"} and checks["acceptance"].measured["relative_gap"] > 0.5
    extra = iter([1, 1, 1, 0])
    engine.accepted = lambda accepted: [accepted[0] + next(extra), *accepted[1:]]
    assert not failed(engine.judge())  # drafts on the other side of a tie, where rounds are few


def test_other_replies_than_the_samples_are_replayed_on_the_engines_own_states(engine):
    """As where the samples were drawn at a temperature: the engine's replies are never theirs then."""
    common = most_drafted(engine)
    engine.replies = lambda reply: [common] * 12 + reply[:20]
    check = engine.judge()["acceptance"]
    assert check.passed and check.measured["relative_gap"] == 0 and check.measured["rounds"] > 20, check
    assert check.measured["identical_replies"] == 0 and "4 of 4 replies are not the samples'" in check.detail
    engine.accepted = lambda accepted: [n + 1 for n in accepted]
    assert engine.judge()["acceptance"].passed is False
    engine.accepted = lambda accepted: accepted
    engine.along = lambda aux: torch.randn_like(aux.float())
    assert engine.judge()["acceptance"].measured["relative_gap"] != 0  # the replay looks at these very states


def most_drafted(engine):
    """A token that the draft proposes, so that something of an invented reply is accepted."""
    first, _ = engine.observe(engine.config, engine.target, None, 3, [], [])
    return int(torch.cat([f.tokens_K for f in first]).mode().values)


def test_replies_without_a_round_are_not_judged(engine):
    engine.replies = lambda reply: reply[:1]
    check = engine.judge()["acceptance"]
    assert check.passed is None and check.measured is None and "1.000" not in check.detail
    said = verification(list(engine.judge().values()), "checked", {})["summary"]
    assert said.startswith("proven: states on vLLM, logits on vLLM, drafts on vLLM 12 of 12; acceptance on vLLM not")
    assert said.endswith("not judged: none of 4 replies has a round of drafts in it")


def test_logits_that_no_hook_saw_are_not_judged(engine):
    engine.hooked = False
    checks = engine.judge()
    assert checks["logits"].passed is None and checks["drafts"].passed


def test_the_chain_is_the_unroll_fed_its_own_tokens(engine):
    """Against training-time test on a document whose reply is what the chain drafts."""
    turn = engine.turns[0]
    embed = load_target_weights(engine.target).embed_VH
    model, ids = model_of(engine.draft.shape, engine.draft.tensors, embed), engine.draft.target_ids
    states = turn.batch.aux_TAH[: len(turn.prompt)]
    tokens, logits = draft_chain(model, ids, states, [*turn.prompt, turn.reply[0]], 3)
    document = torch.tensor([*turn.prompt, turn.reply[0], *tokens.tolist()])
    size = len(document)
    batch = type(turn.batch)(
        ("x",), (0, size), document, torch.arange(size) >= len(turn.prompt), torch.arange(size),
        torch.cat([states, torch.randn(4, *states.shape[1:]).to(states.dtype)]), turn.batch.last_MH[:0],
        turn.batch.last_rows_M[:0],
    )  # fmt: skip
    for step, expected in zip(unroll(model, batch, 3), logits, strict=True):
        row = (step.rows_R == len(turn.prompt) - 1).nonzero()[0, 0]
        assert torch.allclose(model.lm_head(step.hidden_RH[row]), expected, atol=1e-5)


def test_agreement_stops_at_the_first_other_token(engine):
    embed = load_target_weights(engine.target).embed_VH
    model, ids = model_of(engine.draft.shape, engine.draft.tensors, embed), engine.draft.target_ids
    first, _ = engine.observe(engine.config, engine.target, None, 3, [], [])
    first[0].tokens_K[1] = -1
    found = agreement(model, ids, [t.prompt for t in engine.turns], first)
    assert (found["equal"], found["compared"]) == (3 * 3 + 1, 3 * 3 + 2)


def test_a_served_proof_that_fails_keeps_the_export_apart(engine, changed, monkeypatch):
    config = changed(engine.config, export={"verify": True})
    engine.tensors = scramble("fc.weight")
    monkeypatch.setattr(stage, "_vllm_installed", lambda: True)
    with pytest.raises(StageFailed, match=r"served logits: the engine's draft logits are off by .*verification\.json"):
        stage.export(config)
    run = RunFolder.of(config)
    proof = json.loads((run.root / "export-failed/verification.json").read_text())
    assert proof["passed"] is False and proof["served"] == "checked" and not run.export.exists()
    assert "fc.weight" in load_file(run.root / "export-failed/model.safetensors")
    engine.tensors = lambda tensors: tensors
    stage.export(config)
    assert json.loads((run.export / "verification.json").read_text())["passed"] is True


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"verify": True, "layer_id_convention": "sglang"}, "not run: the layer ids are SGLang's"),
        ({"verify": False}, "not run: export.verify is false"),
    ],
)
def test_a_proof_that_is_not_made_is_said(engine, changed, options, why):
    config = changed(engine.config, export=options)
    stage.export(config)
    folder = RunFolder.of(config).export
    proof = json.loads((folder / "verification.json").read_text())
    assert proof["served"].startswith(why) and why in (folder / "README.md").read_text()
    assert proof["passed"] is (True if options["verify"] else None)


def test_a_machine_without_vllm_says_so(engine, changed, monkeypatch):
    config = changed(engine.config, export={"verify": True})
    monkeypatch.setattr(stage, "_vllm_installed", lambda: False)
    stage.export(config)
    proof = json.loads((RunFolder.of(config).export / "verification.json").read_text())
    assert proof["passed"] is True and proof["served"] == "not run: vLLM is not installed"
    said = "roven: tensors, logits; not compared on a server (not run: vLLM is not installed)"
    assert proof["summary"] == f"p{said}" and f"P{said}." in (RunFolder.of(config).export / "README.md").read_text()
