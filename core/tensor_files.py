"""The tensors of a model folder, whoever made it: safetensors, else a torch file whose pickle may hold tensors only."""

import json
import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.core.damage import reading
from draftsmith.core.errors import UserError


def load_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder, on the CPU: its safetensors files, or where it has none its `pytorch_model*.bin`.

    Raises:
        UserError: there is no such file, one is missing or damaged, a tensor is there twice, or a torch file holds
            something other than tensors.
    """
    files = _weight_files(folder)
    if not files:
        raise UserError(
            f"{folder}: no weights (no *.safetensors and no pytorch_model*.bin).", "Point at the draft's whole folder."
        )
    tensors: dict[str, Tensor] = {}
    for file in files:
        part = _load_safetensors(file) if file.suffix == ".safetensors" else load_torch_file(file)
        if twice := sorted(part.keys() & tensors.keys()):
            raise UserError(f"{folder}: {', '.join(twice[:3])} stand in two files.", f"Remove what is not of {folder}.")
        tensors |= part
    return tensors


def load_torch_file(file: Path) -> dict[str, Tensor]:
    """The tensors of a file that `torch.save` wrote; nothing in it is executed.

    Raises:
        UserError: it holds something other than tensors, or is damaged.
    """
    mend = "Ask its maker for safetensors files."
    try:
        found: Any = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise UserError(
            f"{file}: holds more than tensors, and draftsmith runs no code out of a checkpoint ({reason}).", mend
        ) from None
    except (OSError, EOFError, RuntimeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file}: missing or damaged ({_first_line(error)}).", mend) from None
    if not isinstance(found, dict) or not all(isinstance(t, Tensor) for t in found.values()):
        raise UserError(f"{file}: not a dictionary of tensors.", mend)
    return found


def _weight_files(folder: Path) -> list[Path]:
    for name, pattern in (("model.safetensors", "*.safetensors"), ("pytorch_model.bin", "pytorch_model*.bin")):
        index = folder / f"{name}.index.json"
        if not index.is_file():
            files = sorted(folder.glob(pattern))
            if files:
                return files
            continue
        with reading(index, "Fetch the folder again."):
            named = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        if outside := [n for n in named if Path(n).name != n]:
            raise UserError(f"{index}: names files outside the folder ({outside[0]}).", "Do not use this folder.")
        if missing := [n for n in named if not (folder / n).is_file()]:
            raise UserError(f"{index}: {', '.join(missing)} of it are missing.", "Fetch the folder again, whole.")
        return [folder / n for n in named]
    return []


def _load_safetensors(file: Path) -> dict[str, Tensor]:
    with reading(file, "Fetch or export it again."):
        tensors: dict[str, Tensor] = load_file(file)
    return tensors


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
