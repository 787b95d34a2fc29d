"""The four tensors of the target that a draft is trained beside: embedding, final norm, lm_head; read from safetensors.

P = softmax(lm_head(norm(last state))) is the target's distribution. Families differ in their final norm, so its form
is found by the capture's probe against the engine's own tokens and recorded in the store's manifest.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftsmith.core.errors import UserError
from draftsmith.core.target import Target

NormForm = Literal["rms", "rms_plus_one"]
NORM_FORMS: tuple[NormForm, ...] = ("rms", "rms_plus_one")
_EMBED = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "tok_embeddings.weight")
_NORM = (
    "model.norm.weight",
    "language_model.norm.weight",
    "final_layernorm.weight",
    "model.final_norm.weight",
    "norm_f.weight",
)
_HEAD = ("lm_head.weight", "output.weight", "embed_out.weight")
_LSE_ROWS = 512
_UNSUPPORTED = {"final_logit_softcapping": None, "logits_scaling": 1.0, "logit_scale": 1.0}


@dataclass(frozen=True)
class TargetWeights:
    """Tensors in the checkpoint's dtype.

    Attributes:
        embed_VH: token embedding.
        norm_H: weight of the final norm.
        head_VH: lm_head rows (the embedding where it is tied).
        eps: of the final norm.
    """

    embed_VH: Tensor
    norm_H: Tensor
    head_VH: Tensor
    eps: float

    def head(self, form: NormForm, token_ids: Tensor | None = None, with_full: bool = False) -> "TargetHead":
        """The target's output head.

        Args:
            form: of the final norm.
            token_ids: tokens that it gives logits of; None: all.
            with_full: keep all rows too, for `TargetHead.full_lse`.
        """
        weight = self.head_VH if token_ids is None else self.head_VH[token_ids]
        reduced = len(weight) < len(self.head_VH)
        return TargetHead(weight, self.norm_H, form, self.eps, self.head_VH if with_full and reduced else None)


class TargetHead(torch.nn.Module):
    """lm_head(norm(.)) of the target, over a part of its vocabulary; frozen."""

    def __init__(
        self, head_VH: Tensor, norm_H: Tensor, form: NormForm, eps: float, full_VH: Tensor | None = None
    ) -> None:
        super().__init__()
        self.form, self.eps = form, eps
        self.register_buffer("head_VH", head_VH, persistent=False)
        self.register_buffer("norm_H", norm_H, persistent=False)
        self.full_VH: Tensor | None
        self.register_buffer("full_VH", full_VH, persistent=False)

    def forward(self, last_MH: Tensor) -> Tensor:
        """Logits [M, V] of pre-norm states [M, H]; the norm runs in float32."""
        return self._logits(last_MH, self.get_buffer("head_VH"))

    def _logits(self, last_MH: Tensor, head_VH: Tensor) -> Tensor:
        # In the head's dtype, but in float32 on a CPU, where half-precision products are emulated and six times slower;
        # one that has them is asked for them by autocast.
        dtype = torch.float32 if last_MH.device.type == "cpu" else head_VH.dtype
        normed_MH = final_norm(last_MH, self.get_buffer("norm_H"), self.form, self.eps)
        logits: Tensor = normed_MH.to(dtype) @ head_VH.to(dtype).T
        return logits

    @torch.no_grad()
    def full_lse(self, last_MH: Tensor, temperature: float) -> Tensor | None:
        """float32 [M]: log-sum-exp of logits / temperature over the full vocabulary.

        None where the head was made without the rows outside its part: it has them all, or nobody asks.
        """
        if self.full_VH is None:
            return None
        # In slices: all logits of a batch over a full vocabulary would not fit.
        slices = torch.split(last_MH, _LSE_ROWS)
        return torch.cat([(self._logits(x, self.full_VH).float() / temperature).logsumexp(-1) for x in slices])


def final_norm(x_MH: Tensor, weight_H: Tensor, form: NormForm, eps: float) -> Tensor:
    """RMSNorm in float32 with weight w (`rms`) or 1 + w (`rms_plus_one`, the Gemma form)."""
    x = x_MH.float()
    weight = weight_H.float() + (1.0 if form == "rms_plus_one" else 0.0)
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def load_target_weights(target: Target) -> TargetWeights:
    """Read embedding, final norm and lm_head from the target's safetensors.

    Raises:
        UserError: a tensor is missing, or the target scales its logits in a way that is not supported.
    """
    for key, neutral in _UNSUPPORTED.items():
        if getattr(target.hf_config, key, neutral) not in (neutral, None):
            raise UserError(
                f"{target.path}: its config sets `{key}`, and draftsmith does not model logits changed after lm_head.",
                "This target cannot be used yet.",
            )
    try:
        names = _tensor_files(target.local_path)
        embed = _load(target, names, _EMBED, "token embedding")
        norm = _load(target, names, _NORM, "final norm")
        tied = bool(getattr(target.hf_config, "tie_word_embeddings", False)) and not _find(names, _HEAD)
        head = embed if tied else _load(target, names, _HEAD, "lm_head")
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{target.local_path}: {error}.", "The folder must hold the target's safetensors files, whole."
        ) from None
    eps = next(
        (float(e) for k in ("rms_norm_eps", "layer_norm_eps") if (e := getattr(target.hf_config, k, None))),
        1e-6,
    )
    # The vocabulary's rows only: some checkpoints pad the matrices.
    return TargetWeights(embed[: target.vocab_size], norm, head[: target.vocab_size], eps)


def weight_names(target: Target) -> tuple[str, str, str]:
    """What embedding, final norm and lm_head are called in the target's files; a tied head by the embedding's name.

    Raises:
        UserError: one of them is missing.
    """
    try:
        names = _tensor_files(target.local_path)
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise UserError(
            f"{target.local_path}: {error}.", "The folder must hold the target's safetensors files, whole."
        ) from None
    embed, norm, head = (
        _named(target, names, endings, what)
        for endings, what in ((_EMBED, "token embedding"), (_NORM, "final norm"), (_HEAD, ""))
    )
    if not head and not getattr(target.hf_config, "tie_word_embeddings", False):
        _named(target, names, _HEAD, "lm_head")
    return embed, norm, head or embed


def _named(target: Target, names: dict[str, Path], endings: tuple[str, ...], what: str) -> str:
    """A tensor's name; where it is missing, empty, or an error if `what` says what it is."""
    name = _find(names, endings)
    if name is None and what:
        raise UserError(
            f"{target.local_path}: no tensor for the {what} (looked for names ending in {', '.join(endings)}).",
            "The folder must hold the target's safetensors files, whole.",
        )
    return name or ""


def _tensor_files(folder: Path) -> dict[str, Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: folder / file for name, file in weight_map.items()}
    names: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt") as tensors:
                names |= dict.fromkeys(tensors.keys(), file)
        except SafetensorError as error:
            raise SafetensorError(f"{file.name}: {error}") from None
    return names


def _find(names: dict[str, Path], endings: tuple[str, ...]) -> str | None:
    return next((n for e in endings for n in sorted(names, key=len) if n == e or n.endswith(f".{e}")), None)


def _load(target: Target, names: dict[str, Path], endings: tuple[str, ...], what: str) -> Tensor:
    name = _named(target, names, endings, what)
    with safe_open(names[name], "pt") as file:
        tensor: Tensor = file.get_tensor(name)
    if tensor.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise UserError(
            f"{target.local_path}: `{name}` is {tensor.dtype}.",
            "The head and embedding must not be quantised.",
        )
    return tensor
