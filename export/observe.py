"""One engine with the exported draft: its first drafts after each prompt alone, then all prompts served together.

The replies are given to it once more, as prompts: what it writes is replayed along its own states.
"""

import itertools
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from draftsmith.core.config import Config
from draftsmith.core.draft_probe import WORKER, FirstDraft, probe_first_drafts, read_first_drafts
from draftsmith.core.engine import in_engine_process, vllm_engine
from draftsmith.core.target import Target

REPLIES = "replies"


@dataclass(frozen=True)
class Served:
    """What the engine did with a prompt.

    Attributes:
        reply: token ids.
        accepted: drafts of every round.
        aux_TAH: its states of the prompt and of the reply but for its last token, as it gives them to the draft.
    """

    reply: list[int]
    accepted: list[int]
    aux_TAH: Tensor | None = None


def observe(
    config: Config, target: Target, folder: Path, num_aux: int, prompts: list[list[int]], limits: list[int]
) -> tuple[list[FirstDraft], list[Served]]:
    """Start vLLM with a draft folder, in a process of its own, and look at its drafts.

    Args:
        config: the run's config.
        target: resolved target.
        folder: the draft.
        num_aux: auxiliary states that it reads.
        prompts: token ids.
        limits: longest reply to each; none: nothing is served beyond the first round.

    Raises:
        StageFailed: the engine did not start or died.
    """
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".tmp-probe-") as scratch:
        next_ids, served = in_engine_process(_observe, config, target, prompts, limits, folder.resolve(), Path(scratch))
        along = read_first_drafts(Path(scratch) / REPLIES, [s.reply[-1] for s in served], num_aux)
        seen = [replace(s, aux_TAH=a.aux_TAH) for s, a in zip(served, along, strict=True)]
        return read_first_drafts(Path(scratch), next_ids, num_aux), seen


def _observe(
    config: Config, target: Target, prompts: list[list[int]], limits: list[int], folder: Path, scratch: Path
) -> tuple[list[int], list[Served]]:
    k = config.export.verify_k
    args: dict[str, Any] = {
        "max_model_len": config.data.max_length + k + 1,
        "max_num_seqs": config.export.verify_concurrency,
        # A prompt in one step, so that the probe sees all of it at once.
        "max_num_batched_tokens": max(8192, config.data.max_length + k + 1),
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "seed": config.run.seed,
        "worker_extension_cls": WORKER,
        "speculative_config": {"method": "eagle3", "model": str(folder), "num_speculative_tokens": k},
    }
    # What the user sets for speed would hide tokens from the probe: cached prefixes, prompts in several steps, graphs.
    others = {key: value for key, value in config.target.engine_args.items() if key not in args}
    with vllm_engine(config.target.model_copy(update={"engine_args": others}), target, **args) as llm:
        next_ids, served = probe_first_drafts(llm, prompts, scratch), _serve(llm, prompts, limits) if limits else []
        (scratch / REPLIES).mkdir()
        # Once more as prompts, of which the probe keeps every state: what the engine wrote can be replayed, too.
        written = [[*p, *s.reply[:-1]] for p, s in zip(prompts, served, strict=False)]
        probe_first_drafts(llm, written, scratch / REPLIES)
        return next_ids, served


def _serve(llm: Any, prompts: list[list[int]], limits: list[int]) -> list[Served]:
    """Reply to all prompts at temperature 0; every engine step gives a request 1 + accepted tokens."""
    from vllm import SamplingParams, TokensPrompt

    engine, sizes = llm.llm_engine, [[0] for _ in prompts]
    replies: list[list[int]] = [[] for _ in prompts]
    for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        params = SamplingParams(temperature=0.0, max_tokens=limit, detokenize=False)
        engine.add_request(f"served-{i}", TokensPrompt(prompt_token_ids=prompt), params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            i = int(output.request_id.removeprefix("served-"))
            replies[i] = [int(t) for t in output.outputs[0].token_ids]
            sizes[i].append(len(replies[i]))
    served = []
    for reply, totals in zip(replies, sizes, strict=True):
        steps = [b - a for a, b in itertools.pairwise(totals) if b > a]
        served.append(Served(reply, [n - 1 for n in steps[1:]]))  # the first token comes from the prefill
    return served
