"""The section `eval` of the config."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from draftsmith.core.section import PositiveInt, Section, Share

# Sets that drafts are usually compared on, under the names of their files.
BENCHMARKS = ("mt_bench", "humaneval", "gsm8k", "alpaca", "sum", "qa")


class EvalServerConfig(Section):
    """A running vLLM server (OpenAI API) that was started with the draft."""

    url: str = Field(pattern=r"^https?://[^\s/]+", description="Base URL, e.g. http://host:8000.")
    baseline_url: str | None = Field(
        None,
        pattern=r"^https?://[^\s/]+",
        description="Base URL of one with the same settings and no draft; null: no speed-up is measured.",
    )
    model: str | None = Field(None, description="Served model name; null: the only one there is.")
    api_key_env: str | None = Field(None, description="Environment variable that holds the API key; null: none.")
    timeout: float = Field(600.0, gt=0.0, description="Seconds that one reply may take.")


class EvalConfig(Section):
    """Replay on held-out samples, and serving with the exported draft."""

    k: list[PositiveInt] = Field(
        default_factory=lambda: [3], min_length=1, description="Draft lengths that are served."
    )
    replay_k: PositiveInt = Field(7, description="Draft lengths 1 .. replay_k are replayed, and those of `k`.")
    draft_sampling: Literal["greedy", "probabilistic"] = Field(
        "greedy",
        description="How the server drafts at T > 0 (vLLM's draft_sample_method). greedy: the draft's likeliest token, "
        "accepted with the target's probability of it; probabilistic: a token sampled from the draft.",
    )
    temperature: list[Annotated[float, Field(ge=0.0)]] = Field(default_factory=lambda: [0.0], min_length=1)
    concurrency: list[PositiveInt] = Field(default_factory=lambda: [1], min_length=1, description="Requests in flight.")
    sets: list[str] = Field(
        default_factory=list,
        description="Sources of prompts, as in `data.sources`, beside the held-out samples, which are always a set; "
        f"{', '.join(BENCHMARKS)} are looked for in `sets_dir`.",
    )
    sets_dir: str | None = Field(None, description="Folder with NAME.jsonl for every set that is named in `sets`.")
    max_prompts: PositiveInt | None = Field(
        None, description="Conversations served per set, spread evenly over it; null: all."
    )
    waves: PositiveInt | None = Field(
        None,
        description="A measured pass serves at most about `waves` times its concurrency prompts, so that low "
        "concurrencies of a sweep end in time; null: the whole set.",
    )
    max_tokens: PositiveInt | None = Field(
        None, description="Longest reply in tokens on `sets`; null: data.sampling.max_tokens, as on held-out samples."
    )
    engines: Literal["auto", "together", "pairs", "apart"] = Field(
        "auto",
        description="together: the engines without a draft and with one of every K live side by side and take turns "
        "pass by pass; pairs: two at a time; apart: one after another, so that the speed-up is of two runs. auto: the "
        "first that fits into memory.",
    )
    server: EvalServerConfig | None = Field(
        None, description="Measure a running server instead of engines of our own; `k` is what it was started with."
    )
    tolerance: Share = Field(
        0.02, description="Served acceptance length that is further than this below replay is diagnosed."
    )
    max_part_error: float = Field(
        0.015,
        gt=0.0,
        description="Relative error of one part of the engine's draft, given the same input, from which it counts as "
        "another than the trained one.",
    )
    bootstrap: PositiveInt = Field(1000, description="Bootstrap draws of the confidence intervals.")

    @field_validator("concurrency", "k", "temperature", "sets")
    @classmethod
    def _each_once(cls, values: list[Any]) -> list[Any]:
        if repeated := {v for v in values if values.count(v) > 1}:
            raise ValueError(f"given twice: {', '.join(map(str, sorted(repeated)))}")
        return values

    @model_validator(mode="before")
    @classmethod
    def _find_named_sets(cls, given: Any) -> Any:
        """Named sets become paths, so that every stage reads a set as it reads any source."""
        sets = given.get("sets") if isinstance(given, dict) else None
        if not isinstance(sets, list) or not (named := [s for s in sets if s in BENCHMARKS]):
            return given
        folder = given.get("sets_dir")
        if not isinstance(folder, str):
            raise ValueError(
                f"eval.sets: {', '.join(named)} by name needs eval.sets_dir, the folder with {named[0]}.jsonl"
            )
        return {**given, "sets": [f"{folder.rstrip('/')}/{s}.jsonl" if s in BENCHMARKS else s for s in sets]}
