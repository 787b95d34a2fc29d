"""Lists that live on disk: a million conversations cost eight bytes each in memory."""

import pickle
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar, overload

T = TypeVar("T")


class DiskList(Sequence[T], Generic[T]):
    """An append-only list in one file; it crosses process borders by its path."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offsets = array("Q", [0])
        self._writer: BinaryIO | None = path.open("wb")
        self._reader: BinaryIO | None = None

    def append(self, item: T) -> None:
        """Add an item; it must be picklable."""
        assert self._writer
        data = pickle.dumps(item, pickle.HIGHEST_PROTOCOL)
        self._writer.write(data)
        self._offsets.append(self._offsets[-1] + len(data))

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        if self._writer:
            self._writer.flush()
        if self._reader is None:
            self._reader = self._path.open("rb")
        self._reader.seek(self._offsets[index])
        item: T = pickle.load(self._reader)  # written by this very run
        return item

    def __getstate__(self) -> dict[str, Any]:
        if self._writer:
            self._writer.flush()
        return {**self.__dict__, "_writer": None, "_reader": None}
