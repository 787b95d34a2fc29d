"""Prefill-only capture on one engine: probe, then the samples it was given; runs in the engine's process."""

import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.core.config import Config
from draftsmith.core.engine import answer, generate, has_cuda, vllm_engine
from draftsmith.core.errors import StageFailed
from draftsmith.core.progress import Meter
from draftsmith.core.run import RunFolder
from draftsmith.core.samples import Sample, TrainSamples
from draftsmith.core.target import Target
from draftsmith.hidden_state_capture.probe import Probe, choose_probe, judge_probe
from draftsmith.hidden_state_capture.todo import engine_length
from draftsmith.hidden_state_capture.writer import FAILURE

if TYPE_CHECKING:
    from draftsmith.hidden_state_capture.spool import ShardQueue

# Requests that the engine holds at once, in multiples of what it schedules: memory stays flat however many there are.
_AHEAD = 4


@dataclass(frozen=True)
class Job:
    """What the engines of a capture share.

    Attributes:
        config, target, layer_ids: of the run; the ids ascending.
        samples: the folder that they are read from.
        folder: where the shards go.
        first: number of the first shard.
        engines: how many engines write into the folder.
        max_rejected: more rejected samples than this stop an engine.
    """

    config: Config
    target: Target
    layer_ids: list[int]
    samples: Path
    folder: Path
    first: int
    engines: int
    max_rejected: int


class Replica:
    """One engine that captures; a context manager."""

    def __init__(self, job: Job, index: int, spool: bool = False) -> None:
        """Say which one it is; the engine starts on entry.

        Args:
            job: what all engines share.
            index: number of this engine, from 0.
            spool: samples have slots, which name their shards.
        """
        self._job, self._index, self._spool = job, index, spool
        self._expected = 0

    def __enter__(self) -> "Replica":
        job = self._job
        self._engine = vllm_engine(job.config.target, job.target, **engine_args(job, self._index, self._spool))
        self._llm = self._engine.__enter__()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        # What an engine says of its own death is that it died; the writer has left the reason.
        reason = writers_reason(self._job.folder) if isinstance(error, Exception) else None
        failed = StageFailed(reason) if reason else None
        self._engine.__exit__(StageFailed if failed else kind, failed or error, trace)
        if failed:
            raise failed from None

    def probe(self) -> Probe:
        """Check that these are the target's own states.

        Raises:
            StageFailed: they are not.
        """
        job = self._job
        chosen = choose_probe(job.config.capture.probe, job.samples)
        files = [job.folder / f".tmp-probe-{os.getpid()}-{i}.safetensors" for i in range(len(chosen))]
        greedy: dict[int, list[int]] = {}
        params = [_params(s, save_to=str(file), prompt_logprobs=1) for s, file in zip(chosen, files, strict=True)]
        try:
            for i, output in generate(self._llm, [s.input_ids for s in chosen], params):
                tops = [top_token(entry) for entry in output.prompt_logprobs[1:]]
                greedy[i] = [*tops, int(output.outputs[0].token_ids[0])]
            self._settle(len(chosen))
            return judge_probe(job.config, job.target, job.layer_ids, files, [greedy[i] for i in range(len(chosen))])
        finally:
            for file in files:
                file.unlink(missing_ok=True)

    def prefill(self, samples: Iterable[Sample], shown: Meter | None) -> None:
        """Capture samples; when it returns they are on the host, and not all of them on disk."""
        rest = iter(samples)

        def take() -> tuple[Sample, None] | None:
            sample = next(rest, None)
            return None if sample is None else (sample, None)

        self.feed(take, shown, _AHEAD)

    def feed(self, take: Callable[[], tuple[Sample, Any] | None], shown: Meter | None, ahead: int) -> None:
        """As `prefill`, of what `take` gives: samples with their slots; None: nothing now.

        `ahead`: requests that the engine holds, in multiples of what it schedules.
        """
        tokens = asked = 0

        def ask() -> tuple[int, list[int], Any] | None:
            nonlocal asked
            if (taken := take()) is None:
                return None
            asked += 1
            sample, slot = taken
            return len(sample.input_ids), sample.input_ids, _params(sample, slot=slot)

        for length, _ in answer(self._llm, ask, ahead * self._job.config.capture.max_num_seqs):
            tokens += length
            if shown:
                shown.advance(tokens=f"{tokens:,}")
        self._settle(asked)

    def flush(self) -> None:
        """Put everything on disk."""
        self._llm.collective_rpc("draftsmith_flush")

    def _settle(self, more: int, timeout: float = 600.0) -> None:
        """Wait until the writer has taken in `more` samples: the copies run one engine step behind the outputs."""
        self._expected += more
        core = getattr(self._llm.llm_engine.engine_core, "engine_core", None)  # where the engine is in this process
        deadline = time.monotonic() + timeout
        written = last = -1
        while (written := max(self._llm.collective_rpc("draftsmith_written"))) < self._expected:
            if written > last:
                last, deadline = written, time.monotonic() + timeout
            if time.monotonic() > deadline:
                raise StageFailed(f"the engine handed over {written} of {self._expected} samples and then no more.")
            if core is not None and core.scheduler.has_requests():
                self._llm.llm_engine.step()
            else:
                time.sleep(0.01)


def capture_spool(
    config: Config, target: Target, layer_ids: list[int], samples: TrainSamples, queue: "ShardQueue"
) -> None:
    """Capture what the queue gives into the spool, for as long as it gives anything.

    Raises:
        StageFailed: the probe disagrees, the writer or the engine failed, or the training has ended.
    """
    run = RunFolder.of(config)
    # The queue judges what was rejected: it sees every epoch.
    job = Job(config, target, layer_ids, run.samples, run.spool, first=0, engines=1, max_rejected=2**31)

    def take() -> tuple[Sample, Any] | None:
        asked = queue.take()
        return None if asked is None else (samples[asked[0]], asked[1])

    with Replica(job, 0, spool=True) as replica:
        replica.probe()
        # Twice what the engine works on: it never waits for the next request, and shards end nearly in order.
        while queue.wait():
            replica.feed(take, None, ahead=2)
        replica.flush()


def writers_reason(folder: Path) -> str | None:
    """Why a writer of the folder failed, if one did."""
    file = folder / FAILURE
    return f"hidden-state writer: {json.loads(file.read_text(encoding='utf-8'))['reason']}." if file.is_file() else None


def engine_args(job: Job, index: int, spool: bool = False) -> dict[str, Any]:
    """Arguments of `vllm.LLM` of one engine."""
    capture = job.config.capture
    return {
        "max_model_len": engine_length(job.config, job.target),
        "max_num_batched_tokens": capture.max_batched_tokens,
        "max_num_seqs": capture.max_num_seqs,
        # With prefix caching on, cached tokens would have no state rows.
        "enable_prefix_caching": False,
        "worker_extension_cls": "draftsmith.hidden_state_capture.worker.CaptureWorker",
        **connector_args(job, {"first": job.first + index, "step": job.engines}, spool=spool),
    }


def connector_args(job: Job, writer: dict[str, Any], served: bool = False, spool: bool = False) -> dict[str, Any]:
    """What makes an engine write its states: for `vllm.LLM`, and as JSON for `vllm serve`.

    Args:
        job: what is captured.
        writer: fields of `WriterConfig` beside those that the config has.
        served: whether the engine is a server, which is not started for one capture and has to put its folder in order.
        spool: whether samples have slots.
    """
    capture, ids = job.config.capture, [*job.layer_ids, job.target.num_layers]
    cores = len(os.sched_getaffinity(0)) // job.engines
    return {
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": ids}},
        },
        "kv_transfer_config": {
            "kv_connector": "HiddenStatesConnector",
            "kv_connector_module_path": "draftsmith.hidden_state_capture.connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {
                "folder": str(job.folder.absolute()),
                "layer_ids": ids,
                "gather_bytes": capture.gather_bytes,
                "served": served,
                "spool": spool,
                "writer": {
                    "shard_bytes": capture.shard_bytes,
                    "pending_bytes": capture.pending_bytes,
                    "storage": capture.storage,
                    "threads": capture.writer_threads or (min(16, max(1, cores * 3 // 4)) if has_cuda() else 1),
                    "max_rejected": job.max_rejected,
                    **writer,
                },
            },
        },
    }


def _params(sample: Sample, save_to: str | None = None, prompt_logprobs: int | None = None, slot: Any = None) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        detokenize=False,
        prompt_logprobs=prompt_logprobs,
        extra_args={"kv_transfer_params": transfer_params(sample, save_to, slot)},
    )


def transfer_params(sample: Sample, save_to: str | None = None, slot: Any = None) -> dict[str, Any]:
    """What the connector is told of a request: whose states these are, and which rows are labels."""
    spans = [list(s) for s in sample.loss_spans]
    return {"sample_id": sample.sample_id, "loss_spans": spans, "save_to": save_to, "slot": slot}


def top_token(entry: dict[Any, Any]) -> int:
    """The likeliest token of one position's logprobs; the smaller id of equals."""
    return int(min(entry, key=lambda token: (entry[token].rank, int(token))))
