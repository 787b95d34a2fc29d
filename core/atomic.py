"""Files appear whole or not at all: temporary name, fsync, rename."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

TMP_MARK = ".tmp-"


def write_atomic(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file beside `path`, then fsync it and rename it to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_name(f"{TMP_MARK}{os.getpid()}-{path.name}")
    try:
        write(tmp)
        tmp.chmod(0o644)  # safetensors makes its files private
        fsync_path(tmp)
        os.replace(tmp, path)
        fsync_path(path.parent)
    finally:
        tmp.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """`write_atomic` for text (UTF-8)."""
    write_atomic(path, lambda tmp: tmp.write_text(text, encoding="utf-8"))


def write_json(path: Path, value: Any) -> None:
    """`write_atomic` for JSON."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


@contextmanager
def atomic_folder(path: Path, marker: str | None = None) -> Iterator[Path]:
    """Yield a temporary folder that becomes `path` when the block ends well; it replaces what was there.

    Args:
        path: final folder.
        marker: name of an empty file written last, after everything else is on disk.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_name(f"{TMP_MARK}{os.getpid()}-{path.name}")
    shutil.rmtree(tmp, ignore_errors=True)
    tmp.mkdir()
    try:
        yield tmp
        for file in sorted(tmp.rglob("*")):
            file.chmod(0o755 if file.is_dir() else 0o644)  # safetensors makes its files private
            fsync_path(file)
        if marker:
            (tmp / marker).touch()
            fsync_path(tmp / marker)
        fsync_path(tmp)
        if path.exists():
            shutil.rmtree(path)
        os.replace(tmp, path)
        fsync_path(path.parent)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def remove(path: Path) -> None:
    """Delete a file or folder if it is there; of a link to a folder only the contents, so that the link stays."""
    if path.is_symlink() and path.is_dir():
        for item in path.iterdir():
            remove(item)
    elif path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Delete temporary files and folders that a killed process left in `folder`; not those that a live one writes."""
    if folder.is_dir():
        for left in folder.glob(".tmp*"):  # safetensors' own temporary files are called .tmpXXXXXX
            if not _is_being_written(left):
                shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink(missing_ok=True)


def _is_being_written(left: Path) -> bool:
    """Whether the process it is named after is another one than this, and there: capture and training share a spool."""
    pid = left.name.removeprefix(TMP_MARK).split("-")[0]
    if not (left.name.startswith(TMP_MARK) and pid.isdecimal()) or int(pid) == os.getpid():
        return False
    try:
        writer = psutil.Process(int(pid))
        # Numbers are given again: whoever came after the file did not write it.
        return writer.status() != psutil.STATUS_ZOMBIE and writer.create_time() <= left.stat().st_mtime
    except (psutil.NoSuchProcess, FileNotFoundError):
        return False
    except psutil.AccessDenied:  # it is there, and another user's
        return True


def fsync_path(path: Path) -> None:
    """Flush one file or folder to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_json(value: Any) -> str:
    """Hex SHA-256 of a value's canonical JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
