"""The target model as every stage sees it: where it lies, its shape, its layer ids, its fingerprint.

Layer ids follow vLLM: id k is the residual stream after k layers (transformers' `hidden_states[k]`), 0 is the
embedding, and id n (the number of layers) is the last state *before* the final norm.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.core import embedded
from draftsmith.core.atomic import sha256_file
from draftsmith.core.config import CaptureConfig, TargetConfig
from draftsmith.core.errors import UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "merges.txt")
# Engine arguments that change what the target computes or says; the others are about memory and speed.
_DECISIVE_ENGINE_ARGS = {
    "quantization",
    "hf_overrides",
    "kv_cache_dtype",
    "generation_config",
    "override_generation_config",
}


@dataclass(frozen=True)
class Target:
    """A resolved target.

    Attributes:
        path: as the config names it.
        local_path: folder of the checkpoint.
        revision: resolved hub commit; None for a local folder.
        num_layers, hidden_size, vocab_size: of the language model (text part).
        hf_config: transformers' config of the language model.
    """

    path: str
    local_path: Path
    revision: str | None
    num_layers: int
    hidden_size: int
    vocab_size: int
    hf_config: "PretrainedConfig"

    def fingerprint(self, config: TargetConfig) -> dict[str, Any]:
        """What must be equal for states and samples of this target to be interchangeable."""
        tokenizer = {f: sha256_file(self.local_path / f) for f in _TOKENIZER_FILES if (self.local_path / f).is_file()}
        decisive = {k: v for k, v in sorted(config.engine_args.items()) if k in _DECISIVE_ENGINE_ARGS}
        return {
            "revision": self.revision,
            "dtype": config.dtype,
            "config_sha256": sha256_file(self.local_path / "config.json"),
            "weights_sha256": _weights_hash(self.local_path),
            "generation_config_sha256": _sha256_or_none(self.local_path / "generation_config.json"),
            "engine_args": decisive,
            "tokenizer": tokenizer,
            "chat_template_sha256": _sha256_or_none(self.chat_template_file(config)),
            "chat_template_kwargs": config.chat_template_kwargs,
            "reasoning_parser": config.reasoning_parser,
        }

    def chat_template_file(self, config: TargetConfig) -> Path | None:
        """The template file in force: `target.chat_template`, else the checkpoint's own where it is a file."""
        own = self.local_path / "chat_template.jinja"
        return Path(config.chat_template) if config.chat_template else own if own.is_file() else None


def resolve_target(config: TargetConfig) -> Target:
    """Find the target (embedded, local folder or hub id) and read its shape.

    Raises:
        UserError: it is nowhere, is not a causal language model, or asks for remote code.
    """
    local, revision = _locate(config)
    hf_config = _read_hf_config(local, config)
    text = hf_config.get_text_config()
    layers, hidden, vocab = (getattr(text, key, None) for key in ("num_hidden_layers", "hidden_size", "vocab_size"))
    if not (isinstance(layers, int) and isinstance(hidden, int) and isinstance(vocab, int)):
        raise UserError(f"{local}/config.json: not the config of a causal language model.", "Point target.path at one.")
    return Target(config.path, local, revision, layers, hidden, vocab, text)


def load_tokenizer(target: Target, config: TargetConfig) -> "PreTrainedTokenizerBase":
    """The target's tokenizer, with `target.chat_template` in place of its own template where that is set.

    Raises:
        UserError: there is no tokenizer, no chat template, or the named template file is missing.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(target.local_path), trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{target.local_path}: no tokenizer can be loaded ({_first_line(error)}).",
            "Put the target's tokenizer files there; set target.trust_remote_code only if its code is to be run.",
        ) from None
    if config.chat_template:
        path = Path(config.chat_template)
        if not path.is_file():
            raise UserError(f"target.chat_template: {path} does not exist.", "Give the path of a Jinja file, or null.")
        tokenizer.chat_template = path.read_text(encoding="utf-8")
    if not tokenizer.chat_template:
        raise UserError(
            f"{target.path}: the target has no chat template, so prompts cannot be rendered as served.",
            "Set target.chat_template to the Jinja file that your server uses.",
        )
    return tokenizer


def end_token_ids(target: Target, tokenizer: Any) -> list[int]:
    """Tokens that end a reply on the engine: the tokenizer's and the generation config's, as vLLM reads them."""
    file = target.local_path / "generation_config.json"
    given = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    eos = given.get("eos_token_id", getattr(target.hf_config, "eos_token_id", None))
    ids = [tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])]
    return list(dict.fromkeys(int(i) for i in ids if i is not None))


def resolve_layer_ids(config: CaptureConfig, num_layers: int) -> list[int]:
    """Auxiliary layer ids in column order (ascending, vLLM's convention).

    Raises:
        UserError: an id is outside 0..n-1, repeated or out of order, or there are not 3 or 4 of them.
    """
    ids = config.layer_ids
    if ids == "auto":
        if num_layers < 4:
            raise UserError(
                f"capture.layer_ids: auto needs a target of 4 layers or more, this one has {num_layers}.",
                "List three or more ids yourself, e.g. capture.layer_ids=[0,1,2].",
            )
        ids = [2, num_layers // 2, num_layers - 3]
        # On 4 to 6 layers those collide or change order; the three last ones below n are always distinct.
        return ids if ids == sorted(set(ids)) else [num_layers - 3, num_layers - 2, num_layers - 1]
    problem = None
    if bad := [i for i in ids if not 0 <= i < num_layers]:
        problem = f"{bad} is outside 0..{num_layers - 1} (the target has {num_layers} layers)"
    elif len(set(ids)) != len(ids):
        problem = "an id is given twice"
    elif sorted(ids) != ids:
        # vLLM sorts them, so the columns would silently be in another order than the config says.
        problem = "the ids are not ascending"
    elif len(ids) not in (3, 4):
        problem = f"{len(ids)} ids; an EAGLE3 draft takes 3 or 4"
    if problem:
        raise UserError(
            f"capture.layer_ids: {ids}: {problem}.",
            "Use vLLM's convention: id k is the state after k layers. SGLang and TorchSpec write k - 1.",
        )
    return list(ids)


def context_of(hf_config: Any) -> int | None:
    """Positions that vLLM serves a target with at most; None where its config does not tell."""
    positions = getattr(hf_config, "max_position_embeddings", None)
    scaling = getattr(hf_config, "rope_scaling", None) or getattr(hf_config, "rope_parameters", None) or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if not isinstance(positions, int):
        return None
    if kind in ("default", "llama3", "mrope"):  # of these the config names what the scaling reaches
        return positions
    before, factor = scaling.get("original_max_position_embeddings"), scaling.get("factor")
    return int(before * factor) if kind == "yarn" and before and factor else None


def weight_bytes(target: Target) -> int:
    """Size of the target's weight files."""
    return sum(f.stat().st_size for f in target.local_path.glob("*.safetensors"))


def check_named(config: TargetConfig) -> None:
    """Whether `target.path` can be a target, without fetching it.

    Raises:
        UserError: it is neither a checkpoint folder, nor a hub id, nor the embedded target.
    """
    folder = Path(config.path).expanduser()
    if config.path == embedded.NAME:
        return
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(
                f"target.path: {folder} has no config.json.", "Point it at a Hugging Face checkpoint folder."
            )
    elif not re.fullmatch(r"[\w.-]+/[\w.-]+", config.path):
        raise UserError(
            f"target.path: `{config.path}` is neither a folder nor a hub id (owner/name).",
            f"Check the path, or use the embedded `{embedded.NAME}`.",
        )


def _locate(config: TargetConfig) -> tuple[Path, str | None]:
    check_named(config)
    if config.path == embedded.NAME:
        return embedded.embedded_checkpoint(), None
    folder = Path(config.path).expanduser()
    return (folder.resolve(), None) if folder.is_dir() else _download(config)


def _download(config: TargetConfig) -> tuple[Path, str | None]:
    from huggingface_hub import snapshot_download

    try:
        folder = Path(
            snapshot_download(config.path, revision=config.revision, ignore_patterns=["*.bin", "*.pth", "*.gguf"])
        )
    except Exception as error:  # the hub client raises many unrelated types
        raise UserError(
            f"target.path: `{config.path}` is no local folder and was not fetched from the hub: {_first_line(error)}.",
            "Check the name, target.revision, the network and your access; or give a local folder.",
        ) from None
    return folder, folder.name


def _read_hf_config(local: Path, config: TargetConfig) -> "PretrainedConfig":
    from transformers import AutoConfig

    try:
        raw = json.loads((local / "config.json").read_text(encoding="utf-8"))
        if "auto_map" in raw and not config.trust_remote_code and raw.get("model_type") not in _known_types():
            raise UserError(
                f"target.path: {config.path} asks to run code of its own (auto_map in config.json).",
                "Read that code; if you trust it, set target.trust_remote_code=true.",
            )
        hf_config: PretrainedConfig = AutoConfig.from_pretrained(str(local), trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{local}/config.json: {_first_line(error)}.", "Point target.path at a checkpoint folder."
        ) from None
    return hf_config


def _known_types() -> set[str]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return set(CONFIG_MAPPING_NAMES)


def _weights_hash(folder: Path, chunks: int = 64, chunk_bytes: int = 65536) -> str:
    """Hash of each weight file's name, size and evenly spaced parts: tells fine-tunes apart without reading it all."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as data:
            for i in range(chunks):
                data.seek(max(0, size - chunk_bytes) * i // (chunks - 1))
                digest.update(data.read(chunk_bytes))
    return digest.hexdigest()


def _sha256_or_none(path: Path | None) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path and path.is_file() else None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
