"""At every capture start: are these the target's own states, at the layers that we think?

1. lm_head(norm(last state)) must pick the engine's own greedy token (any target, any size). A state taken after the
   norm, one row off, or normed in another form cannot pass; the form that agrees is recorded.
2. Targets small enough for transformers: every layer's states against `hidden_states[k]`, per token. Norms over
   whole sequences hide errors (the first token's activation is huge), so the median over tokens is judged.
"""

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.core.config import Config, ProbeConfig
from draftsmith.core.engine import engine_dtype
from draftsmith.core.errors import StageFailed
from draftsmith.core.progress import say
from draftsmith.core.samples import Sample, iter_samples
from draftsmith.core.target import Target, weight_bytes
from draftsmith.core.target_weights import NORM_FORMS, NormForm, TargetWeights, load_target_weights

_DRAWN_FROM = 1024  # samples are read in file order, and there may be millions


@dataclass(frozen=True)
class Probe:
    """Findings.

    Attributes:
        norm_form: the form of the target's final norm that reproduces its tokens.
        eps: of that norm.
        argmax_agreement: share of probed positions where the engine's greedy token is picked.
        positions: how many were probed.
        state_errors: layer id -> median per-token relative error against transformers; None: not compared.
    """

    norm_form: NormForm
    eps: float
    argmax_agreement: float
    positions: int
    state_errors: dict[int, float] | None


def choose_probe(config: ProbeConfig, folder: Path) -> list[Sample]:
    """Beginnings of some of the first samples of `folder`, every token's last state kept."""
    first = list(itertools.islice(iter_samples(folder), _DRAWN_FROM))
    step = max(1, len(first) // config.samples)
    cut = [s.input_ids[: config.max_tokens] for s in first[::step][: config.samples]]
    # A span over everything from the second token on keeps the last state of every row but the final one.
    return [Sample(f"probe-{i}", ids, [(1, len(ids))], "probe", "length", "train") for i, ids in enumerate(cut)]


def judge_probe(
    config: Config, target: Target, layer_ids: list[int], files: list[Path], greedy: list[list[int]]
) -> Probe:
    """Compare captured probe states with the engine's greedy tokens and, where it fits, with transformers.

    Args:
        config: the run's config.
        target: resolved target.
        layer_ids: auxiliary layer ids, in column order.
        files: one safetensors file of store tensors per probed sample.
        greedy: per sample, the engine's greedy token after each of its tokens.

    Raises:
        StageFailed: they disagree; says what was measured.
    """
    bounds = config.capture.probe
    states = [load_file(file) for file in files]
    weights = load_target_weights(target)
    shares = {form: _agreement(weights, form, states, greedy) for form in NORM_FORMS}
    form = max(NORM_FORMS, key=lambda f: shares[f])
    positions = sum(len(s["last_rows"]) for s in states)
    if not shares[form] >= bounds.min_argmax_agreement:
        raise StageFailed(
            f"the captured last states are not the target's: lm_head(norm(state)) picks the engine's greedy token at "
            f"{shares[form]:.1%} of {positions} positions (capture.probe.min_argmax_agreement is "
            f"{bounds.min_argmax_agreement:.0%}; by norm form: {', '.join(f'{f} {s:.1%}' for f, s in shares.items())})."
        )
    errors = None
    if weight_bytes(target) <= bounds.transformers_max_bytes:
        errors = _state_errors(config, target, layer_ids, states)
        if wrong := {k: e for k, e in errors.items() if not e <= bounds.max_state_error}:
            raise StageFailed(
                f"captured states differ from transformers' at layer ids {sorted(wrong)}: median relative errors "
                f"{', '.join(f'{k}: {e:.3f}' for k, e in errors.items())} (capture.probe.max_state_error is "
                f"{bounds.max_state_error}). A wrong layer shows as 0.2 or more."
            )
    compared = (
        ""
        if errors is None
        else f"; against transformers: {', '.join(f'layer {k} {e:.4f}' for k, e in errors.items())}"
    )
    say(f"probe: greedy token at {shares[form]:.1%} of {positions} positions (norm {form}){compared}")
    return Probe(form, weights.eps, shares[form], positions, errors)


def _agreement(
    weights: TargetWeights, form: NormForm, states: list[dict[str, Tensor]], greedy: list[list[int]]
) -> float:
    head = weights.head(form)
    hits = total = 0
    for sample, tokens in zip(states, greedy, strict=True):
        picked = head(sample["last_states"]).argmax(-1)
        wanted = torch.tensor(tokens)[sample["last_rows"].long()]
        hits, total = hits + int((picked == wanted).sum()), total + len(wanted)
    return hits / max(1, total)


def _state_errors(
    config: Config, target: Target, layer_ids: list[int], states: list[dict[str, Tensor]]
) -> dict[int, float]:
    """Median per-token relative error of every captured layer, the last one under the id n."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(
        str(target.local_path),
        dtype=getattr(torch, engine_dtype(config.target)),
        trust_remote_code=config.target.trust_remote_code,
    ).eval()
    ids = [*layer_ids, target.num_layers]
    errors: dict[int, list[Tensor]] = {k: [] for k in ids}
    for sample in states:
        theirs = reference_states(model, sample["input_ids"].long(), ids)
        rows = sample["last_rows"].long()
        ours = {k: sample["aux_states"][:, i] for i, k in enumerate(layer_ids)} | {
            target.num_layers: sample["last_states"]
        }
        for k in ids:
            reference = theirs[k][rows] if k == target.num_layers else theirs[k]
            errors[k].append(relative_errors(ours[k], reference))
    return {k: float(torch.cat(parts).median()) for k, parts in errors.items()}


def reference_states(model: Any, ids_T: Tensor, layer_ids: list[int]) -> dict[int, Tensor]:
    """Transformers' states [T, H] by vLLM layer id; id n is read before the final norm."""
    before_norm: list[Tensor] = []
    decoder = model.get_decoder()
    hook = decoder.norm.register_forward_pre_hook(lambda _, args: before_norm.append(args[0]))
    try:
        with torch.no_grad():
            states = decoder(ids_T[None], output_hidden_states=True, use_cache=False).hidden_states
    finally:
        hook.remove()
    last = len(states) - 1
    return {k: (before_norm[0] if k == last else states[k])[0] for k in layer_ids}


def relative_errors(ours_TH: Tensor, theirs_TH: Tensor) -> Tensor:
    """float32 [T]: |ours - theirs| / |theirs| of every token."""
    theirs = theirs_TH.float()
    errors: Tensor = (ours_TH.float() - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp_min(1e-12)
    return errors
