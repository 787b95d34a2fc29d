"""The schema of `eval/report.json`; configs/report.schema.json is made from it.

Rates are unconditional: accepted at position i / rounds. Acceptance length = 1 + accepted / rounds: the token that the
target gives itself in every round counts. Times are in milliseconds, medians over requests.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Rate = Annotated[float, Field(ge=0.0, le=1.0)]
Interval = Annotated[list[float], Field(min_length=2, max_length=2)]
Method = Literal["exact", "sampled", "expected"]


class Part(BaseModel):
    """Base of all parts: numbers are numbers, and what is not described is not there."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class ReplayRow(Part):
    """Replayed acceptance on the held-out samples at one K and temperature."""

    k: int
    temperature: float
    acceptance_length: float = Field(description="1 (nothing is accepted) to k + 1.")
    per_position: list[Rate]
    rounds: float = Field(description="Counted, or expected where `method` is.")
    ci95: Interval = Field(description="Of the acceptance length, whole conversations resampled.")
    samples: int
    method: Method = Field(
        description="exact: replies made at temperature 0, walked as the server does; sampled: replies sampled at this "
        "temperature, one draw of what a server would count; expected: acceptance probabilities along replies made at "
        "another temperature, an estimate (too high along greedy replies: sampled ones are harder to draft)."
    )
    exact: bool


class SourceReplayRow(ReplayRow):
    """The same of one source."""

    source: str


class ServedRow(Part):
    """One measured pass: a set at one K, temperature and concurrency, beside the same without a draft."""

    set: str
    k: int
    temperature: float
    concurrency: int = Field(description="Requests in flight.")
    prompts: int
    acceptance_length: float = Field(description="From the engine's own counters.")
    ci95: Interval = Field(description="Of the requests' own rounds, conversations resampled.")
    per_position: list[Rate]
    drafts: int = Field(description="Rounds, by the engine's counter.")
    accepted: int
    tokens: int
    tokens_per_second: float
    first_token_ms: float | None
    inter_token_ms: float | None
    baseline_tokens_per_second: float | None = Field(description="null: no server without a draft was there.")
    baseline_first_token_ms: float | None
    baseline_inter_token_ms: float | None
    speedup: float | None
    interleaved: bool = Field(description="Both were alive and took turns, so that the speed-up is of one run.")
    identical_replies: int | None = Field(description="Of replies at temperature 0, with the draft and without.")
    first_differences: list[int] | None = Field(description="Where the others differ first, in reply tokens.")


class AgreementRow(Part):
    """Replay beside serving on the same held-out samples."""

    k: int
    temperature: float
    concurrency: int
    method: Method
    replayed: float
    served: float
    difference: float = Field(description="served / replayed - 1.")
    falls_short: bool = Field(description="By more than eval.tolerance; never where replay is `expected`.")


class Objective(Part):
    """The final checkpoint's objective on the held-out samples."""

    checkpoint: str
    loss: str
    loss_per_step: list[float]
    supervised_rows_per_step: list[int]
    accuracy_per_step: list[Rate] = Field(description="Against the reply's own token: one outside the draft's "
                                          "vocabulary is a miss.")  # fmt: skip


class Finding(Part):
    """One thing that was compared between trainer and engine."""

    part: str
    error: float | None = Field(description="Relative (Frobenius); null: compared exactly.")
    bound: float | None
    agrees: bool
    detail: str


class Diagnosis(Part):
    """Why serving falls short of replay."""

    first_difference: str | None = Field(description="Name of the first part that differs; null: none does.")
    findings: list[Finding]


class Report(Part):
    """`eval/report.json`."""

    replay: list[ReplayRow]
    replay_by_source: list[SourceReplayRow]
    served: list[ServedRow]
    agreement: list[AgreementRow]
    objective: Objective | None = Field(description="null: no samples were held out.")
    diagnosis: Diagnosis | None = Field(
        description="null: nothing falls short, or `remarks` says why it is not diagnosed."
    )
    remarks: list[str] = Field(description="What to know before the figures are believed: noise, and what is missing.")
    settings: dict[str, Any] = Field(
        description="What it takes to get the same figures again: target, draft and their hashes, layer ids, chat "
        "template, prefix caching, sampling, engine arguments, seed."
    )
    versions: dict[str, str]


def report_schema() -> str:
    """JSON schema of the report."""
    return json.dumps(Report.model_json_schema(), indent=2) + "\n"
