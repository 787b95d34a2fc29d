"""TorchSpec's checkpoints: a folder that `torch.distributed.checkpoint` wrote (`iter_NNNNNNN/model/`).

Its tensors are `model_state.model.draft_model.NAME`, with the names of vLLM's format behind the prefix; the vocabulary
mapping is in the buffers `d2t` and `t2d`, absent or as long as the target's vocabulary where the draft's is full. The
folder's `.metadata` is a pickle: only the classes that describe tensors are let out of it.
"""

import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from draftsmith.core.draft_folder import mapping_problem
from draftsmith.core.errors import UserError

_PREFIX = "draft_model."
_METADATA = ".metadata"
_ALLOWED = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath", "PurePath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath", "PurePath"},
    "collections": {"OrderedDict"},
}


@contextmanager
def alone() -> Iterator[None]:
    """For the library's calls with `no_dist`: that there is one process is meant, and no warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def is_distributed(folder: Path) -> bool:
    """Whether a folder, or the `model/` in it, is a distributed checkpoint."""
    return (_model_folder(folder) / _METADATA).is_file()


def load_distributed(folder: Path) -> dict[str, Tensor]:
    """The draft's tensors, whole, under their names in vLLM's format; d2t as offsets, and none for a full vocabulary.

    Raises:
        UserError: it is damaged, holds something other than tensors of a draft, or a mapping that contradicts itself.
    """
    folder = _model_folder(folder)
    reader = _Reader(folder)
    names = [n for n, m in reader.read_metadata().state_dict_metadata.items() if isinstance(m, TensorStorageMetadata)]
    ours = [n for n in names if _PREFIX in n and "optim" not in n.split(_PREFIX)[0]]
    if not ours:
        raise UserError(
            f"{folder}: no tensor `...{_PREFIX}*` in it.", "Name the model folder of a TorchSpec checkpoint."
        )
    state: dict[str, Any] = {n: _empty(reader.metadata.state_dict_metadata[n]) for n in ours}
    try:
        with alone():
            load(state, storage_reader=reader, no_dist=True)
    except (CheckpointException, OSError, RuntimeError, ValueError) as error:
        raise UserError(
            f"{folder}: missing or damaged ({(str(error).strip() or type(error).__name__).splitlines()[0]}).",
            "Copy the checkpoint again, whole.",
        ) from None
    return _with_offsets({n.split(_PREFIX)[-1]: t for n, t in state.items()}, folder)


def is_whole(folder: Path) -> bool:
    """Whether every file that the metadata of a distributed checkpoint names is there, and long enough.

    The metadata is written after the data; a cut copy, or one that a full disk ended, has it all the same.
    """
    needed: dict[str, int] = {}
    try:
        for info in _Reader(folder).read_metadata().storage_data.values():
            needed[info.relative_path] = max(needed.get(info.relative_path, 0), info.offset + info.length)
    except UserError:
        return False
    return all((folder / f).is_file() and (folder / f).stat().st_size >= size for f, size in needed.items())


class _Reader(FileSystemReader):
    """A reader that runs no code out of the metadata and opens no file outside the folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.folder = folder

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = self.folder / _METADATA
        try:
            with path.open("rb") as file:
                metadata: Metadata = _Unpickler(file).load()
            outside = [
                i.relative_path for i in metadata.storage_data.values() if Path(i.relative_path).name != i.relative_path
            ]
        except pickle.UnpicklingError as error:
            raise UserError(f"{path}: {error}.", "Do not use this checkpoint unless you know its maker.") from None
        except (AttributeError, EOFError, OSError, TypeError, ValueError, IndexError, KeyError) as error:
            raise UserError(f"{path}: damaged ({error}).", "Copy the checkpoint again, whole.") from None
        if outside:
            raise UserError(f"{path}: names files outside the folder ({outside[0]}).", "Do not use this checkpoint.")
        metadata.storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        self.metadata = metadata
        return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Only what describes tensors."""
        if name in _ALLOWED.get(module, ()) or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"asks for {module}.{name}, and draftsmith runs no code out of a checkpoint")


def _model_folder(folder: Path) -> Path:
    return folder / "model" if (folder / "model" / _METADATA).is_file() else folder


def _empty(metadata: Any) -> Tensor:
    return torch.empty(metadata.size, dtype=metadata.properties.dtype)


def _with_offsets(tensors: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """D2t as vLLM reads it. Versions of TorchSpec keep offsets or absolute ids; t2d tells which."""
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    size = len(tensors["lm_head.weight"]) if "lm_head.weight" in tensors else None
    if d2t is None or t2d is None or (size == len(t2d) and bool(t2d.all())):
        return tensors
    d2t, t2d = d2t.long(), t2d.bool()
    for offsets in (d2t, d2t - torch.arange(len(d2t))):
        if mapping_problem(offsets, t2d) is None:
            return {**tensors, "d2t": offsets, "t2d": t2d}
    raise UserError(
        f"{folder}: its d2t fits its t2d neither as offsets nor as absolute ids.", "The vocabulary cannot be known."
    )
