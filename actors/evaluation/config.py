"""Settings of evaluation and of the gate in front of an alias."""

from typing import Literal

from pydantic import Field

from cluster.config import Config


class GateConfig(Config):
    """What a candidate must show before the alias moves to it."""

    metric: Literal["exact_match"] = "exact_match"
    beats: Literal["base"] = "base"
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    """The paired interval of (candidate - base) at this confidence must lie above zero."""


class EvaluateConfig(Config):
    """Which suites run, on how many cases, and the gate."""

    suites: tuple[Literal["exact-match"], ...] = Field(default=("exact-match",), min_length=1, max_length=1)
    gate: GateConfig = GateConfig()
    max_cases: int | None = Field(default=None, ge=1)
    """Cases per suite, chosen by a hash of the case; unset: all."""
    max_new_tokens: int = Field(default=16, ge=1)
