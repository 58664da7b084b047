"""Base and candidate search one pool; figures are sentence-transformers', the gate asks for lift at any length."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from sentence_transformers.util import cos_sim

from actors.data.examples import PairExample
from actors.evaluation import ranking, retrieval, search
from actors.evaluation.beir import RetrievalTask
from actors.evaluation.config import EvaluateConfig, GateConfig, RetrievalConfig
from actors.evaluation.evaluate import Champion, Opponent
from actors.evaluation.retrieval import Embedded, RetrievalReport
from cluster.errors import ConfigError

GATE = GateConfig()
NONE = Opponent(None, "the base", "the base: there is no champion yet")
CHAMPION = Opponent(Champion("tuned/1", Path("tuned"), "digest", whole=True), "the champion tuned/1", "the champion")
PAIRS = [PairExample(str(n), f"query {n}", f"text {n}", f"g{n % 20}") for n in range(120)]
TASK = retrieval.task_of(PAIRS, pool=120)


def vectors(task: RetrievalTask, *, noise: float, seed: int = 0, dimension: int = 16) -> Embedded:
    """Documents at random; each query is its document and some noise."""
    rng = np.random.default_rng(seed)
    documents = rng.normal(size=(len(task.corpus), dimension)).astype(np.float32)
    place = {id: number for number, id in enumerate(task.corpus)}
    right = [place[next(iter(task.judgements[query]))] for query in task.queries]
    queries = documents[right] + noise * rng.normal(size=(len(right), dimension)).astype(np.float32)
    return Embedded(queries.astype(np.float32), documents)


def compared(noise: Mapping[str, float], *, opponent: Opponent = NONE, dims: tuple[int, ...] = ()) -> RetrievalReport:
    """The report on models that find their documents through so much noise."""
    found = {name: vectors(TASK, noise=much) for name, much in noise.items()}
    return retrieval.compare(GATE, RetrievalConfig(pool=120, dims=dims), TASK, found, opponent=opponent)


def test_search_is_exact_whatever_the_block() -> None:
    rng = np.random.default_rng(1)
    queries, documents = (search.cut(rng.normal(size=(n, 8)).astype(np.float32), 8) for n in (7, 50))
    wanted = np.argsort(-(queries @ documents.T), axis=1, kind="stable")
    for k, block in ((1, 50), (10, 200), (50, 10_000), (99, 1)):
        np.testing.assert_array_equal(search.nearest(queries, documents, k, block_scores=block), wanted[:, :k])


def test_of_equally_near_documents_the_first_comes_first() -> None:
    documents = np.ones((6, 4), dtype=np.float32) / 2
    assert search.nearest(documents[:1], documents, 3).tolist() == [[0, 1, 2]]


def test_a_cut_vector_has_length_one_again() -> None:
    cut = search.cut(np.array([[3, 4, 12], [0, 0, 5]], dtype=np.float32), 2)
    np.testing.assert_allclose(cut, [[0.6, 0.8], [0, 0]], rtol=1e-6)
    with pytest.raises(ValueError, match="have no first 4"):
        search.cut(cut, 4)


def test_figures_are_those_of_sentence_transformers() -> None:
    task = retrieval.task_of(PAIRS, pool=120, queries=60)
    found = vectors(task, noise=1.5)

    class Given:
        """What the evaluator asks of a model: here the vectors are known already."""

        def encode_query(self, texts: list[str], **_: object) -> Any:
            return self._of(task.queries, found.queries, texts)

        def encode_document(self, texts: list[str], **_: object) -> Any:
            return self._of(task.corpus, found.documents, texts)

        def _of(self, known: Mapping[str, str], rows: Any, texts: list[str]) -> Any:
            place = {text: number for number, text in enumerate(known.values())}
            return torch.from_numpy(rows[[place[text] for text in texts]])

    evaluator = InformationRetrievalEvaluator(
        dict(task.queries),
        dict(task.corpus),
        {query: set(graded) for query, graded in task.judgements.items()},
        mrr_at_k=[10],
        ndcg_at_k=[10],
        map_at_k=[100],
        accuracy_at_k=[1],
        precision_recall_at_k=[1, 10],
        score_functions={"cosine": cos_sim},
        write_csv=False,
    )
    theirs = evaluator.compute_metrices(Given())["cosine"]
    ours = ranking.measure(retrieval.rankings(task, found, 16), task.judgements, ks=retrieval.KS).values
    for name, value in (
        ("recall@1", theirs["recall@k"][1]),
        ("recall@10", theirs["recall@k"][10]),
        ("mrr@10", theirs["mrr@k"][10]),
        ("ndcg@10", theirs["ndcg@k"][10]),
        ("map@100", theirs["map@k"][100]),
    ):
        assert ours[name].mean() == pytest.approx(value, abs=1e-9), name


def test_a_lift_at_every_length_opens_the_gate() -> None:
    report = compared({"base": 2.5, "candidate": 0.3}, dims=(8,))
    assert report.verdict.passed
    assert [one.dimension for one in report.lengths] == [16, 8]
    assert (report.n, report.groups, report.pool) == (120, 20, 120)
    assert [check.name for check in report.verdict.checks] == [
        "recall@1 at 16 over base",
        "mrr@100 at 16 over base",
        "recall@1 at 8 over base",
        "mrr@100 at 8 over base",
    ]
    whole = report.lengths[0]
    after, before = (whole.scores[name].metrics["mrr@100"].value for name in ("candidate", "base"))
    assert whole.lifts["base"]["mrr@100"].value == pytest.approx(after - before)
    assert report.figures["embedder_recall_1"] == whole.scores["candidate"].metrics["recall@1"].value
    assert report.figures["base_mrr_100_8"] == report.lengths[1].scores["base"].metrics["mrr@100"].value


def test_a_lift_that_is_lost_when_vectors_are_cut_does_not() -> None:
    base, tuned = vectors(TASK, noise=1.0), vectors(TASK, noise=0.1)
    tuned.queries[:, :8] = np.random.default_rng(3).normal(size=(120, 8))  # all that is right is in the second half
    tuned.queries[:, 8:] *= 30
    tuned.documents[:, 8:] *= 30
    settings = RetrievalConfig(pool=120, dims=(8,))
    found = {"base": base, "candidate": tuned}
    report = retrieval.compare(GATE, settings, TASK, found, opponent=NONE)
    assert [check.passed for check in report.verdict.checks] == [True, True, False, False]
    assert "recall@1 at 8 dims over the base" in report.verdict.reason
    assert "it must lie above zero" in report.verdict.reason


def test_the_same_vectors_lift_nothing() -> None:
    assert not compared({"base": 1.0, "candidate": 1.0}).verdict.passed


@pytest.mark.parametrize(("noise", "passed"), [(0.9, True), (0.1, False)], ids=["worse", "better"])
def test_whoever_beats_the_base_takes_no_alias_from_a_better_champion(noise: float, passed: bool) -> None:
    report = compared({"base": 2.5, "candidate": 0.5, "champion": noise}, opponent=CHAMPION)
    assert report.verdict.passed is passed
    assert report.champion == "tuned/1"
    checks = {check.name: check.passed for check in report.verdict.checks}
    assert checks["recall@1 at 16 over base"]
    assert checks["recall@1 at 16 over champion"] is passed
    assert report.verdict.checks[2].reason.startswith("recall@1 at 16 dims over the champion tuned/1")


def test_a_champion_of_shorter_vectors_is_compared_at_its_whole_length() -> None:
    found = {name: vectors(TASK, noise=noise) for name, noise in (("base", 2.5), ("candidate", 0.5))}
    found["champion"] = vectors(TASK, noise=0.9, dimension=4)
    report = retrieval.compare(GATE, RetrievalConfig(pool=120), TASK, found, opponent=CHAMPION)
    assert [one.dimension for one in report.lengths] == [16]
    assert report.lengths[0].scores["champion"].metrics["recall@1"].value < 1


def test_too_few_groups_say_so() -> None:
    found = {name: vectors(TASK, noise=noise) for name, noise in (("base", 2.5), ("candidate", 0.1))}
    few = replace(TASK, groups={query: str(place % 3) for place, query in enumerate(TASK.queries)})
    report = retrieval.compare(GATE, RetrievalConfig(pool=120), few, found, opponent=NONE)
    assert "3 groups cannot show a lift, it takes at least 6" in report.verdict.reason


def test_equal_texts_are_one_document_and_equal_queries_one_query() -> None:
    twice = [*PAIRS[:2], PairExample("x", "query 0", "text 5", "g"), PairExample("y", "query 9", "text 1", "g")]
    task = retrieval.task_of(twice, pool=4)
    assert (len(task.corpus), len(task.queries)) == (3, 3)
    assert sorted(map(len, task.judgements.values())) == [1, 1, 2]


def test_too_small_a_pool_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"120 held-out pairs, fewer than evaluate\.retrieval\.pool 5000"):
        retrieval.task_of(PAIRS, pool=5000)


def test_a_length_that_vectors_do_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="dims names 17; the vectors have 16"):
        compared({"base": 1.0, "candidate": 1.0}, dims=(17,))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"suites": ["retrieval"], "gate": {"budget": {"p99_latency_s": 1}}}, r"gate\.budget is of suites that ask"),
        ({"suites": ["retrieval"], "retrieval": {"pool": 10, "beir": "scifact"}}, "of a beir folder all is searched"),
        ({"retrieval": {"pool": 10}}, r"set suites to \[retrieval\]"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        EvaluateConfig.model_validate(settings)
