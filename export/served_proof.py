"""The proof on a real engine: vLLM sees the states trained on, drafts what the trainer drafts, and accepts as replayed.

Acceptance is compared with replay along the replies that the engine writes at temperature 0: where a reply is the
sample's again on the states trained on, else (sampled replies, or a GPU's batches) on the engine's own.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.core.batch import Batch
from draftsmith.core.checkpoint import build_objective
from draftsmith.core.config import Config
from draftsmith.core.draft import DraftModel
from draftsmith.core.draft_probe import FirstDraft, draft_chain
from draftsmith.core.engine import has_cuda
from draftsmith.core.objective import Objective
from draftsmith.core.replay import chain_matches, walk
from draftsmith.core.target import Target
from draftsmith.export.draft import Draft
from draftsmith.export.observe import Served, observe
from draftsmith.export.verify import Check
from draftsmith.hidden_state_capture.reader import HiddenStateStore, StoredSample

_FEW_DRAFTS = 3


@dataclass(frozen=True)
class Turn:
    """A held-out prompt with the reply that the target gave when the samples were made, and their states."""

    prompt: list[int]
    reply: list[int]
    batch: Batch


def choose_turns(store: HiddenStateStore, count: int) -> list[Turn]:
    """The first turns of evenly chosen held-out samples (training samples where none are held out)."""
    numbers = store.numbers("eval") or store.numbers("train")
    step = max(1, len(numbers) // count)
    return [_first_turn(store[n]) for n in numbers[::step][:count]]


def agreement(
    draft: DraftModel, target_ids: Tensor, prompts: list[list[int]], first: list[FirstDraft]
) -> dict[str, Any]:
    """The engine's drafts against our model's, fed the engine's own states; up to the first token that differs.

    Returns:
        `relative_error` of the logits (Frobenius; None where no hook saw them) over `drafts` rows, and how many of
        `compared` tokens are `equal`.
    """
    off = size = 0.0
    drafts = equal = compared = 0
    for prompt, seen in zip(prompts, first, strict=True):
        ids, k = [*prompt, seen.next_id], len(seen.tokens_K)
        tokens, logits = draft_chain(draft, target_ids, seen.aux_TAH, ids, k)
        for j in range(k):
            if seen.logits_KV is not None:
                off += float((seen.logits_KV[j] - logits[j]).square().sum())
                size, drafts = size + float(logits[j].square().sum()), drafts + 1
            compared += 1
            if tokens[j] != seen.tokens_K[j]:
                break  # from here on they are fed different tokens
            equal += 1
    error = (off / size) ** 0.5 if size else None
    return {"relative_error": error, "drafts": drafts, "equal": equal, "compared": compared}


def served_checks(
    config: Config, target: Target, draft: Draft, norm_form: str, folder: Path, turns: list[Turn]
) -> list[Check]:
    """Compare vLLM, given the exported folder, with the trainer.

    Args:
        config: the run's config.
        target: resolved target.
        draft: as trained.
        norm_form: of the target's final norm.
        folder: the export.
        turns: held-out prompts and replies.

    Raises:
        StageFailed: the engine did not start or died.
    """
    limits = [min(config.data.sampling.max_tokens, config.data.max_length - len(t.prompt)) for t in turns]
    first, served = observe(config, target, folder, draft.shape.num_aux, [t.prompt for t in turns], limits)
    objective = build_objective(target, draft.shape, draft.target_ids, norm_form)
    objective.draft.load_state_dict({k: v.float() for k, v in draft.tensors.items()})
    device = torch.device("cuda" if has_cuda() else "cpu")
    objective.to(device).eval()
    return [
        _states_check(config, draft, turns, first),
        _served_logits_check(config, objective, draft, turns, first),
        _tokens_check(config, objective, draft, turns, first),
        _acceptance_check(config, objective, turns, served, device),
    ]


def _first_turn(sample: StoredSample) -> Turn:
    mask = sample.loss_mask_T.bool().tolist()
    start = mask.index(True)
    end = next((t for t in range(start, len(mask)) if not mask[t]), len(mask))
    ids, kept = sample.input_ids_T[:end].long(), sample.last_rows_M < end
    batch = Batch(
        sample_ids=(sample.sample_id,),
        offsets=(0, end),
        input_ids_T=ids,
        loss_mask_T=sample.loss_mask_T[:end].bool(),
        positions_T=torch.arange(end),
        aux_TAH=sample.aux_states_TAH[:end],
        last_MH=sample.last_states_MH[kept],
        last_rows_M=sample.last_rows_M[kept].long(),
    )
    return Turn(ids[:start].tolist(), ids[start:].tolist(), batch)


def _states_check(config: Config, draft: Draft, turns: list[Turn], first: list[FirstDraft]) -> Check:
    """Does the engine give the drafter the layers that it was trained on?"""
    bound = config.capture.probe.max_state_error
    errors = torch.cat(
        [_errors(f.aux_TAH, t.batch.aux_TAH[: len(t.prompt)]) for f, t in zip(first, turns, strict=True)]
    )
    medians = dict(zip(map(str, draft.layer_ids), errors.median(0).values.tolist(), strict=True))
    wrong = [k for k, e in medians.items() if not e <= bound]
    said = ", ".join(f"layer {k}: {e:.4f}" for k, e in medians.items())
    detail = f"the drafter's input states against those trained on: {said}"
    if wrong:
        detail += f"; layer {', '.join(wrong)} is another one in the engine (0.2 or more is a neighbour)"
    return Check("served states", not wrong, medians, bound, detail)


def _errors(ours_TAH: Tensor, theirs_TAH: Tensor) -> Tensor:
    theirs = theirs_TAH.float()
    errors: Tensor = (ours_TAH.float() - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp_min(1e-12)
    return errors


def _served_logits_check(
    config: Config, objective: Objective, draft: Draft, turns: list[Turn], first: list[FirstDraft]
) -> Check:
    """On the engine's own states, does its draft compute the trainer's logits?"""
    bound = config.export.max_served_logit_error
    measured = agreement(objective.draft, draft.target_ids, [t.prompt for t in turns], first)
    error = measured["relative_error"]
    if error is None:
        why = "the engine computed its logits where no hook sees them"
        return Check("served logits", None, None, bound, why, why)
    said = f"the engine's draft logits are off by {error:.4f} over {measured['drafts']} drafts"
    return Check("served logits", error <= bound, measured, bound, f"{said} (export.max_served_logit_error)")


def _tokens_check(
    config: Config, objective: Objective, draft: Draft, turns: list[Turn], first: list[FirstDraft]
) -> Check:
    """From the states trained on, does the trainer draft the engine's tokens?"""
    k, tie = config.export.verify_k, config.export.max_tie
    equal, compared, ties = [0] * k, [0] * k, 0
    misses = []
    for i, (turn, seen) in enumerate(zip(turns, first, strict=True)):
        # Float8 is too coarse to tell a wrong token from a near-tie: the trainer gets the engine's states then.
        stored = config.capture.storage != "fp8"
        states = turn.batch.aux_TAH[: len(turn.prompt)] if stored else seen.aux_TAH
        ids = [*turn.prompt, seen.next_id]
        tokens, logits = draft_chain(objective.draft, draft.target_ids, states, ids, k)
        for j in range(min(k, len(seen.tokens_K))):
            compared[j] += 1
            theirs, ours = int(seen.tokens_K[j]), int(tokens[j])
            if theirs == ours:
                equal[j] += 1
                continue
            at = (draft.target_ids == theirs).nonzero()
            if len(at) and float(logits[j].max() - logits[j][at[0, 0]]) <= tie:
                ties += 1
            else:
                misses.append(f"prompt {i}, draft {j + 1}: the engine {theirs}, the trainer {ours}")
            break
    measured = {"equal": equal, "compared": compared, "ties": ties, "different": len(misses)}
    shown = ", ".join(f"{e} of {c}" for e, c in zip(equal, compared, strict=True))
    detail = f"drafts equal to the trainer's, by position: {shown}; {ties} near-ties"
    return Check(
        "served drafts", not misses, measured, {"different": 0, "max_tie": tie}, "; ".join([detail, *misses[:3]])
    )


@torch.no_grad()
def _acceptance_check(
    config: Config, objective: Objective, turns: list[Turn], served: list[Served], device: torch.device
) -> Check:
    """Served acceptance against replay, along the replies that the engine wrote."""
    bound, k = config.export.max_acceptance_gap, config.export.verify_k
    ours, theirs = [0, 0], [0, 0]
    others = 0
    for turn, seen in zip(turns, served, strict=True):
        batch, others = (turn.batch, others) if seen.reply == turn.reply else (_written(turn, seen), others + 1)
        leading, _ = chain_matches(objective, batch.to(device), k)
        [replayed] = walk(batch, leading, k)
        # What the engine emits ends with the reply: a bonus token after its last accepted draft is cut off.
        cut = max(0, 1 + sum(n + 1 for n in replayed.accepted) - len(seen.reply))
        ours = [ours[0] + sum(replayed.accepted) - cut, ours[1] + len(replayed.accepted)]
        theirs = [theirs[0] + sum(seen.accepted), theirs[1] + len(seen.accepted)]
    replay_length, served_length = (1 + a / max(1, n) for a, n in (ours, theirs))
    gap = served_length / replay_length - 1
    measured = {"k": k, "served": served_length, "replayed": replay_length, "relative_gap": gap, "rounds": theirs[1],
                "prompts": len(turns), "identical_replies": len(turns) - others}  # fmt: skip
    shown = f"{served_length:.3f} served, {replay_length:.3f} replayed over {theirs[1]} rounds, K = {k}"
    if not theirs[1]:
        why = f"none of {len(turns)} replies has a round of drafts in it"
        return Check("served acceptance", None, None, bound, f"not judged: {why}", why)
    if others:
        shown += f"; {others} of {len(turns)} replies are not the samples', and replayed on the engine's own states"
    # Where rounds are few, one draft that falls to the other side of a tie is more than the bound.
    within = abs(gap) <= bound or abs(theirs[0] - ours[0]) <= _FEW_DRAFTS
    return Check("served acceptance", within, measured, bound, f"acceptance length {shown}")


def _written(turn: Turn, seen: Served) -> Batch:
    """A prompt with the engine's own reply, on the engine's own states."""
    assert seen.aux_TAH is not None
    ids = torch.tensor([*turn.prompt, *seen.reply])
    size, start = len(ids), len(turn.prompt)
    aux_TAH = torch.cat([seen.aux_TAH, seen.aux_TAH[-1:]])  # nothing is drafted from the last token
    rows = torch.arange(start, size)
    # Last states decide the losses only, which are not looked at.
    last_MH = aux_TAH.new_zeros(len(rows), aux_TAH.shape[-1])
    batch_ids = turn.batch.sample_ids
    return Batch(batch_ids, (0, size), ids, torch.arange(size) >= start, torch.arange(size), aux_TAH, last_MH, rows)
