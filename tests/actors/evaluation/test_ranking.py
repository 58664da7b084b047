"""Ranking metrics against values worked out by hand, against trec_eval and against sentence-transformers'."""

import math
from collections.abc import Mapping

import ir_measures
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sentence_transformers.evaluation import InformationRetrievalEvaluator

from actors.evaluation.ranking import Measured, lift, measure, summarize

Graded = dict[str, dict[str, int]]
JUDGED: Graded = {"q1": {"a": 1, "b": 2}, "q2": {"c": 1, "z": 0}}
RANKED = {"q1": ["x", "b", "a"], "q2": ["c", "z"]}


def mean(measured: Measured) -> dict[str, float]:
    return {name: float(values.mean()) for name, values in measured.values.items()}


def test_by_hand() -> None:
    found = measure(RANKED, JUDGED, ks=(1, 3))
    assert found.queries == ("q1", "q2")
    first = {name: values[0] for name, values in found.values.items()}
    assert first["recall@1"] == 0
    assert first["recall@3"] == 1
    assert first["mrr"] == first["mrr@3"] == pytest.approx(1 / 2)
    assert first["map@3"] == pytest.approx((1 / 2 + 2 / 3) / 2)
    ideal = 2 + 1 / math.log2(3)
    assert first["ndcg@3"] == pytest.approx((2 / math.log2(3) + 1 / math.log2(4)) / ideal)
    assert {name: values[1] for name, values in found.values.items()} == dict.fromkeys(found.values, 1)


def test_what_was_not_answered_counts_and_what_cannot_be_answered_does_not() -> None:
    judged = {**JUDGED, "silent": {"a": 1}, "senseless": {"a": 0}}
    found = measure(RANKED, judged, ks=(3,))
    assert found.queries == ("q1", "q2", "silent")
    assert found.values["recall@3"].tolist() == [1, 1, 0]


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="no query has a relevant document"):
        measure({}, {"q": {"a": 0}})
    with pytest.raises(ValueError, match="'q1' names a document twice"):
        measure({"q1": ["a", "a"]}, JUDGED)


documents = st.sampled_from([f"d{number}" for number in range(12)])
graded = st.dictionaries(documents, st.integers(0, 3), min_size=1).filter(lambda grades: max(grades.values()) > 0)
cases = st.dictionaries(
    st.sampled_from([f"q{number}" for number in range(5)]),
    st.tuples(graded, st.lists(documents, unique=True)),
    min_size=1,
)


@given(cases)
def test_it_says_what_trec_eval_says(case: Mapping[str, tuple[dict[str, int], list[str]]]) -> None:
    judged = {query: grades for query, (grades, _) in case.items()}
    ranked = {query: found for query, (_, found) in case.items()}
    # Scores that fall with the rank: trec_eval sorts by them.
    run = {query: {id: float(-rank) for rank, id in enumerate(found)} for query, found in ranked.items()}
    names = {
        "recall@3": ir_measures.R @ 3,
        "hit@3": ir_measures.Success @ 3,
        "ndcg@10": ir_measures.nDCG @ 10,
        "map@10": ir_measures.AP @ 10,
        "mrr": ir_measures.RR,
    }
    theirs = ir_measures.calc_aggregate(list(names.values()), judged, run)
    ours = mean(measure(ranked, judged, ks=(3, 10)))
    for name, their_name in names.items():
        assert ours[name] == pytest.approx(theirs[their_name], abs=1e-9), name


def test_it_says_what_sentence_transformers_says() -> None:
    """On binary grades. Theirs is asked for its figures from scored hits, which needs no model."""
    random = np.random.default_rng(3)
    ids = [f"d{number}" for number in range(200)]
    judged: Graded = {
        f"q{number}": dict.fromkeys(map(str, random.choice(ids, size=int(random.integers(1, 5)), replace=False)), 1)
        for number in range(40)
    }
    ranked = {query: list(map(str, random.permutation(ids)[:100])) for query in judged}
    evaluator = InformationRetrievalEvaluator(
        queries=dict.fromkeys(judged, "text"),
        corpus=dict.fromkeys(ids, "text"),
        relevant_docs={query: set(grades) for query, grades in judged.items()},
        accuracy_at_k=[1, 10],
        precision_recall_at_k=[1, 10],
        mrr_at_k=[10],
        ndcg_at_k=[10],
        map_at_k=[10],
    )
    hits = [
        [{"corpus_id": id, "score": -float(rank)} for rank, id in enumerate(ranked[query])]
        for query in evaluator.queries_ids
    ]
    theirs = evaluator.compute_metrics(hits)
    ours = mean(measure(ranked, judged, ks=(1, 10)))
    assert ours["hit@1"] == pytest.approx(theirs["accuracy@k"][1])
    assert ours["recall@1"] == pytest.approx(theirs["recall@k"][1])
    assert ours["recall@10"] == pytest.approx(theirs["recall@k"][10])
    assert ours["mrr@10"] == pytest.approx(theirs["mrr@k"][10])
    assert ours["ndcg@10"] == pytest.approx(theirs["ndcg@k"][10])
    assert ours["map@10"] == pytest.approx(theirs["map@k"][10])


def many(queries: int, *, right: float, seed: int) -> Measured:
    """Queries of one relevant document, of which a share `right` has it first and the rest not at all."""
    random = np.random.default_rng(seed)
    judged = {f"q{number}": {"a": 1} for number in range(queries)}
    return measure({query: ["a"] if random.random() < right else ["b"] for query in judged}, judged, ks=(1,))


def test_an_interval_is_about_as_wide_as_theory_says() -> None:
    found = summarize(many(400, right=0.5, seed=1)).metrics["recall@1"]
    half = 1.96 * (found.value * (1 - found.value) / 400) ** 0.5
    assert found.high - found.low == pytest.approx(2 * half, rel=0.1)


def test_queries_of_one_group_are_alike_and_tell_less() -> None:
    measured = many(400, right=0.5, seed=1)
    order = np.argsort(measured.values["recall@1"])
    # Groups that are right or wrong as a whole.
    groups = {measured.queries[place]: position // 10 for position, place in enumerate(order)}
    alone, together = summarize(measured).metrics["mrr"], summarize(measured, groups=groups).metrics["mrr"]
    assert together.high - together.low > 2 * (alone.high - alone.low)


def test_slices_are_scored_by_themselves() -> None:
    measured = measure(RANKED, JUDGED, ks=(1,))
    found = summarize(measured, slices={"q1": "hard", "q2": "easy"}).slices
    assert {name: one.metrics["recall@1"].value for name, one in found.items()} == {"easy": 1, "hard": 0}
    assert found["hard"].n == 1


def test_all_right_is_not_certainty() -> None:
    found = summarize(many(100, right=1.1, seed=0)).metrics["recall@1"]
    assert (found.value, found.high) == (1, 1)
    assert found.low == pytest.approx(0.05 ** (1 / 100))


def test_a_lift_that_is_there_is_seen_and_one_that_is_not_is_left_open() -> None:
    base, better = many(300, right=0.4, seed=1), many(300, right=0.6, seed=2)
    assert lift(better, base)["recall@1"].low > 0
    nothing = lift(base, base)["recall@1"]
    assert nothing.low < nothing.value == 0 < nothing.high


def test_a_lift_is_over_the_same_queries_in_any_order() -> None:
    turned = dict(reversed(JUDGED.items()))
    found = lift(measure(RANKED, turned, ks=(1,)), measure(RANKED, JUDGED, ks=(1,)))
    assert found["recall@1"].value == 0
    with pytest.raises(ValueError, match="'q2' was asked of one of the two only"):
        lift(measure(RANKED, JUDGED, ks=(1,)), measure(RANKED, {"q1": {"a": 1}}, ks=(1,)))
