"""DeepSpeed checkpoints (ZeRO-1 to 3): the shards gathered to whole float32 tensors by DeepSpeed's own utility.

DeepSpeed unpickles its files without restraint; here torch is made to let only tensors and a few plain classes out.
"""

import contextlib
import io
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor
from torch.serialization import safe_globals

from draftsmith.core.errors import UserError

_FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
# A draft trained beside other modules, or wrapped, stands under one of these.
_PREFIXES = ("draft_model.", "draft.", "module.")


def is_zero(folder: Path) -> bool:
    """Whether a folder is one that `DeepSpeedEngine.save_checkpoint` wrote: its `latest` names the newest tag."""
    return _tag_folder(folder) is not None


def load_zero(folder: Path) -> dict[str, Tensor]:
    """The draft's tensors, whole and in float32.

    Raises:
        UserError: DeepSpeed is not installed, a rank's file is missing or damaged, or one holds more than tensors.
    """
    tagged = _tag_folder(folder)
    assert tagged is not None
    try:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as gather
    except ImportError:
        raise UserError(
            f"{folder}: a DeepSpeed checkpoint, and DeepSpeed is not installed.", "pip install deepspeed."
        ) from None
    try:
        with _weights_only(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            tensors: dict[str, Tensor] = gather(str(tagged.parent), tag=tagged.name)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{tagged}: holds more than tensors, and draftsmith runs no code out of a checkpoint "
            f"({str(error).strip().splitlines()[0]}).",
            "Do not use it unless you know its maker; DeepSpeed's zero_to_fp32.py converts it all the same.",
        ) from None
    except (OSError, RuntimeError, ValueError, KeyError, AssertionError, NotImplementedError, EOFError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{tagged}: missing or damaged ({reason}).", "It needs the files of every rank.") from None
    return {_name(name): tensor.detach() for name, tensor in tensors.items()}


def _tag_folder(folder: Path) -> Path | None:
    latest = folder / "latest"
    tag = latest.read_text(encoding="utf-8").strip() if latest.is_file() else ""
    tagged = folder / tag if tag and Path(tag).name == tag else folder
    return tagged if any(tagged.glob("*_optim_states.pt")) else None


def _name(name: str) -> str:
    for prefix in _PREFIXES:
        if prefix in name:
            return name.split(prefix)[-1]
    return name


@contextmanager
def _weights_only() -> Iterator[None]:
    """Every `torch.load` in the block refuses what is no tensor, whatever its caller asks for."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum

    before = os.environ.get(_FORCE)
    os.environ[_FORCE] = "1"
    try:
        with safe_globals([LossScaler, DynamicLossScaler, ZeroStageEnum]):
            yield
    finally:
        os.environ.pop(_FORCE) if before is None else os.environ.update({_FORCE: before})
