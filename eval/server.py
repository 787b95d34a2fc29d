"""A running vLLM server as a side of the measurement: ids in, a stream of ids out, counters from its /metrics."""

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from draftsmith.core.config import Config
from draftsmith.core.config_eval import EvalServerConfig
from draftsmith.core.errors import StageFailed, UserError
from draftsmith.core.progress import say
from draftsmith.eval.passes import Clock, Counters, Job, Pass
from draftsmith.eval.prompts import Prompt

_SETTLE_SECONDS, _SETTLE_TRIES = 0.25, 40
_SPEC = "vllm:spec_decode_num_"


class ServerSide:
    """Answers jobs through a server's OpenAI API; nobody else may use it meanwhile."""

    def __init__(self, config: Config, url: str, client: httpx.Client) -> None:
        """Look at the server.

        Raises:
            UserError: it is not there, is no vLLM server, serves another model, has too short a context, or is busy.
        """
        server = config.eval.server
        assert server is not None
        self.url, self._client, self._seed = url, client, config.run.seed
        self._model, self.context, root = _model(client, server, url)
        if root not in (None, config.target.path, self._model):
            say(f"warning: {url} serves `{root}` as {self._model}; make sure that it is {config.target.path}")
        metrics = self._metrics()
        if busy := sum(metrics.get(f"vllm:num_requests_{state}", {}).get("", 0.0) for state in ("running", "waiting")):
            raise UserError(
                f"{url} is working on {busy:.0f} requests of others, which its counters would mix with ours.",
                "Measure on a server that nobody else uses.",
            )
        self.k = len(_counters(metrics).per_position)
        self.settings = {"url": url, "model": self._model, "k": self.k, **self._said(metrics)}
        if self.settings["prefix_caching"] is not False:
            state = "on" if self.settings["prefix_caching"] else "in an unknown state"
            say(
                f"warning: {url} has prefix caching {state}, which changes acceptance and speed; "
                "start it with --no-enable-prefix-caching"
            )

    def measure(self, job: Job) -> Pass:
        """Serve a job.

        Raises:
            UserError: the server refuses a request or gives no token ids.
            StageFailed: it stopped answering.
        """
        before = self._settled()
        begin = time.perf_counter()
        with ThreadPoolExecutor(job.concurrency) as pool:
            asked = [pool.submit(self._ask, job, i, prompt) for i, prompt in enumerate(job.prompts)]
            answered = [a.result() for a in asked]
        seconds = time.perf_counter() - begin
        return Pass(
            seconds,
            replies=[ids for ids, _, _ in answered],
            finish_reasons=[reason for _, reason, _ in answered],
            outputs=[clock.outputs for _, _, clock in answered],
            first_token=[clock.first - clock.asked for _, _, clock in answered],
            between_tokens=[clock.between(len(ids)) for ids, _, clock in answered],
            counters=self._settled().since(before),
        )

    def _ask(self, job: Job, number: int, prompt: Prompt) -> tuple[list[int], str, Clock]:
        body = {
            "model": self._model, "prompt": prompt.ids, "max_tokens": prompt.max_tokens, "stream": True,
            "temperature": job.temperature, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
            "seed": job.seed + number, "return_token_ids": True, "add_special_tokens": False,
        }  # fmt: skip
        ids, reason, clock = list[int](), "", Clock(time.perf_counter())
        try:
            with self._client.stream("POST", f"{self.url}/v1/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise UserError(
                        f"{self.url} refuses `{prompt.id}`, {len(prompt.ids)} tokens: HTTP {response.status_code}: "
                        f"{response.text[:300]}.",
                        "It must be a vLLM server of the target, with room for the prompt and its reply.",
                    )
                for choice in _choices(response):
                    if (new := choice.get("token_ids")) is None and choice.get("text"):
                        raise UserError(
                            f"{self.url} streams no token ids.", "It must be a vLLM server (0.10.2 or newer)."
                        )
                    if new:
                        clock.tick(time.perf_counter())
                        ids += new
                    reason = choice.get("finish_reason") or reason
        except httpx.TransportError as error:
            raise StageFailed(f"{self.url} stopped answering ({error or type(error).__name__}).") from None
        return ids, reason, clock

    def _settled(self) -> Counters:
        """The counters once they stand still: a server counts a little after it has answered."""
        found = _counters(self._metrics())
        for _ in range(_SETTLE_TRIES):
            time.sleep(_SETTLE_SECONDS)
            if found == (now := _counters(self._metrics())):
                break
            found = now
        return found

    def _metrics(self) -> dict[str, dict[str, float]]:
        """Samples of `/metrics` by name, summed over the server's engines; by `position` where they have one."""
        response = self._client.get(f"{self.url}/metrics")
        found: dict[str, dict[str, float]] = {}
        for family in text_string_to_metric_families(response.text):
            for sample in family.samples:
                if sample.name.startswith("vllm:"):
                    by_position = found.setdefault(sample.name, {})
                    at = sample.labels.get("position", "")
                    by_position[at] = by_position.get(at, 0.0) + sample.value
                if sample.name == "vllm:cache_config_info":
                    caching = sample.labels.get("enable_prefix_caching", "")
                    found["prefix_caching"] = {caching: 1.0}
        return found

    def _said(self, metrics: dict[str, dict[str, float]]) -> dict[str, Any]:
        caching = next(iter(metrics.get("prefix_caching", {"": 0.0})))
        version = self._client.get(f"{self.url}/version")
        return {
            "prefix_caching": {"True": True, "False": False}.get(caching),
            "vllm": version.json().get("version") if version.status_code == 200 else None,
        }


@contextmanager
def server_sides(config: Config) -> Iterator[list[ServerSide]]:
    """The server without a draft, where there is one, and the one with it.

    Raises:
        UserError: one of them cannot be measured, or is the other.
    """
    server = config.eval.server
    assert server is not None
    limits = httpx.Limits(max_connections=max(config.eval.concurrency) + 1)
    with httpx.Client(headers=_headers(server), timeout=server.timeout, limits=limits) as client:
        drafted = ServerSide(config, _root(server.url), client)
        sides = [drafted]
        if server.baseline_url:
            sides.insert(0, ServerSide(config, _root(server.baseline_url), client))
            if sides[0].k:
                raise UserError(
                    f"eval.server.baseline_url: {server.baseline_url} speculates too.", "Start it without a draft."
                )
        if not drafted.k:
            raise UserError(
                f"eval.server.url: {server.url} does not speculate (its /metrics count no drafts).",
                "Start it with --speculative-config, and without --disable-log-stats.",
            )
        yield sides


def _counters(metrics: dict[str, dict[str, float]]) -> Counters:
    def total(name: str) -> int:
        return int(sum(metrics.get(f"{_SPEC}{name}_total", {}).values()))

    positions = metrics.get(f"{_SPEC}accepted_tokens_per_pos_total", {})
    in_order = [int(positions[at]) for at in sorted(positions, key=int)]
    return Counters(total("drafts"), total("accepted_tokens"), tuple(in_order))


def _root(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")


def _headers(server: EvalServerConfig) -> dict[str, str]:
    if not server.api_key_env:
        return {}
    if server.api_key_env not in os.environ:
        raise UserError(
            f"eval.server.api_key_env is `{server.api_key_env}`, and there is no such environment variable.",
            "Set it, or leave api_key_env out.",
        )
    return {"Authorization": f"Bearer {os.environ[server.api_key_env]}"}


def _model(client: httpx.Client, server: EvalServerConfig, url: str) -> tuple[str, int, str | None]:
    """Served name, context in tokens and checkpoint of the model."""
    try:
        response = client.get(f"{url}/v1/models")
        response.raise_for_status()
        served = {m["id"]: m for m in response.json()["data"]}
        client.get(f"{url}/metrics").raise_for_status()
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise UserError(
            f"eval.server: no vLLM server answers at {url} ({error}).",
            "Start it (`vllm serve TARGET --speculative-config ...`), or mend the URL.",
        ) from None
    name: str = server.model or (next(iter(served)) if len(served) == 1 else "")
    if name not in served:
        raise UserError(
            f"eval.server.model is {server.model}, and {url} serves {', '.join(served)}.",
            "Set eval.server.model to the target's name there.",
        )
    return name, served[name].get("max_model_len") or 2**31, served[name].get("root")


def _choices(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Choices of a stream of server-sent events."""
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise StageFailed(f"the server failed within a reply: {event['error']}")
            yield from event.get("choices", [])
