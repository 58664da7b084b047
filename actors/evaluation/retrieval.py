"""How good a search is: recall@k and mean reciprocal rank with bootstrap intervals. Pure: ranks in, scores out.

It knows no embedder and no store; whoever asks the questions turns hits into ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Rank = int | None
"""Place, from 1, of the right document among the hits; None if it was not among them."""

_RESAMPLES = 2000


@dataclass(frozen=True)
class Metric:
    """A mean over queries and the interval in which it lies at the asked confidence."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class RetrievalScores:
    """`metrics` by name: `recall@1`, `recall@10`, …, `mrr`. `n` is the number of queries."""

    n: int
    metrics: dict[str, Metric]


def rank_of(relevant: str, found: Sequence[str]) -> Rank:
    """Place of `relevant` in `found`, ids best first."""
    return found.index(relevant) + 1 if relevant in found else None


def recall_at_k(ranks: Sequence[Rank], k: int) -> float:
    """Share of queries whose right document is among the first `k`; each query has one right document."""
    return float(_found_within(ranks, k).mean())


def mrr(ranks: Sequence[Rank]) -> float:
    """Mean of 1 / rank, and 0 where the right document was not found (Voorhees 1999, TREC-8)."""
    return float(_reciprocal(ranks).mean())


def score(
    ranks: Sequence[Rank], *, ks: Sequence[int] = (1, 10), confidence: float = 0.95, seed: int = 0
) -> RetrievalScores:
    """Recall at each of `ks`, and MRR, each with a percentile bootstrap interval over queries.

    The same seed gives the same interval. Source: Efron and Tibshirani 1993, chapter 13. Raises `ValueError`
    if there are no ranks.
    """
    if not ranks:
        raise ValueError("there are no ranks to score")
    values = {f"recall@{k}": _found_within(ranks, k) for k in ks} | {"mrr": _reciprocal(ranks)}
    rng = np.random.default_rng(seed)
    picks = rng.integers(0, len(ranks), size=(_RESAMPLES, len(ranks)))
    tail = (1 - confidence) / 2
    metrics = {}
    for name, per_query in values.items():
        low, high = np.quantile(per_query[picks].mean(axis=1), [tail, 1 - tail])
        metrics[name] = Metric(float(per_query.mean()), float(low), float(high))
    return RetrievalScores(len(ranks), metrics)


def _found_within(ranks: Sequence[Rank], k: int) -> npt.NDArray[np.float64]:
    return np.array([rank is not None and rank <= k for rank in ranks], dtype=np.float64)


def _reciprocal(ranks: Sequence[Rank]) -> npt.NDArray[np.float64]:
    return np.array([0.0 if rank is None else 1 / rank for rank in ranks], dtype=np.float64)
