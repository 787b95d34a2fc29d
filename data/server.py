"""A running vLLM server answers the prompts, through its OpenAI API: token ids in, token ids out.

`POST /v1/completions` with `prompt` as ids and `return_token_ids`; the ids that the server says it was given are
compared with those that were sent. Its chat endpoint is not used: the prompts are rendered here, as it would.
"""

import asyncio
import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import httpx

from draftsmith.core.config import Config
from draftsmith.core.config_replies import SamplingConfig, ServerConfig
from draftsmith.core.errors import StageFailed, UserError
from draftsmith.core.progress import Meter, say
from draftsmith.data.dialogues import Dialogues, Request

_Reply = tuple[list[int], str]
_Running = dict["asyncio.Task[_Reply]", Request]
_TRY_AGAIN = (408, 429)  # and whatever is the server's own fault


def answer_on_server(config: Config, dialogues: Dialogues, first: Request, shown: Meter) -> None:
    """Keep `data.server.concurrency` requests in flight until there is nothing more to ask.

    Whatever ends it, replies that have come in by then are recorded, and nobody waits for the others.

    Raises:
        UserError: the server is not there at the start, serves another model, refuses a request or answers oddly.
        StageFailed: it stopped answering.
    """
    assert config.data.server is not None
    asyncio.run(_answer_all(config, config.data.server, dialogues, first, shown))


async def _answer_all(config: Config, server: ServerConfig, dialogues: Dialogues, first: Request, shown: Meter) -> None:
    running: _Running = {}
    tokens = 0

    def accept(done: "Iterable[asyncio.Task[_Reply]]") -> None:
        """Record what came in, all of it before the first problem is raised."""
        nonlocal tokens
        problems: list[Exception] = []
        for task in done:
            request = running.pop(task)
            try:
                ids, finish_reason = task.result()
                dialogues.accept(request, ids, finish_reason)
            except (UserError, StageFailed) as problem:
                problems.append(problem)
            else:
                tokens += len(ids)
                shown.advance(tokens=f"{tokens:,}")
        if problems:
            raise problems[0]

    async with _client(server) as client:
        model = await _model(client, config, server)
        request: Request | None = first
        try:
            while request or running:
                while request:
                    asked = _ask(client, server, config.data.sampling, model, request)
                    running[asyncio.create_task(asked)] = request
                    request = dialogues.take() if len(running) < server.concurrency else None
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                accept(done)
                request = dialogues.take() if len(running) < server.concurrency else None
        finally:  # an error, or Ctrl-C
            for task in [*running]:
                if task.done():
                    with suppress(UserError, StageFailed):  # the first one is on its way
                        accept([task])
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)


def _client(server: ServerConfig) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=server.concurrency, max_keepalive_connections=server.concurrency)
    root = server.url.rstrip("/").removesuffix("/v1") + "/v1"
    headers = _headers(server)
    try:
        return httpx.AsyncClient(base_url=root, headers=headers, timeout=server.timeout, limits=limits)
    except (httpx.InvalidURL, ValueError) as error:
        raise UserError(f"data.server.url {server.url}: no valid URL ({error}).", "Mend it.") from None


def _headers(server: ServerConfig) -> dict[str, str]:
    if not server.api_key_env:
        return {}
    if server.api_key_env not in os.environ:
        raise UserError(
            f"data.server.api_key_env is `{server.api_key_env}`, and there is no such environment variable.",
            "Set it, or leave api_key_env out.",
        )
    key = os.environ[server.api_key_env].strip()
    if not (key.isascii() and key.isprintable()):
        raise UserError(f"the API key in `{server.api_key_env}` is no plain text.", "Set it anew.")
    return {"Authorization": f"Bearer {key}"}


async def _model(client: httpx.AsyncClient, config: Config, server: ServerConfig) -> str:
    """Name of the served model, once it is known to be there and long enough."""
    try:
        response = await client.get("/models")
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, OverflowError) as error:
        raise UserError(
            f"data.server.url {server.url}: no OpenAI-compatible server answers ({error or type(error).__name__}).",
            "Start it (`vllm serve TARGET`), or mend the URL.",
        ) from None
    try:
        served: dict[str, Any] = {m["id"]: m for m in response.json()["data"]} if response.status_code == 200 else {}
    except (ValueError, KeyError, TypeError):
        served = {}
    if not served:
        raise UserError(
            f"data.server.url: no OpenAI-compatible server answers at {client.base_url}models: {_said(response)}.",
            "Start it (`vllm serve TARGET`), or mend the URL; a server with a key needs data.server.api_key_env.",
        )
    name: str = server.model or (next(iter(served)) if len(served) == 1 else "")
    if name not in served:
        raise UserError(
            f"data.server.model is {server.model}, and {server.url} serves {', '.join(served)}.",
            "Set data.server.model to the target's name there.",
        )
    longest, root = served[name].get("max_model_len"), served[name].get("root")
    if longest is not None and longest < config.data.max_length:
        raise UserError(
            f"{server.url} serves {name} with {longest} tokens of context, and data.max_length is "
            f"{config.data.max_length}.",
            "Start it with a larger --max-model-len, or lower data.max_length.",
        )
    if root not in (None, config.target.path, name):
        say(f"warning: {server.url} serves `{root}` as {name}; make sure that it is target.path {config.target.path}")
    return name


async def _ask(
    client: httpx.AsyncClient, server: ServerConfig, sampling: SamplingConfig, model: str, request: Request
) -> _Reply:
    body: dict[str, Any] = {
        "model": model,
        "prompt": request.prompt_ids,
        "max_tokens": request.max_tokens,
        # All that a server takes from the model's generation_config.json where a request does not say.
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "seed": request.seed,
        "return_token_ids": True,
        "add_special_tokens": False,
    }
    problem = ""
    for attempt in range(server.retries + 1):
        if attempt:
            await asyncio.sleep(server.retry_wait * 2 ** (attempt - 1))
        try:
            response = await client.post("/completions", json=body)
        except httpx.RequestError as error:
            problem = str(error) or type(error).__name__
            continue
        if response.status_code in _TRY_AGAIN or response.status_code >= 500:
            problem = _said(response)
            continue
        if response.status_code != 200:
            raise UserError(
                f"{server.url} refuses a prompt of {len(request.prompt_ids)} tokens: {_said(response)}.",
                "It must be a vLLM server of the target (0.10.2 or newer).",
            )
        return _reply(server, request, response)
    raise StageFailed(
        f"{server.url} stopped answering ({problem}), {server.retries + 1} tries. The replies so far are kept: "
        "start the server again, and run the same command."
    )


def _reply(server: ServerConfig, request: Request, response: httpx.Response) -> _Reply:
    try:
        choice = response.json()["choices"][0]
        ids, given = choice.get("token_ids"), choice.get("prompt_token_ids")
        finish_reason = str(choice["finish_reason"])
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise UserError(
            f"{server.url} answers with no completion: {_said(response)}.",
            "It must be a vLLM server (0.10.2 or newer). The replies so far are kept.",
        ) from None
    if not (isinstance(ids, list) and all(isinstance(i, int) for i in ids)):
        raise UserError(f"{server.url} returns no token ids.", "It must be a vLLM server (0.10.2 or newer).")
    if given is not None and given != request.prompt_ids:
        raise UserError(
            f"{server.url} was sent {len(request.prompt_ids)} prompt ids and says it used "
            f"{len(given) if isinstance(given, list) else given} others.",
            "Is there a proxy that rewrites prompts? Use the vLLM server itself.",
        )
    return ids, finish_reason


def _said(response: httpx.Response) -> str:
    """Status and the start of the body, on one line."""
    to = f", to {response.headers['location']}" if "location" in response.headers else ""
    return f"HTTP {response.status_code}{to}: {' '.join(response.text[:200].split()) or 'no body'}"
