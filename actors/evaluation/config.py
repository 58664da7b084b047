"""Settings of evaluation and of the gate in front of an alias."""

from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from cluster.config import Config

_POOL: Final = 5000


class SliceConfig(Config):
    """No part of the cases may get clearly worse, however much the whole gains."""

    by: Literal["label", "group"] = "label"
    """`label`: cases of one right answer; `group`: cases of one group of the data (in the demo a package)."""
    max_drop: float = Field(default=0.1, ge=0, lt=1)
    """A slice may lose this share of right answers; it blocks beyond it, if the loss is more than luck."""
    min_cases: int = Field(default=20, ge=2)
    """Slices with fewer cases are not looked at."""


class ParityConfig(Config):
    """How far the engine with the candidate may be from the trainer's forward of it."""

    max_mean_nats: float | None = Field(default=None, gt=0)
    """Largest mean |Δ log p|; unset: what rounding in the engine's dtype explains (`parity.TOLERANCE_NATS`)."""


class BudgetConfig(Config):
    """What answering with the candidate may take. All of it is measured anyway; what is set is checked."""

    p99_latency_s: float | None = Field(default=None, gt=0)
    """Of one request at a time, from its messages to its whole answer, inside the engine."""
    usd_per_million_tokens: float | None = Field(default=None, gt=0)
    """Of prompt and generated tokens together, in full batches."""
    usd_per_hour: float | None = Field(default=None, gt=0)
    """What the machine costs on which the engine runs: turns tokens per second into a price."""

    @model_validator(mode="after")
    def _price_can_be_told(self) -> Self:
        if self.usd_per_million_tokens is not None and self.usd_per_hour is None:
            raise ValueError(
                "usd_per_million_tokens needs usd_per_hour: what the machine costs turns tokens per second into a price"
            )
        return self


class GateConfig(Config):
    """What a candidate must show before the alias moves to it."""

    metric: Literal["exact_match"] = "exact_match"
    beats: Literal["base", "champion"] = "champion"
    """`champion`: the version at which the recipe's alias stands now, or the base while there is none."""
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    """The paired interval of the difference at this confidence must lie above zero."""
    slices: SliceConfig | None = SliceConfig()
    parity: ParityConfig = ParityConfig()
    budget: BudgetConfig | None = None


class RetrievalConfig(Config):
    """How an embedder is asked: the queries of held-out pairs, each for its positive among `pool` documents.

    The gate asks for a lift of recall@1 and of MRR, each with an interval above zero, at the whole length of the
    vectors and at each of `dims`: over the base, and with gate.beats champion over the champion as well.
    Of each text as many tokens are read as in training, `data.max_length`.
    """

    pool: int = Field(default=_POOL, ge=2)
    """Held-out documents to search."""
    beir: str | None = None
    """A folder in BEIR's format (corpus.jsonl, queries.jsonl, qrels/test.tsv) to search instead, all of its corpus."""
    dims: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Shorter lengths at which the vectors have to serve as well."""

    @model_validator(mode="after")
    def _one_collection(self) -> Self:
        if self.beir is not None and self.pool != _POOL:
            raise ValueError(f"pool {self.pool} is of held-out pairs; of a beir folder all is searched: leave it out")
        return self


class EvaluateConfig(Config):
    """Which suites run, on how many cases, and the gate."""

    suites: tuple[Literal["exact-match", "retrieval"], ...] = Field(
        default=("exact-match",), min_length=1, max_length=1
    )
    gate: GateConfig = GateConfig()
    max_cases: int | None = Field(default=None, ge=1)
    """Cases per suite, chosen by a hash of the case; unset: all."""
    max_new_tokens: int = Field(default=16, ge=1)
    retrieval: RetrievalConfig | None = None
    """Of the suite retrieval; unset: its defaults."""

    @model_validator(mode="after")
    def _asks_what_it_can(self) -> Self:
        if "retrieval" not in self.suites:
            if self.retrieval is not None:
                raise ValueError(f"retrieval is set, but suites is {list(self.suites)}: set suites to [retrieval]")
            return self
        unset = GateConfig()
        for name in ("slices", "parity", "budget"):
            if getattr(self.gate, name) != getattr(unset, name):
                raise ValueError(f"gate.{name} is of suites that ask for text, not of retrieval: leave it out")
        return self
