"""Engines of one host, each in a process of its own on its own GPUs, writing into one folder."""

import functools
import os
from collections.abc import Sequence
from dataclasses import asdict

from draftsmith.core.atomic import write_json
from draftsmith.core.engine import has_cuda, in_engine_processes
from draftsmith.core.errors import UserError
from draftsmith.core.progress import meter
from draftsmith.core.replacing import let_go
from draftsmith.core.store import PROBE
from draftsmith.hidden_state_capture.driver import Job, Replica
from draftsmith.hidden_state_capture.todo import Head, shares, windows

# Samples are sorted by length within so many engine steps.
WINDOW_STEPS = 64


def capture_locally(job: Job, missing: Sequence[Head]) -> None:
    """Capture on `job.engines` engines of this host, each with a share of the samples.

    Raises:
        UserError: there are too few GPUs.
        StageFailed: an engine, a probe or a writer failed; the other engines are ended.
    """
    devices = visible_devices(job.engines, job.config.target.tensor_parallel)
    let_go(job.folder)
    parts = shares(missing, job.engines)
    in_engine_processes(
        [
            functools.partial(_capture_share, job, i, {h.sample_id for h in part}, devices[i])
            for i, part in enumerate(parts)
        ]
    )


def visible_devices(engines: int, per_engine: int) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of every engine; None: as it is.

    Raises:
        UserError: there are too few GPUs.
    """
    if engines == 1 or not has_cuda():
        return [None] * engines
    import torch

    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else [str(i) for i in range(torch.cuda.device_count())]
    if len(names) < engines * per_engine:
        raise UserError(
            f"capture.data_parallel is {engines} and target.tensor_parallel {per_engine}, and there are "
            f"{len(names)} GPUs.",
            f"Set capture.data_parallel to {len(names) // per_engine} or fewer.",
        )
    return [",".join(names[i * per_engine : (i + 1) * per_engine]) for i in range(engines)]


def _capture_share(job: Job, index: int, wanted: set[str], devices: str | None) -> None:
    if devices is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices
    samples = windows(job.samples, wanted, WINDOW_STEPS * job.config.capture.max_batched_tokens)
    label = "hidden states" if job.engines == 1 else f"hidden states (engine {index + 1} of {job.engines})"
    with Replica(job, index) as replica:
        write_json(job.folder / PROBE, asdict(replica.probe()))
        with meter(label, len(wanted), "samples") as shown:
            replica.prefill(samples, shown)
        replica.flush()
