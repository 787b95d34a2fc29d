"""A running vLLM server answers the prompts, through its OpenAI API: token ids in, token ids out.

`POST /v1/completions` with `prompt` as ids and `return_token_ids`; the ids that the server says it was given are
compared with those that were sent. Its chat endpoint is not used: the prompts are rendered here, as it would.
"""

import os
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import httpx

from draftsmith.core.config import Config, SamplingConfig, ServerConfig
from draftsmith.core.errors import StageFailed, UserError
from draftsmith.core.progress import Meter, say
from draftsmith.data.dialogues import Dialogues, Request

_Reply = tuple[list[int], str]


def answer_on_server(config: Config, dialogues: Dialogues, first: Request, shown: Meter) -> None:
    """Keep `data.server.concurrency` requests in flight until there is nothing more to ask.

    Raises:
        UserError: the server is not there at the start, serves another model, or refuses a request.
        StageFailed: it stopped answering.
    """
    server = config.data.server
    assert server is not None
    limits = httpx.Limits(max_connections=server.concurrency, max_keepalive_connections=server.concurrency)
    root = server.url.rstrip("/").removesuffix("/v1") + "/v1"
    tokens = 0
    with httpx.Client(base_url=root, headers=_headers(server), timeout=server.timeout, limits=limits) as client:
        model = _model(client, config, server)
        pool = ThreadPoolExecutor(server.concurrency)
        running: dict[Future[_Reply], Request] = {}
        request: Request | None = first
        try:
            while request or running:
                while request:
                    running[pool.submit(_ask, client, server, config.data.sampling, model, request)] = request
                    request = dialogues.take() if len(running) < server.concurrency else None
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    ids, finish_reason = future.result()
                    dialogues.accept(running.pop(future), ids, finish_reason)
                    tokens += len(ids)
                    shown.advance(tokens=f"{tokens:,}")
                request = dialogues.take() if len(running) < server.concurrency else None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _headers(server: ServerConfig) -> dict[str, str]:
    if not server.api_key_env:
        return {}
    if server.api_key_env not in os.environ:
        raise UserError(
            f"data.server.api_key_env is `{server.api_key_env}`, and there is no such environment variable.",
            "Set it, or leave api_key_env out.",
        )
    return {"Authorization": f"Bearer {os.environ[server.api_key_env]}"}


def _model(client: httpx.Client, config: Config, server: ServerConfig) -> str:
    """Name of the served model, once it is known to be there and long enough."""
    try:
        response = client.get("/models")
        response.raise_for_status()
        served = {m["id"]: m for m in response.json()["data"]}
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise UserError(
            f"data.server.url {server.url}: no OpenAI-compatible server answers ({error}).",
            "Start it (`vllm serve TARGET`), or mend the URL.",
        ) from None
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


def _ask(client: httpx.Client, server: ServerConfig, sampling: SamplingConfig, model: str, request: Request) -> _Reply:
    body: dict[str, Any] = {
        "model": model,
        "prompt": request.prompt_ids,
        "max_tokens": request.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": 0.0,  # a default of the server's would apply otherwise
        "repetition_penalty": sampling.repetition_penalty,
        "seed": request.seed,
        "return_token_ids": True,
        "add_special_tokens": False,
    }
    problem = ""
    for attempt in range(server.retries + 1):
        if attempt:
            time.sleep(server.retry_wait * 2 ** (attempt - 1))
        try:
            response = client.post("/completions", json=body)
        except httpx.TransportError as error:
            problem = str(error) or type(error).__name__
            continue
        if response.status_code == 429 or response.status_code >= 500:
            problem = f"HTTP {response.status_code}: {response.text[:200]}"
            continue
        if response.status_code >= 400:
            raise UserError(
                f"{server.url} refuses a prompt of {len(request.prompt_ids)} tokens: HTTP {response.status_code}: "
                f"{response.text[:300]}.",
                "It must be a vLLM server of the target (0.10.2 or newer).",
            )
        return _reply(server, request, response.json())
    raise StageFailed(
        f"{server.url} stopped answering ({problem}), {server.retries + 1} tries. The replies so far are kept: "
        "start the server again, and run the same command."
    )


def _reply(server: ServerConfig, request: Request, answer: Any) -> _Reply:
    choice = answer["choices"][0]
    ids, given = choice.get("token_ids"), choice.get("prompt_token_ids")
    if ids is None:
        raise UserError(f"{server.url} returns no token ids.", "It must be a vLLM server (0.10.2 or newer).")
    if given is not None and given != request.prompt_ids:
        raise UserError(
            f"{server.url} was sent {len(request.prompt_ids)} prompt ids and says it used {len(given)} others.",
            "Is there a proxy that rewrites prompts? Use the vLLM server itself.",
        )
    return [int(i) for i in ids], str(choice["finish_reason"])
