"""The proof on a real engine: vLLM sees the states trained on, drafts what the trainer drafts, and accepts as replayed.

One engine start. First every prompt alone: the states that the drafter was given, its logits, its tokens. Then all of
them together, as a server would: how many drafts each round accepted, compared with replay on the same replies.
"""

import itertools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.core.batch import Batch
from draftsmith.core.checkpoint import build_objective
from draftsmith.core.config import Config
from draftsmith.core.draft import DraftModel
from draftsmith.core.draft_probe import WORKER, FirstDraft, draft_chain, probe_first_drafts, read_first_drafts
from draftsmith.core.engine import has_cuda, in_engine_process, vllm_engine
from draftsmith.core.objective import Objective
from draftsmith.core.replay import chain_matches, walk
from draftsmith.core.target import Target
from draftsmith.export.draft import Draft
from draftsmith.export.verify import Check
from draftsmith.hidden_state_capture.reader import HiddenStateStore, StoredSample

_FEW_DRAFTS = 3


@dataclass(frozen=True)
class Turn:
    """A held-out prompt with the reply that the target gave when the samples were made, and their states."""

    prompt: list[int]
    reply: list[int]
    batch: Batch


@dataclass(frozen=True)
class Served:
    """What the engine did with a prompt: its reply, and the accepted drafts of every round."""

    reply: list[int]
    accepted: list[int]


def choose_turns(store: HiddenStateStore, count: int) -> list[Turn]:
    """The first turns of evenly chosen held-out samples (training samples where none are held out)."""
    numbers = store.numbers("eval") or store.numbers("train")
    step = max(1, len(numbers) // count)
    return [_first_turn(store[n]) for n in numbers[::step][:count]]


def observe(
    config: Config, target: Target, folder: Path, num_aux: int, prompts: list[list[int]], limits: list[int]
) -> tuple[list[FirstDraft], list[Served]]:
    """Start vLLM with a draft folder, in a process of its own, and look at its drafts.

    Args:
        config: the run's config.
        target: resolved target.
        folder: the draft.
        num_aux: auxiliary states that it reads.
        prompts: token ids.
        limits: longest reply to each; none: nothing is served beyond the first round.

    Raises:
        StageFailed: the engine did not start or died.
    """
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".tmp-probe-") as scratch:
        next_ids, served = in_engine_process(_observe, config, target, prompts, limits, folder.resolve(), Path(scratch))
        return read_first_drafts(Path(scratch), next_ids, num_aux), served


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


# ---- in the engine's process ---------------------------------------------------------------------------------------


def _observe(
    config: Config, target: Target, prompts: list[list[int]], limits: list[int], folder: Path, scratch: Path
) -> tuple[list[int], list[Served]]:
    k = config.export.verify_k
    args: dict[str, Any] = {
        "max_model_len": config.data.max_length + k + 1,
        "max_num_seqs": config.export.verify_concurrency,
        # A prompt in one step, so that the probe sees all of it at once.
        "max_num_batched_tokens": max(8192, config.data.max_length + k + 1),
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "seed": config.run.seed,
        "worker_extension_cls": WORKER,
        "speculative_config": {"method": "eagle3", "model": str(folder), "num_speculative_tokens": k},
    }
    with vllm_engine(config.target, target, **args) as llm:
        return probe_first_drafts(llm, prompts, scratch), _serve(llm, prompts, limits) if limits else []


def _serve(llm: Any, prompts: list[list[int]], limits: list[int]) -> list[Served]:
    """Reply to all prompts at temperature 0; every engine step gives a request 1 + accepted tokens."""
    from vllm import SamplingParams, TokensPrompt

    engine, sizes = llm.llm_engine, [[0] for _ in prompts]
    replies: list[list[int]] = [[] for _ in prompts]
    for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        params = SamplingParams(temperature=0.0, max_tokens=limit, detokenize=False)
        engine.add_request(f"served-{i}", TokensPrompt(prompt_token_ids=prompt), params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            i = int(output.request_id.removeprefix("served-"))
            replies[i] = [int(t) for t in output.outputs[0].token_ids]
            sizes[i].append(len(replies[i]))
    served = []
    for reply, totals in zip(replies, sizes, strict=True):
        steps = [b - a for a, b in itertools.pairwise(totals) if b > a]
        served.append(Served(reply, [n - 1 for n in steps[1:]]))  # the first token comes from the prefill
    return served


# ---- the judgement -------------------------------------------------------------------------------------------------


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
        return Check("served logits", None, None, bound, "the engine computed its logits where no hook sees them")
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
        states, ids = turn.batch.aux_TAH[: len(turn.prompt)], [*turn.prompt, seen.next_id]
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
    """Served acceptance against replay, over the prompts that got the same reply again."""
    bound, k = config.export.max_acceptance_gap, config.export.verify_k
    ours, theirs = [0, 0], [0, 0]
    same = [i for i, (t, s) in enumerate(zip(turns, served, strict=True)) if s.reply == t.reply]
    for i in same:
        batch = turns[i].batch
        leading, _ = chain_matches(objective, batch.to(device), k)
        [replayed] = walk(batch, leading, k)
        # What the engine emits ends with the reply: a bonus token after its last accepted draft is cut off.
        cut = max(0, 1 + sum(n + 1 for n in replayed.accepted) - len(turns[i].reply))
        ours = [ours[0] + sum(replayed.accepted) - cut, ours[1] + len(replayed.accepted)]
        theirs = [theirs[0] + sum(served[i].accepted), theirs[1] + len(served[i].accepted)]
    replay_length, served_length = (1 + a / max(1, n) for a, n in (ours, theirs))
    gap = served_length / replay_length - 1
    measured = {"k": k, "served": served_length, "replayed": replay_length, "relative_gap": gap, "rounds": theirs[1],
                "prompts": len(turns), "identical_replies": len(same)}  # fmt: skip
    shown = f"{served_length:.3f} served, {replay_length:.3f} replayed over {theirs[1]} rounds, K = {k}"
    if 2 * len(same) < len(turns):
        # Sampled replies, or a GPU's batches: replay knows the old replies only.
        reason = f"only {len(same)} of {len(turns)} replies are the samples' again; not judged ({shown})"
        return Check("served acceptance", None, measured, bound, reason)
    # Where rounds are few, one draft that falls to the other side of a tie is more than the bound.
    within = abs(gap) <= bound or abs(theirs[0] - ours[0]) <= _FEW_DRAFTS
    return Check("served acceptance", within, measured, bound, f"acceptance length {shown}")
