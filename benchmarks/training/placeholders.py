"""Lets a peer's training code import without packages that its training step does not use.

speculators imports an HTTP client at the top of its data module, for instance. Inside `placeholders(...)` a name that
is not installed becomes an empty module, any attribute of which is an empty class; an installed package stays itself.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import ClassVar


class _Placeholder(ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: set[str]) -> None:
        self.names = names

    def find_spec(self, fullname, path=None, target=None):  # type: ignore[no-untyped-def]
        if fullname.partition(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Placeholder(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextlib.contextmanager
def placeholders(*names: str) -> Iterator[list[str]]:
    """Yields the names that were replaced. Afterwards they are unknown again, so that no other library sees them."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    finder = _Finder(set(missing))
    sys.meta_path.append(finder)
    try:
        yield missing
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] in finder.names]:
            del sys.modules[name]
