"""Prefill-only capture on one engine: probe, then every sample, longest first; runs in the engine's process."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.core.atomic import write_json
from draftsmith.core.config import Config
from draftsmith.core.engine import answer, generate, vllm_engine
from draftsmith.core.errors import StageFailed
from draftsmith.core.progress import meter
from draftsmith.core.run import RunFolder
from draftsmith.core.samples import Sample, TrainSamples
from draftsmith.core.store import PROBE
from draftsmith.core.target import Target
from draftsmith.hidden_state_capture.probe import Probe, choose_probe, judge_probe

if TYPE_CHECKING:
    from draftsmith.hidden_state_capture.spool import ShardQueue


def capture_samples(
    config: Config, target: Target, layer_ids: list[int], samples: list[Sample], missing: list[Sample], folder: Path
) -> list[dict[str, str]]:
    """Capture `missing` into shards in `folder`.

    Args:
        config: the run's config.
        target: resolved target.
        layer_ids: auxiliary layer ids, ascending.
        samples: all of the run; the probe is drawn from them.
        missing: those that are not on disk yet.
        folder: `hidden_states/` of the run.

    Returns:
        The rejected samples, with reasons. The probe's findings are in `folder`/probe.json before the first shard is.

    Raises:
        StageFailed: the probe disagrees, the writer failed, or the engine died.
    """
    with vllm_engine(config.target, target, **_engine_args(config, target, layer_ids, folder)) as llm:
        chosen = choose_probe(config.capture.probe, samples)
        write_json(folder / PROBE, asdict(_probe(config, target, layer_ids, llm, chosen, folder)))
        # Longest first: a batch then holds like lengths, and the last step is not one long straggler.
        _prefill(llm, sorted(missing, key=lambda s: -len(s.input_ids)), len(chosen))
        rejected = [r for answer in llm.collective_rpc("draftsmith_flush") for r in answer]
    return rejected


def capture_spool(
    config: Config, target: Target, layer_ids: list[int], samples: TrainSamples, queue: "ShardQueue"
) -> None:
    """Capture what the queue gives into the spool, for as long as it gives anything.

    Raises:
        StageFailed: as `capture_samples`, or the training has ended.
    """
    folder, some = RunFolder.of(config).spool, range(min(len(samples), config.capture.probe.samples))
    with vllm_engine(config.target, target, **_engine_args(config, target, layer_ids, folder, spool=True)) as llm:
        chosen = choose_probe(config.capture.probe, [samples[n] for n in some])
        _probe(config, target, layer_ids, llm, chosen, folder)

        def take() -> tuple[int, list[int], Any] | None:
            if (asked := queue.take()) is None:
                return None
            sample = samples[asked[0]]
            return asked[0], sample.input_ids, _params(sample, slot=asked[1])

        # Twice what the engine works on: it never waits for the next request, and shards end nearly in order.
        while queue.wait():
            for _ in answer(llm, take, 2 * config.capture.max_num_seqs):
                pass
            _settle(llm, len(chosen) + queue.taken)
        llm.collective_rpc("draftsmith_flush")


def _engine_args(
    config: Config, target: Target, layer_ids: list[int], folder: Path, spool: bool = False
) -> dict[str, Any]:
    ids = [*layer_ids, target.num_layers]
    return {
        "max_model_len": config.data.max_length + 2,  # the engine always makes a token, and speculates one more
        "max_num_batched_tokens": config.capture.max_batched_tokens,
        "max_num_seqs": config.capture.max_num_seqs,
        # With prefix caching on, cached tokens would have no state rows.
        "enable_prefix_caching": False,
        "worker_extension_cls": "draftsmith.hidden_state_capture.worker.CaptureWorker",
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
                "folder": str(folder.resolve()),
                "shard_bytes": config.capture.shard_bytes,
                "pending_bytes": config.capture.pending_bytes,
                "storage": config.capture.storage,
                "num_states": len(ids),
                "spool": spool,
            },
        },
    }


def _probe(config: Config, target: Target, layer_ids: list[int], llm: Any, chosen: list[Sample], folder: Path) -> Probe:
    files = [folder / f".tmp-probe-{i}.safetensors" for i in range(len(chosen))]
    greedy: dict[int, list[int]] = {}
    params = [_params(s, save_to=str(file), prompt_logprobs=1) for s, file in zip(chosen, files, strict=True)]
    for i, output in generate(llm, [s.input_ids for s in chosen], params):
        greedy[i] = [_top_token(entry) for entry in output.prompt_logprobs[1:]] + [int(output.outputs[0].token_ids[0])]
    _settle(llm, len(chosen))
    try:
        return judge_probe(config, target, layer_ids, files, [greedy[i] for i in range(len(chosen))])
    finally:
        for file in files:
            file.unlink(missing_ok=True)


def _prefill(llm: Any, samples: list[Sample], written_before: int) -> None:
    params = [_params(sample) for sample in samples]
    tokens = 0
    with meter("hidden states", len(samples), "samples") as shown:
        for i, _ in generate(llm, [s.input_ids for s in samples], params):
            tokens += len(samples[i].input_ids)
            shown.advance(tokens=f"{tokens:,}")
        _settle(llm, written_before + len(samples))


def _params(sample: Sample, save_to: str | None = None, prompt_logprobs: int | None = None, slot: Any = None) -> Any:
    from vllm import SamplingParams

    transfer = {
        "sample_id": sample.sample_id,
        "loss_spans": [list(s) for s in sample.loss_spans],
        "save_to": save_to,
        "slot": slot,
    }
    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        detokenize=False,
        prompt_logprobs=prompt_logprobs,
        extra_args={"kv_transfer_params": transfer},
    )


def _top_token(entry: dict[int, Any]) -> int:
    return min(entry, key=lambda token: (entry[token].rank, token))


def _settle(llm: Any, expected: int, timeout: float = 600.0) -> None:
    """Wait until the worker has taken in `expected` samples: the copies run one engine step behind the outputs."""
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)  # only where the engine runs in this process
    deadline = time.monotonic() + timeout
    while (written := max(llm.collective_rpc("draftsmith_written"))) < expected:
        if time.monotonic() > deadline:
            raise StageFailed(f"the engine handed over {written} of {expected} samples and then no more.")
        if core is not None and core.scheduler.has_requests():
            llm.llm_engine.step()
        else:
            time.sleep(0.01)
