"""Sections of `data`: how the target writes its replies, and on which server."""

from pydantic import Field

from draftsmith.core.section import PositiveInt, Section


class SamplingConfig(Section):
    """How the target answers the prompts."""

    temperature: float = Field(0.0, ge=0.0, le=2.0, description="0 is greedy; replay is exact only for greedy replies.")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="Nucleus sampling; 1 is off.")
    top_k: int = Field(0, ge=0, description="Sample from the k likeliest tokens; 0 is off.")
    min_p: float = Field(
        0.0,
        ge=0.0,
        le=1.0,
        description="Sample from the tokens that are at least this share as likely as the likeliest; 0 is off.",
    )
    repetition_penalty: float = Field(
        1.0, gt=0.0, description="Against tokens that the prompt or the reply has already; 1 is off."
    )
    presence_penalty: float = Field(
        0.0, ge=-2.0, le=2.0, description="Against tokens that the reply has already; 0 is off."
    )
    frequency_penalty: float = Field(
        0.0, ge=-2.0, le=2.0, description="The same, for every time that it has them; 0 is off."
    )
    replies: PositiveInt = Field(
        1,
        description="Replies that the target writes to every prompt, each with a seed of its own; of several turns "
        "each is a whole conversation. They stay on one side of the split and count as one conversation; equal ones "
        "are used once. More than one needs a temperature above 0.",
    )
    seed: int | None = Field(None, ge=0, le=2**32 - 1, description="Seed of the replies; null: run.seed.")
    max_tokens: int = Field(256, ge=2, description="Longest reply in tokens; one token leaves nothing to draft.")


class ServerConfig(Section):
    """A running vLLM server (OpenAI API) that answers the prompts instead of an engine of our own."""

    url: str = Field(
        pattern=r"^https?://[^\s/]+", description="Base URL, e.g. http://host:8000 or http://host:8000/v1."
    )
    model: str | None = Field(None, description="Served model name; null: the only one there is.")
    api_key_env: str | None = Field(None, description="Environment variable that holds the API key; null: none.")
    concurrency: PositiveInt = Field(256, description="Requests in flight; at least the server's --max-num-seqs.")
    timeout: float = Field(600.0, gt=0.0, description="Seconds that one reply may take.")
    retries: int = Field(5, ge=0, description="Further tries of a request that failed, each after a longer wait.")
    retry_wait: float = Field(1.0, ge=0.0, description="Seconds before the first of them; doubles with each.")
