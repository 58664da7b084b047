"""What an evaluation found: values that can be stored, sent and shown. Knows neither engines nor suites."""

from typing import Any, Self

from pydantic import Field, model_validator

from cluster.config import Config


class Interval(Config):
    """An estimate and the bounds that hold it at `confidence`."""

    value: float
    low: float
    high: float
    confidence: float


class Score(Interval):
    """One candidate on one suite: the share of right answers."""

    correct: int
    n: int


class Slice(Config):
    """Some of the cases: the candidate's share of right answers, and that of what it is compared with."""

    name: str
    n: int
    groups: int
    candidate: float
    against: float
    difference: Interval
    """At the gate's confidence shared among all slices that were looked at."""


class Serving(Config):
    """What answering with the candidate took.

    Latency is the wall time of one request at a time in the engine's process, from the messages to the whole answer,
    with an empty prefix cache at the start: no HTTP, no queue. Tokens per second are of full batches.
    """

    requests: int
    p50_s: float
    p99_s: float
    """The slowest request where there were fewer than 100."""
    prompt_tokens: int
    generated_tokens: int
    tokens_per_s: float
    """Prompt and generated tokens of the candidate's batches, over their wall time."""
    usd_per_hour: float | None = None
    usd_per_million_tokens: float | None = None
    """Of `tokens_per_s`; None without a price of the machine."""


class Check(Config):
    """One thing that a gate looks at: what came of it, in one line with its numbers, and the numbers themselves."""

    name: str
    """`metric`, `slices`, `parity`, `budget_latency` or `budget_price`."""
    passed: bool
    reason: str
    details: dict[str, Any] = Field(default_factory=dict)
    """JSON values, bounded in size."""


class GateVerdict(Config):
    """Whether an alias may move: only if every check was passed."""

    passed: bool
    reason: str
    """The checks that block, or if none does, what the metric's check found."""
    checks: tuple[Check, ...]

    @classmethod
    def of(cls, *checks: Check) -> Self:
        """The verdict on `checks`; the first is the metric's."""
        blocking = [check for check in checks if not check.passed]
        return cls(
            passed=not blocking,
            reason="; ".join(check.reason for check in blocking or checks[:1]),
            checks=checks,
        )

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if not self.checks or self.passed != all(check.passed for check in self.checks):
            raise ValueError("a gate is passed if and only if it has checks and every one is passed")
        return self


class EvaluationReport(Config):
    """One suite over base, champion and candidate, by one engine whose parity with the trainer was checked first."""

    id: str
    suite: str
    n: int
    groups: int
    """Packages (or other groups) that the cases come from. Cases of one group are alike; the intervals know it."""
    scores: dict[str, Score]
    """By candidate: `base`, the candidate, and `champion` if there was one to compare with."""
    most_frequent: Score
    """Whoever always gave the commonest reference: what a candidate that learned only the form would score."""
    champion: str | None = None
    """Id of the version that `champion` stands for."""
    against: str
    """What the gate compared with, in words, and why where that is not what the recipe asked for."""
    difference: Interval
    """Candidate - what the gate compared with, on the same cases."""
    differences: dict[str, Interval]
    """Candidate - each of the others."""
    slices: tuple[Slice, ...] = ()
    """Those with enough cases, the greatest loss first; at most `gates.SLICES_KEPT`."""
    verdict: GateVerdict
    parity: str
    """What the parity check of the base found, in one sentence."""
    candidate_parity: str
    """The same of the candidate."""
    serving: Serving
    engine_start_s: float
    answers_path: str
    """JSON lines: case, reference, and each candidate's answer, for whoever wants to know why."""

    @property
    def figures(self) -> dict[str, float]:
        """The scores by candidate, for the record of a version."""
        return {f"{name}_exact_match": score.value for name, score in self.scores.items()}
