"""GPUs that a plan can be made for, by their makers' figures; what draftsmith measured, it measured on H200s."""

import subprocess
from dataclasses import dataclass

from draftsmith.core.errors import UserError


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        name: as `--gpu` and nvidia-smi have it, the latter with more around it.
        nbytes: of memory.
        flops: dense bfloat16 operations a second.
        bandwidth: bytes a second of its memory.
        fp8: its tensor cores have float8.
    """

    name: str
    nbytes: float
    flops: float
    bandwidth: float
    fp8: bool = True


# The longer of two names that both fit comes first (H200 before H20).
KNOWN = (
    Gpu("B200", 180e9, 2250e12, 8.0e12),
    Gpu("H200", 141e9, 989e12, 4.8e12),
    Gpu("H100", 80e9, 989e12, 3.35e12),
    Gpu("H20", 96e9, 148e12, 4.0e12),
    Gpu("A100", 80e9, 312e12, 2.04e12, fp8=False),
    Gpu("L40S", 48e9, 362e12, 0.86e12),
    Gpu("4090", 24e9, 165e12, 1.01e12),
)
H200 = next(gpu for gpu in KNOWN if gpu.name == "H200")


def named(name: str) -> Gpu:
    """The GPU of a name.

    Raises:
        UserError: it is not among those whose figures are known.
    """
    found = lookup(name)
    if found is None:
        names = ", ".join(gpu.name for gpu in KNOWN)
        raise UserError(
            f"--gpu {name}: its figures are not known here (known: {names}).",
            "Name one of them and state what differs with --gpu-memory, --capture-rate and --train-rate.",
        )
    return found


def lookup(name: str) -> Gpu | None:
    """The known GPU that a longer name means, e.g. nvidia-smi's `NVIDIA H100 80GB HBM3`."""
    return next((gpu for gpu in KNOWN if gpu.name.lower() in name.lower()), None)


def of_this_machine() -> list[tuple[str, float]]:
    """Name and bytes of every GPU of this machine."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
        return [(name.strip(), float(mib) * 1024**2) for name, mib in (line.rsplit(",", 1) for line in lines)]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []
