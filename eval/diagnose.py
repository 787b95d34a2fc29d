"""Where an engine's draft differs from the trained one: part by part on one prompt, the first that differs named.

Each part of the trained draft is given what the engine's own part before it made, so that a fault shows where it is and
nowhere else. The first comparison is of the target's states with those that the draft was trained on.
"""

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from safetensors import safe_open
from torch import Tensor

from draftsmith.core.checkpoint import Checkpoint, chosen_checkpoint, read_checkpoint
from draftsmith.core.config import Config
from draftsmith.core.draft import DraftModel, rotate
from draftsmith.core.engine import require_vllm
from draftsmith.core.errors import UserError
from draftsmith.core.progress import console, say
from draftsmith.core.run import RunFolder
from draftsmith.core.target import Target, resolve_target
from draftsmith.core.target_weights import load_target_weights
from draftsmith.core.unroll import attend
from draftsmith.eval.engine_parts import engine_parts
from draftsmith.hidden_state_capture.reader import HiddenStateStore, StoredSample


@dataclass(frozen=True)
class Trained:
    """The draft as trained: the model in float32, int64 [Vd] target ids, vLLM layer ids."""

    draft: DraftModel
    target_ids: Tensor
    layer_ids: list[int]


def diagnose_run(config: Config, draft: Path | None) -> bool:
    """Diagnose a run's export (or another folder that should be the same draft), and print the findings.

    Returns:
        Whether everything agrees.

    Raises:
        UserError: an earlier stage has not been run, or there is no such folder.
    """
    require_vllm("eval diagnose")
    run, target = RunFolder.of(config), resolve_target(config.target)
    folder = draft or run.export
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder}: no draft (no config.json).", "Run `draftsmith export`, or give another folder.")
    checkpoint = read_checkpoint(chosen_checkpoint(run, config.export.checkpoint, "eval diagnose"))
    sample = longest_sample(HiddenStateStore(run.hidden_states, "eval diagnose"))
    found = diagnose(config, target, checkpoint, folder, sample)
    table = Table(title=f"{folder}: trainer and engine, part by part", title_justify="left")
    for column in ("part", "relative error", "bound", "agrees", ""):
        table.add_column(column, justify="left" if column in ("part", "") else "right")
    for f in found["findings"]:
        numbers = ["" if f[key] is None else f"{f[key]:.5f}" for key in ("error", "bound")]
        table.add_row(f["part"], *numbers, "yes" if f["agrees"] else "[bold red]no[/]", f["detail"])
    console.print(table)
    say(f"first difference: {found['first_difference'] or 'none'}")
    return found["first_difference"] is None


def diagnose(
    config: Config, target: Target, checkpoint: Checkpoint, folder: Path, sample: StoredSample
) -> dict[str, Any]:
    """Serve one captured sample with a draft folder, and compare it with the trained draft.

    Args:
        config: the run's config.
        target: resolved target.
        checkpoint: the draft as trained.
        folder: the draft as served.
        sample: its tokens are the prompt, and its states what the engine's are compared with.

    Returns:
        `diagnosis` of the report: `first_difference` (None: none) and `findings`, in the order of the computation.

    Raises:
        StageFailed: the engine did not start with it.
    """
    model = DraftModel(checkpoint.shape, load_target_weights(target).embed_VH)
    model.load_state_dict(checkpoint.tensors)
    trained = Trained(model.eval(), checkpoint.target_ids, checkpoint.layer_ids)
    ids: list[int] = sample.input_ids_T.tolist()
    if (offsets := _offsets_on_disk(folder)) is not None and _outside(offsets, checkpoint.shape.vocab_size):
        # An engine would die of these, or write past its logits.
        findings = [_layer_ids(trained, folder), _d2t(trained, {"d2t": offsets})]
        return {"first_difference": "d2t", "findings": findings}
    with tempfile.TemporaryDirectory(prefix="draftsmith-") as scratch:
        seen = engine_parts(config, target, folder, ids, Path(scratch) / "parts.safetensors")
    findings = list(_findings(config, trained, folder, sample, seen))
    first = next((f["part"] for f in findings if not f["agrees"]), None)
    return {"first_difference": first, "findings": findings}


def longest_sample(store: HiddenStateStore) -> StoredSample:
    """The held-out sample of most tokens: far positions tell rotary embeddings apart."""
    numbers = store.numbers("eval") or store.numbers("train")
    return store[max(numbers, key=lambda n: int(store.index[n]["length"]))]


def _findings(
    config: Config, trained: Trained, folder: Path, sample: StoredSample, seen: dict[str, Tensor]
) -> Iterator[dict[str, Any]]:
    yield _layer_ids(trained, folder)
    yield _states(config, trained, sample, seen)
    bound = config.eval.max_part_error
    with torch.no_grad():
        for part, ours, theirs, detail in _parts(trained.draft, sample, seen):
            if ours.shape != theirs.shape:  # a shard of a tensor-parallel engine
                continue
            error = _relative(theirs, ours)
            yield _finding(part, error, bound, detail)
    flag = bool(seen["norm_output"])
    same = flag == trained.draft.shape.norm_output
    yield _exact("norm_output", same, "" if same else f"{flag} in the engine, {not flag} in training")
    yield _d2t(trained, seen)


def _layer_ids(trained: Trained, folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    named = config.get("eagle_aux_hidden_state_layer_ids")
    same = named == trained.layer_ids
    detail = (
        ""
        if same
        else f"config.json has {named or 'none: vLLM takes 2, n // 2, n - 3'}, trained on {trained.layer_ids}"
    )
    return _exact("layer ids", same, detail)


def _states(config: Config, trained: Trained, sample: StoredSample, seen: dict[str, Tensor]) -> dict[str, Any]:
    """The states that the engine gives the draft, against those on disk; the median over tokens hides no layer."""
    theirs = seen["states"].float().view(len(sample.input_ids_T), len(trained.layer_ids), -1)
    ours = sample.aux_states_TAH.float()
    errors_A = ((theirs - ours).norm(dim=-1) / ours.norm(dim=-1).clamp_min(1e-12)).median(0).values
    wrong = [
        i for i, e in zip(trained.layer_ids, errors_A.tolist(), strict=True) if e > config.capture.probe.max_state_error
    ]
    detail = f"the engine's states are not those trained on at layers {wrong}" if wrong else ""
    return _finding("auxiliary states", float(errors_A.max()), config.capture.probe.max_state_error, detail)


def _parts(
    draft: DraftModel, sample: StoredSample, seen: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor, Tensor, str]]:
    """(part, ours, the engine's, what it depends on): ours from the engine's own parts before it."""
    engine = {name: t.float() for name, t in seen.items() if t.is_floating_point()}
    layer, attention, shape = draft.midlayer, draft.midlayer.self_attn, draft.shape
    size = len(sample.input_ids_T)
    yield "fc", draft.fuse(engine["states"].view(size, shape.num_aux, -1)), engine["fc"], "fc, input_norm, fc_norm"
    tokens = torch.cat([sample.input_ids_T[1:].long(), seen["next_id"].long()])
    embedded = layer.input_layernorm(draft.embed(tokens))
    yield "input_layernorm", embedded, engine["input_layernorm"], "embedding, input_layernorm"
    normed = layer.hidden_norm(engine["fc"])
    yield "hidden_norm", normed, engine["hidden_norm"], "hidden_norm"
    both = torch.cat([engine["input_layernorm"], engine["hidden_norm"]], dim=-1)
    qkv = torch.cat([p(both) for p in (attention.q_proj, attention.k_proj, attention.v_proj)], dim=-1)
    yield "qkv", qkv, engine["qkv"], "q_proj, k_proj, v_proj"
    if qkv.shape == engine["qkv"].shape:
        yield from _after_qkv(draft, engine, torch.arange(size))
    residual = (engine["hidden_norm"] if shape.norm_before_residual else engine["fc"]) + engine["attention"]
    mlp = layer.mlp(layer.post_attention_layernorm(residual))
    yield "mlp", mlp, engine["mlp"], "norm_before_residual, post_attention_layernorm, gate_proj, up_proj, down_proj"
    yield "norm", draft.norm(residual + engine["mlp"]), engine["norm"], "norm"
    logits = draft.lm_head(engine["norm"][-1:])
    yield "lm_head", logits, engine["lm_head"][:1, : logits.shape[-1]], f"lm_head, in {seen['lm_head'].dtype}"


def _after_qkv(
    draft: DraftModel, engine: dict[str, Tensor], positions: Tensor
) -> Iterator[tuple[str, Tensor, Tensor, str]]:
    shape, size = draft.shape, len(positions)
    widths = [n * shape.head_dim for n in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)]
    q, k, v = (t.view(size, -1, shape.head_dim) for t in torch.split(engine["qkv"], widths, dim=-1))
    rope = draft.rope(positions)
    rotated = torch.cat([rotate(t, rope).flatten(1) for t in (q, k)], dim=-1)
    yield "rope", rotated, engine["rotary"], "rope_theta, rope_scaling, rotary width, max_position_embeddings"
    q, k = (t.view(size, -1, shape.head_dim) for t in torch.split(engine["rotary"], widths[:2], dim=-1))
    mixed = attend(q, k, v, [], positions, (0, size), shape.sliding_window)
    ours = draft.midlayer.self_attn.o_proj(mixed.flatten(-2))
    yield "attention", ours, engine["attention"], "sliding window, o_proj"


def _offsets_on_disk(folder: Path) -> Tensor | None:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            if "d2t" in set(tensors.keys()):
                offsets: Tensor = tensors.get_tensor("d2t")
                return offsets.long()
    return None


def _outside(offsets: Tensor, vocab_size: int) -> bool:
    ids = offsets + torch.arange(len(offsets))
    return bool((ids < 0).any() or (ids >= vocab_size).any())


def _d2t(trained: Trained, seen: dict[str, Tensor]) -> dict[str, Any]:
    offsets = seen.get("d2t")
    ids = torch.arange(len(trained.target_ids))
    theirs = ids if offsets is None else ids + offsets
    if torch.equal(theirs, trained.target_ids):
        return _exact("d2t", True, "")
    if offsets is not None and not offsets.any():
        return _exact("d2t", False, "missing: every offset is zero in the engine")
    if offsets is not None and torch.equal(offsets, trained.target_ids):
        return _exact("d2t", False, "absolute target ids where vLLM reads offsets")
    return _exact(
        "d2t", False, f"{int((theirs != trained.target_ids).sum())} of {len(ids)} tokens are mapped elsewhere"
    )


def _relative(theirs: Tensor, ours: Tensor) -> float:
    return float((theirs - ours).norm() / ours.norm().clamp_min(1e-12))


def _finding(part: str, error: float, bound: float, detail: str) -> dict[str, Any]:
    # NaN agrees with nothing.
    return {"part": part, "error": min(error, 1e9) if error == error else 1e9, "bound": bound, "agrees": error <= bound,
            "detail": detail}  # fmt: skip


def _exact(part: str, same: bool, detail: str) -> dict[str, Any]:
    return {"part": part, "error": None, "bound": None, "agrees": same, "detail": detail}
