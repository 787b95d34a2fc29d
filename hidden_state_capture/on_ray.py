"""Engines on a Ray cluster, an actor each; work is handed out in chunks and taken back when an actor dies.

The actors write into the run's folder, which they have to share. What an actor has committed is there to be read when
it dies; all else that it was given goes to the others.
"""

import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from draftsmith.core.atomic import write_json
from draftsmith.core.engine import last_line, lead_group
from draftsmith.core.errors import StageFailed, UserError
from draftsmith.core.progress import Meter, meter, say
from draftsmith.core.replacing import let_go
from draftsmith.core.samples import Sample
from draftsmith.core.store import PROBE
from draftsmith.hidden_state_capture.driver import Job, Replica
from draftsmith.hidden_state_capture.shard import committed_shards, rejected_samples
from draftsmith.hidden_state_capture.todo import Head, windows

# A chunk holds so many engine steps, and an actor has so many chunks: it never waits for the next.
_CHUNK_STEPS, _CHUNKS_AHEAD = 16, 2


class Capturer:
    """One engine, in an actor's process; its methods are called in the order in which they are asked for."""

    def __init__(self, job: Job, index: int) -> None:
        lead_group(os.getpid())  # vLLM's own processes end with this one
        self._folder, self._replica = job.folder, Replica(job, index)
        self._replica.__enter__()

    def probe(self) -> None:
        """Check that these are the target's own states."""
        write_json(self._folder / PROBE, asdict(self._replica.probe()))

    def capture(self, samples: list[Sample]) -> int:
        """Capture a chunk; how many samples it had. They are not all on disk yet."""
        self._replica.prefill(samples, None)
        return len(samples)

    def flush(self) -> None:
        """Put everything on disk."""
        self._replica.flush()

    def close(self) -> None:
        """End the engine."""
        self._replica.__exit__(None, None, None)


def capture_on_ray(job: Job, missing: Sequence[Head], capturer: type = Capturer) -> None:
    """Capture on `job.engines` actors.

    Args:
        job: what is captured.
        missing: the samples.
        capturer: the actors' class.

    Raises:
        UserError: Ray is not installed, or the cluster has too few GPUs.
        StageFailed: a probe or a writer failed, or no actor is left.
    """
    if importlib.util.find_spec("ray") is None:
        raise UserError("capture.launcher is ray, and Ray is not installed.", "pip install 'draftsmith[ray]'")
    import ray

    ours = not ray.is_initialized()
    if ours:
        ray.init(address=job.config.capture.ray_address, logging_level="warning")
    actor = ray.remote(**_resources(job, ray.cluster_resources()))(capturer)
    let_go(job.folder)
    actors = {i: actor.remote(job, i) for i in range(job.engines)}
    try:
        with meter("hidden states", len(missing), "samples") as shown:
            HandOut(job, actors, shown).run(missing)
        with suppress(ray.exceptions.RayError):  # everything is on disk
            ray.get([alive.close.remote() for alive in actors.values()])
    finally:
        for started in actors.values():
            ray.kill(started)
        if ours:
            ray.shutdown()


def _resources(job: Job, cluster: dict[str, float]) -> dict[str, Any]:
    gpus = int(cluster.get("GPU", 0))
    if not gpus:
        return {"num_cpus": 1}
    if gpus < job.engines * job.config.target.tensor_parallel:
        raise UserError(
            f"capture.data_parallel is {job.engines} and target.tensor_parallel {job.config.target.tensor_parallel}, "
            f"and the Ray cluster has {gpus} GPUs.",
            "Lower capture.data_parallel, or add hosts to the cluster.",
        )
    return {"num_gpus": job.config.target.tensor_parallel}


class HandOut:
    """Gives chunks to actors; what a dead one has not committed is given to the others."""

    def __init__(self, job: Job, actors: dict[int, Any], shown: Meter) -> None:
        self._job, self._actors, self._shown = job, actors, shown
        self._running: dict[Any, int] = {}

    def run(self, missing: Sequence[Head]) -> None:
        """Until everything is on disk."""
        self._each("probe")
        wanted = {h.sample_id for h in missing}
        while wanted:
            self._capture(wanted)
            self._each("flush")
            wanted -= self._committed()

    def _capture(self, wanted: set[str]) -> None:
        """Hand all of it out once."""
        import ray

        rest = chunks(self._job, wanted)
        while True:
            for index, actor in self._actors.items():
                while list(self._running.values()).count(index) < _CHUNKS_AHEAD and (chunk := next(rest, None)):
                    self._running[actor.capture.remote(chunk)] = index
            if not self._running:
                return
            [done], _ = ray.wait(list(self._running), num_returns=1)
            self._shown.advance(self._result(done, self._running.pop(done)) or 0)

    def _each(self, method: str) -> None:
        calls = {i: getattr(actor, method).remote() for i, actor in self._actors.items()}
        for index, call in calls.items():
            self._result(call, index)

    def _result(self, call: Any, index: int) -> Any:
        """What a call returned; None where its actor is dead."""
        import ray

        try:
            return ray.get(call)
        except ray.exceptions.RayActorError as error:
            self._bury(index, last_line(error))
            return None
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            raise cause if isinstance(cause, UserError | StageFailed) else StageFailed(last_line(error)) from None

    def _bury(self, index: int, why: str) -> None:
        if self._actors.pop(index, None) is None:
            return
        say(f"warning: engine {index + 1} of {self._job.engines} died; what it has not written goes to the others")
        if not self._actors:
            raise StageFailed(f"no engine is left ({why}). What they wrote is kept: run the same command to go on.")

    def _committed(self) -> set[str]:
        folder = self._job.folder
        rows = {row["sample_id"] for shard in committed_shards(folder) for row in shard["rows"]}
        return rows | {r["sample_id"] for r in rejected_samples(folder)}


def chunks(job: Job, wanted: set[str]) -> Iterator[list[Sample]]:
    """The wanted samples, in chunks of like lengths."""
    chunk: list[Sample] = []
    tokens = 0
    budget = _CHUNK_STEPS * job.config.capture.max_batched_tokens
    for sample in windows(job.samples, set(wanted), 4 * budget):
        chunk.append(sample)
        tokens += len(sample.input_ids)
        if tokens >= budget:
            yield chunk
            chunk, tokens = [], 0
    if chunk:
        yield chunk
