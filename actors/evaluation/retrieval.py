"""Does a tuned embedder find more than its base and the champion: the same queries, one pool, exact search.

`compare` is pure: vectors in, report out. `evaluate` embeds first, on Ray. Who records the report is its caller's.
"""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Final

from pydantic import Field

from actors.data.examples import PairExample
from actors.data.rows import content_id
from actors.evaluation import embedding, ranking, search
from actors.evaluation.beir import RetrievalTask
from actors.evaluation.config import EvaluateConfig, GateConfig, RetrievalConfig
from actors.evaluation.embedding import Dtype
from actors.evaluation.evaluate import BASE, CHAMPION, Champion, Opponent, choose_opponent
from actors.evaluation.ranking import Scores
from actors.evaluation.report import Check, GateVerdict, Interval
from actors.evaluation.search import Vectors
from actors.evaluation.statistics import fewest_groups
from cluster.config import Config
from cluster.errors import ConfigError
from cluster.models import StoredModel, obtain
from cluster.progress import Progress, Sink, silent
from cluster.storage import Home

CANDIDATE: Final = "candidate"
FOUND: Final = 100
"""Documents that are looked at for each query. One that comes later counts as not found: 0, where MRR over the whole
pool would give it less than 1/100."""
KS: Final = (1, 10, FOUND)
GATED: Final = ("recall@1", f"mrr@{FOUND}")
"""What the gate asks for, at every length of a vector."""


class AtLength(Config):
    """What was found with the first `dimension` numbers of each vector."""

    dimension: int
    scores: dict[str, Scores]
    """By model: `base`, `candidate`, and `champion` if there was one to compare with."""
    lifts: dict[str, dict[str, Interval]]
    """Candidate - each of the others on the same queries, by metric."""


class RetrievalReport(Config):
    """One collection of queries and documents, searched with base, candidate and champion."""

    id: str
    suite: str = "retrieval"
    n: int
    """Queries."""
    groups: int
    """Packages (or other groups) that the queries come from. Those of one group are alike; the intervals know it."""
    pool: int
    """Documents that each query was to be found among."""
    champion: str | None = None
    """Id of the version that `champion` stands for."""
    against: str
    """What the gate compared with, in words, and why where that is not what the recipe asked for."""
    lengths: tuple[AtLength, ...]
    """The whole vector first."""
    seconds: dict[str, float] = Field(default_factory=dict)
    """What embedding took, by model."""
    verdict: GateVerdict

    @property
    def figures(self) -> dict[str, float]:
        """The gate's metrics of base and candidate, by name, for the record of a version."""
        return {
            _figure(called, metric, one.dimension if place else None): one.scores[name].metrics[metric].value
            for place, one in enumerate(self.lengths)
            for name, called in ((BASE, BASE), (CANDIDATE, "embedder"))
            for metric in GATED
        }


@dataclass(frozen=True)
class Embedded:
    """Vectors of a task's queries [Q, D] and documents [N, D], in the order of its mappings."""

    queries: Vectors
    documents: Vectors


def task_of(pairs: Sequence[PairExample], *, pool: int, queries: int | None = None) -> RetrievalTask:
    """The first `pool` pairs as documents, the first `queries` of them (all, if None) as what is asked for.

    Equal texts are one document, which is right for each query it answers. `ConfigError` if there are too few pairs.
    """
    if len(pairs) < pool:
        raise ConfigError(
            f"There are {len(pairs)} held-out pairs, fewer than evaluate.retrieval.pool {pool}.",
            hint="Lower evaluate.retrieval.pool, raise data.test_fraction, or give the source more rows.",
        )
    chosen = pairs[:pool]
    corpus = {content_id(one.positive): one.positive for one in chosen}
    asked: dict[str, str] = {}
    groups: dict[str, str] = {}
    judgements: dict[str, dict[str, int]] = {}
    wanted = {one.query for one in chosen[:queries]}
    for one in chosen:
        if one.query in wanted:
            query = content_id(one.query)
            asked[query] = one.query
            groups[query] = one.group
            judgements.setdefault(query, {})[content_id(one.positive)] = 1
    return RetrievalTask("pairs", corpus, asked, judgements, groups)


def evaluate(
    config: EvaluateConfig,
    *,
    base: StoredModel,
    candidate: Path,
    task: RetrievalTask,
    home: Home,
    champion: Champion | None = None,
    dtype: Dtype = "float32",
    max_tokens: int | None = None,
    sink: Sink = silent,
) -> RetrievalReport:
    """Embed and search with base, candidate and champion, and ask the gate. Needs Ray.

    `dtype` should be what the deployment that will serve computes in; `max_tokens` are read of a text. Raises
    `ConfigError` if a model is no embedder or `retrieval.dims` names a length that its vectors do not have,
    `CapacityError` if the cluster has no room, `DependencyError` if a worker dies.
    """
    opponent = choose_opponent(config.gate, champion, base, candidate)
    models = {BASE: base, CANDIDATE: replace(obtain(str(candidate), home), name=CANDIDATE)}
    if opponent.champion is not None:
        models[CHAMPION] = replace(obtain(str(opponent.champion.path), home), name=CHAMPION)
    texts = [*task.queries.values(), *task.corpus.values()]
    found: dict[str, Embedded] = {}
    seconds: dict[str, float] = {}
    for name, model in models.items():
        sink(Progress("evaluate", 0, len(texts), "texts", note=f"the workers of the {name} start"))
        began = monotonic()
        vectors = embedding.embed(model, texts, home, dtype=dtype, max_tokens=max_tokens, sink=sink)
        seconds[name] = round(monotonic() - began, 1)
        found[name] = Embedded(vectors[: len(task.queries)], vectors[len(task.queries) :])
    retrieval = config.retrieval or RetrievalConfig()
    report = compare(config.gate, retrieval, task, found, opponent=opponent)
    return report.model_copy(update={"seconds": seconds})


def compare(
    gate: GateConfig,
    retrieval: RetrievalConfig,
    task: RetrievalTask,
    vectors: Mapping[str, Embedded],
    *,
    opponent: Opponent,
) -> RetrievalReport:
    """The report on `vectors` by model, with intervals over the task's groups of queries.

    `vectors` are of `base`, `candidate`, and of `champion` if `opponent` is one.
    """
    whole = vectors[CANDIDATE].documents.shape[1]
    if strange := [dim for dim in retrieval.dims if dim > whole]:
        raise ConfigError(
            f"evaluate.retrieval.dims names {strange[0]}; the vectors have {whole} numbers.",
            hint=f"Use lengths below {whole}.",
        )
    rivals = {BASE: "the base"} | ({CHAMPION: opponent.name} if opponent.champion else {})
    lengths = [
        _at(dim, task, {name: vectors[name] for name in (CANDIDATE, *rivals)}, gate.confidence)
        for dim in dict.fromkeys((whole, *sorted(retrieval.dims, reverse=True)))
    ]
    members = set(task.queries if task.groups is None else task.groups.values())
    return RetrievalReport(
        id=f"eval-{uuid.uuid4().hex[:12]}",
        n=len(task.queries),
        groups=len(members),
        pool=len(task.corpus),
        champion=opponent.champion.id if opponent.champion else None,
        against=opponent.described,
        lengths=tuple(lengths),
        verdict=decide(lengths, rivals, pool=len(task.corpus), groups=len(members)),
    )


def rankings(task: RetrievalTask, vectors: Embedded, dimension: int) -> dict[str, list[str]]:
    """Ids of the documents nearest to each query, best first, by the first `dimension` numbers of the vectors."""
    ids = list(task.corpus)
    places = search.nearest(search.cut(vectors.queries, dimension), search.cut(vectors.documents, dimension), FOUND)
    return {query: [ids[place] for place in row] for query, row in zip(task.queries, places.tolist(), strict=True)}


def decide(lengths: Sequence[AtLength], rivals: Mapping[str, str], *, pool: int, groups: int) -> GateVerdict:
    """One check for each gated metric at each length over each of `rivals`: the whole lift must lie above zero.

    The base's are asked for beside the champion's: a chain of champions that each lost a little, too little to be
    sure of, must not end below what everything began with.
    """
    fewest = fewest_groups(lengths[0].lifts[BASE][GATED[0]].confidence)
    checks = []
    for one in lengths:
        for rival, called in rivals.items():
            for metric in GATED:
                lift = one.lifts[rival][metric]
                before, after = one.scores[rival].metrics[metric].value, one.scores[CANDIDATE].metrics[metric].value
                passed = lift.low > 0
                if passed:
                    judgement = "all of it lies above zero"
                elif groups < fewest:
                    judgement = f"{groups} groups cannot show a lift, it takes at least {fewest}"
                else:
                    judgement = "it must lie above zero"
                checks.append(
                    Check(
                        name=f"{metric} at {one.dimension} over {rival}",
                        passed=passed,
                        reason=f"{metric} at {one.dimension} dims over {called} {before:.3f} → {after:.3f}, "
                        f"{lift.value:+.3f} [{lift.low:+.3f}, {lift.high:+.3f}] at {100 * lift.confidence:g} % on "
                        f"{one.scores[CANDIDATE].n} queries of {groups} groups among {pool} documents; {judgement}",
                        details={
                            "metric": metric,
                            "dimension": one.dimension,
                            "against": called,
                            "lift": lift.model_dump(mode="json"),
                        },
                    )
                )
    return GateVerdict.of(*checks)


def _at(
    dimension: int,
    task: RetrievalTask,
    vectors: Mapping[str, Embedded],
    confidence: float,
) -> AtLength:
    found = {
        # A champion from another base may have shorter vectors: it is then compared at its whole length.
        name: ranking.measure(rankings(task, one, min(dimension, one.documents.shape[1])), task.judgements, ks=KS)
        for name, one in vectors.items()
    }
    return AtLength(
        dimension=dimension,
        scores={name: ranking.summarize(one, confidence=confidence, groups=task.groups) for name, one in found.items()},
        lifts={
            name: ranking.lift(found[CANDIDATE], one, confidence=confidence, groups=task.groups)
            for name, one in found.items()
            if name != CANDIDATE
        },
    )


def _figure(name: str, metric: str, dimension: int | None) -> str:
    plain = f"{name}_{metric.replace('@', '_')}"
    return plain if dimension is None else f"{plain}_{dimension}"
