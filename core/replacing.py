"""A stage's old output set aside while it is made again: deleted once the new one is begun, given back on a refusal.

Aside means `.old-NAME` beside it; what lies behind a link to another disk stays on that disk, in a folder within.
A killed process leaves it there, and the stage's next start gives it back or, where there is a new one, deletes it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from draftsmith.core.atomic import remove

_OLD = ".old-"


@contextmanager
def replacing(old: list[Path]) -> Iterator[None]:
    """Old output is aside during the block, which may `let_go` of it.

    Where the block ends otherwise than well before it has made anything new, the old output is given back.
    """
    for path in old:
        recover(path)
        _set_aside(path)
    try:
        yield
    except BaseException:
        for path in old:
            recover(path)
        raise
    for path in old:
        let_go(path)


def let_go(path: Path) -> None:
    """Delete what is aside of `path`: the new output is begun, and the disk may have no room for both."""
    remove(_aside(path))


def recover(path: Path) -> None:
    """Give back what is aside of `path`, where nothing new has taken its place; else delete it."""
    kept = _aside(path)
    if not kept.exists():
        return
    if _is_link(path):
        if not any(item != kept for item in path.iterdir()):
            for item in kept.iterdir():
                item.rename(path / item.name)
    elif not path.exists():
        kept.rename(path)
        return
    remove(kept)


def is_aside(path: Path) -> bool:
    """Whether `path` is what was put aside, in a folder that a link leads to."""
    return path.name.startswith(_OLD)


def _set_aside(path: Path) -> None:
    kept = _aside(path)
    if _is_link(path):
        items = list(path.iterdir())
        if items:
            kept.mkdir()
        for item in items:
            item.rename(kept / item.name)
    elif path.exists():
        path.rename(kept)


def _aside(path: Path) -> Path:
    return (path if _is_link(path) else path.parent) / f"{_OLD}{path.name}"


def _is_link(path: Path) -> bool:
    return path.is_symlink() and path.is_dir()
