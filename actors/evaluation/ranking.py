"""How good rankings are, against graded judgements: recall, MRR, nDCG and MAP, with intervals and slices. Pure.

    judged = {"q1": {"d7": 1, "d9": 2}}          grades from 1 are relevant; what is not named is not
    ranked = {"q1": ["d9", "d3", "d7"]}          ids, best first
    scores = summarize(measure(ranked, judged, ks=(1, 10)))

The definitions are trec_eval's (Voorhees and Harman 2005), so the figures equal those of `ir-measures` and `ranx`, and
for binary grades those of sentence-transformers' `InformationRetrievalEvaluator`, which divides MAP@k by min(k, number
of relevant documents) where trec_eval divides by their number: the two are equal while k is not below it.

A query that was not answered counts with 0; one without a relevant document says nothing and is left out.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import Field

from actors.evaluation.report import Interval
from actors.evaluation.statistics import Values, mean_differences, mean_intervals, seed_of
from cluster.config import Config

Judgements = Mapping[str, Mapping[str, int]]
"""Grade of each judged document, by query and document."""
Rankings = Mapping[str, Sequence[str]]
"""Ids of the documents that were found for each query, best first."""

KS = (1, 10, 100)


@dataclass(frozen=True)
class Measured:
    """Every metric of every query: `values[metric]` is [Q] float64, in the order of `queries`."""

    queries: tuple[str, ...]
    values: Mapping[str, Values]


class Scores(Config):
    """Means over `n` queries, with their intervals, by metric; and the same within each slice."""

    n: int
    metrics: dict[str, Interval]
    slices: dict[str, "Scores"] = Field(default_factory=dict)


def measure(rankings: Rankings, judgements: Judgements, *, ks: Sequence[int] = KS) -> Measured:
    """`recall@k`, `hit@k`, `mrr@k`, `ndcg@k` and `map@k` for each of `ks`, and `mrr` over all that was found.

    Raises `ValueError` if no query has a relevant document, or a ranking names a document twice.
    """
    relevant = {query: {id: grade for id, grade in graded.items() if grade > 0} for query, graded in judgements.items()}
    queries = tuple(query for query, graded in relevant.items() if graded)
    if not queries:
        raise ValueError("no query has a relevant document")
    rows = [_of_query(query, rankings.get(query, ()), relevant[query], ks) for query in queries]
    return Measured(queries, {name: np.array([row[name] for row in rows]) for name in rows[0]})


def summarize(
    measured: Measured,
    *,
    confidence: float = 0.95,
    groups: Mapping[str, Hashable] | None = None,
    slices: Mapping[str, str] | None = None,
) -> Scores:
    """Means with bootstrap intervals over groups of queries (without `groups`, each query is its own).

    `slices`: a name for each query; queries without one are in the whole only.
    """
    own = dict.fromkeys(measured.queries) if groups is None else groups
    member = [query if groups is None else own[query] for query in measured.queries]
    seed = seed_of(measured.queries)
    metrics = mean_intervals(measured.values, member, confidence, seed=seed)
    found = {}
    for name in sorted({slices[query] for query in measured.queries if query in slices} if slices else ()):
        found[name] = summarize(_only(measured, slices or {}, name), confidence=confidence, groups=groups)
    return Scores(n=len(measured.queries), metrics=metrics, slices=found)


def lift(
    candidate: Measured, base: Measured, *, confidence: float = 0.95, groups: Mapping[str, Hashable] | None = None
) -> dict[str, Interval]:
    """Candidate's mean minus base's on the same queries, by metric, bootstrapped over groups of queries.

    Raises `ValueError` if the two were not asked the same queries, in whatever order.
    """
    if set(candidate.queries) != set(base.queries):
        missing = sorted(set(candidate.queries) ^ set(base.queries))
        raise ValueError(f"query {missing[0]!r} was asked of one of the two only")
    place = {query: position for position, query in enumerate(base.queries)}
    order = [place[query] for query in candidate.queries]
    member = [query if groups is None else groups[query] for query in candidate.queries]
    seed = seed_of(candidate.queries)
    others = {name: values[order] for name, values in base.values.items()}
    return mean_differences(candidate.values, others, member, confidence, seed=seed)


def _of_query(query: str, found: Sequence[str], relevant: Mapping[str, int], ks: Sequence[int]) -> dict[str, float]:
    if len(set(found)) != len(found):
        raise ValueError(f"the ranking of query {query!r} names a document twice")
    gains = [relevant.get(id, 0) for id in found]
    ideal = sorted(relevant.values(), reverse=True)
    row: dict[str, float] = {}
    for k in ks:
        top = gains[:k]
        hits = sum(gain > 0 for gain in top)
        row[f"recall@{k}"] = hits / len(relevant)
        row[f"hit@{k}"] = float(hits > 0)
        row[f"mrr@{k}"] = _reciprocal_rank(top)
        row[f"ndcg@{k}"] = _discounted(top) / _discounted(ideal[:k])
        row[f"map@{k}"] = _precisions(top) / len(relevant)
    return {**row, "mrr": _reciprocal_rank(gains)}


def _reciprocal_rank(gains: Sequence[int]) -> float:
    return next((1 / rank for rank, gain in enumerate(gains, 1) if gain > 0), 0.0)


def _discounted(gains: Sequence[int]) -> float:
    """Järvelin and Kekäläinen 2002, with the grade itself as gain and log2(rank + 1), as trec_eval's `ndcg_cut`."""
    return sum(gain / math.log2(rank + 1) for rank, gain in enumerate(gains, 1))


def _precisions(gains: Sequence[int]) -> float:
    """Precision at the rank of each relevant document, summed."""
    hits, total = 0, 0.0
    for rank, gain in enumerate(gains, 1):
        if gain > 0:
            hits += 1
            total += hits / rank
    return total


def _only(measured: Measured, slices: Mapping[str, str], name: str) -> Measured:
    kept = [place for place, query in enumerate(measured.queries) if slices.get(query) == name]
    return Measured(
        tuple(measured.queries[place] for place in kept),
        {metric: values[kept] for metric, values in measured.values.items()},
    )
