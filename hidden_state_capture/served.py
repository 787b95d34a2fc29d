"""Capture by a `vllm serve` that the user started with our connector: requests go over HTTP, states to a shared folder.

There is no way to call the server's writer, so it seals its shards when nothing has come for `capture.seal_after`
seconds, and what is on disk says what is done. No request is sent twice: one that failed may have been captured.
"""

import json
import os
import shlex
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx

from draftsmith.core.atomic import write_json
from draftsmith.core.engine import engine_dtype
from draftsmith.core.errors import StageFailed, UserError
from draftsmith.core.progress import meter
from draftsmith.core.replacing import let_go
from draftsmith.core.samples import Sample
from draftsmith.core.store import PROBE
from draftsmith.hidden_state_capture.driver import Job, connector_args, top_token, transfer_params, writers_reason
from draftsmith.hidden_state_capture.local import WINDOW_STEPS
from draftsmith.hidden_state_capture.probe import choose_probe, judge_probe
from draftsmith.hidden_state_capture.shard import committed_shards, rejected_samples
from draftsmith.hidden_state_capture.todo import Head, engine_length, windows
from draftsmith.hidden_state_capture.writer import CONNECTOR

_POLL_SECONDS = 0.2
_PATIENCE = 120.0  # seconds without any progress on disk


def serve_args(job: Job) -> str:
    """The command line of a server that captures for this run."""
    capture, target = job.config.capture, job.config.target
    args = connector_args(job, {"seal_after": capture.seal_after}, served=True)
    flags: dict[str, Any] = {
        "dtype": engine_dtype(target),
        "tensor-parallel-size": target.tensor_parallel,
        "max-model-len": engine_length(job.config, job.target),
        "max-num-batched-tokens": capture.max_batched_tokens,
        "max-num-seqs": capture.max_num_seqs,
        "speculative-config": json.dumps(args["speculative_config"]),
        "kv-transfer-config": json.dumps(args["kv_transfer_config"]),
    }
    words = [str(job.target.local_path), "--no-enable-prefix-caching"]
    words += [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return " ".join(["vllm", "serve", *map(shlex.quote, words)])


def wait_quiet(folder: Path, seconds: float) -> None:
    """Wait until a server that an earlier capture used has sealed everything: nothing in `folder` changes any more."""
    if not (folder / CONNECTOR).is_file() or not any(folder.glob("*shard-*")):
        return
    since, before = time.monotonic(), sorted(os.listdir(folder))
    while time.monotonic() - since < seconds + 1:
        time.sleep(_POLL_SECONDS)
        if (now := sorted(os.listdir(folder))) != before:
            since, before = time.monotonic(), now


def capture_served(job: Job, missing: Sequence[Head]) -> None:
    """Capture on the server that `capture.server` names.

    Raises:
        UserError: the server is not there, or is not one that captures this run's states into this folder.
        StageFailed: it stopped answering, the probe disagrees, or its writer failed.
    """
    _check_connector(job)
    server = str(job.config.capture.server).rstrip("/").removesuffix("/v1")
    limits = httpx.Limits(max_connections=job.config.capture.max_num_seqs)
    with httpx.Client(base_url=server, timeout=httpx.Timeout(600.0), limits=limits) as client:
        model = _model(client, server)
        let_go(job.folder)
        _probe(job, client, model)
        wanted = {h.sample_id for h in missing}
        with meter("hidden states", len(missing), "samples") as shown:
            rest = windows(job.samples, wanted, WINDOW_STEPS * job.config.capture.max_batched_tokens)
            with ThreadPoolExecutor(job.config.capture.max_num_seqs) as pool:
                running: set[Future[Any]] = set()
                for sample in rest:
                    running.add(pool.submit(_ask, client, job, model, sample))
                    while len(running) >= 2 * job.config.capture.max_num_seqs:
                        running = _collect(running, shown.advance)
                while running:
                    running = _collect(running, shown.advance)
    _wait_for(job, wanted)


def _collect(running: set[Future[Any]], count: Any) -> set[Future[Any]]:
    done, rest = wait(running, return_when=FIRST_COMPLETED)
    try:
        for future in done:
            future.result()
            count()
    except BaseException:
        for future in rest:
            future.cancel()
        raise
    return rest


def _check_connector(job: Job) -> None:
    """Is there a server that writes into this folder, and are these the states that the config asks for?"""
    file = job.folder / CONNECTOR
    if not file.is_file():
        raise UserError(
            f"no server captures into {job.folder} (it has no {CONNECTOR}).",
            "Start it with the command that `draftsmith capture serve-args` prints, on a host that shares this folder.",
        )
    told = json.loads(file.read_text(encoding="utf-8"))
    here: dict[str, Any] = {
        "layer_ids": [*job.layer_ids, job.target.num_layers],
        "storage": job.config.capture.storage,
        "dtype": f"torch.{engine_dtype(job.config.target)}",
    }
    if wrong := [f"{k} is {told[k]} there and {v} here" for k, v in here.items() if told[k] != v]:
        raise UserError(
            f"the server that captures into {job.folder} was started for other states: {'; '.join(wrong)}.",
            "Start it again with the command that `draftsmith capture serve-args` prints.",
        )


def _model(client: httpx.Client, server: str) -> str:
    try:
        response = client.get("/v1/models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
        raise UserError(
            f"capture.server {server}: no vLLM server answers ({error}).", "Start it, or mend the URL."
        ) from None


def _ask(client: httpx.Client, job: Job, model: str, sample: Sample, **more: Any) -> Any:
    """One prompt; returns the answer's choice."""
    body = {
        "model": model, "prompt": sample.input_ids, "max_tokens": 1, "temperature": 0.0, "add_special_tokens": False,
        "kv_transfer_params": transfer_params(sample, more.pop("save_to", None)), **more,
    }  # fmt: skip
    try:
        response = client.post("/v1/completions", json=body)
    except httpx.TransportError as error:
        reason = writers_reason(job.folder) or f"the server stopped answering ({error or type(error).__name__})."
        raise StageFailed(f"{reason} What it captured is kept: start it again, and run the same command.") from None
    if response.status_code != 200:
        raise StageFailed(
            writers_reason(job.folder)
            or f"the server refuses sample {sample.sample_id} ({len(sample.input_ids)} tokens): "
            f"HTTP {response.status_code}: {response.text[:300]}."
        )
    return response.json()["choices"][0]


def _probe(job: Job, client: httpx.Client, model: str) -> None:
    chosen = choose_probe(job.config.capture.probe, job.samples)
    files = [job.folder.absolute() / f".tmp-probe-{os.getpid()}-{i}.safetensors" for i in range(len(chosen))]
    greedy = []
    try:
        for sample, file in zip(chosen, files, strict=True):
            more = {"save_to": str(file), "prompt_logprobs": 1, "return_token_ids": True}
            choice = _ask(client, job, model, sample, **more)
            entries = [{t: SimpleNamespace(**v) for t, v in e.items()} for e in choice["prompt_logprobs"][1:]]
            greedy.append([*map(top_token, entries), int(choice["token_ids"][0])])
        deadline = time.monotonic() + _PATIENCE
        while not all(f.is_file() for f in files):
            if time.monotonic() > deadline:
                raise StageFailed(
                    writers_reason(job.folder) or f"the server answers, and no states of it come to {job.folder}."
                )
            time.sleep(_POLL_SECONDS)
        write_json(job.folder / PROBE, asdict(judge_probe(job.config, job.target, job.layer_ids, files, greedy)))
    finally:
        for file in files:
            file.unlink(missing_ok=True)


def _wait_for(job: Job, wanted: set[str]) -> None:
    """Until every sample is in a whole shard, or rejected."""
    since, before = time.monotonic(), -1
    while True:
        rows = {row["sample_id"] for shard in committed_shards(job.folder) for row in shard["rows"]}
        there = len(wanted & (rows | {r["sample_id"] for r in rejected_samples(job.folder)}))
        if there == len(wanted):
            return
        if reason := writers_reason(job.folder):
            raise StageFailed(reason)
        if there != before:
            since, before = time.monotonic(), there
        if time.monotonic() - since > _PATIENCE:
            raise StageFailed(f"the server wrote {there} of {len(wanted)} samples and then no more. Run it again.")
        time.sleep(_POLL_SECONDS)
