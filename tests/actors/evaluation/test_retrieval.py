"""Retrieval scores against values worked out by hand."""

import pytest

from actors.evaluation.retrieval import mrr, rank_of, recall_at_k, score

RANKS = [1, 2, None, 4, 1]


def test_rank_is_the_place_counted_from_one() -> None:
    assert rank_of("b", ["a", "b", "c"]) == 2
    assert rank_of("z", ["a", "b", "c"]) is None


@pytest.mark.parametrize(("k", "expected"), [(1, 2 / 5), (2, 3 / 5), (3, 3 / 5), (10, 4 / 5)])
def test_recall_counts_the_queries_answered_within_k(k: int, expected: float) -> None:
    assert recall_at_k(RANKS, k) == pytest.approx(expected)


def test_mrr_is_the_mean_of_reciprocal_ranks() -> None:
    assert mrr(RANKS) == pytest.approx((1 + 1 / 2 + 0 + 1 / 4 + 1) / 5)


def test_a_score_holds_each_metric_between_its_bounds() -> None:
    scores = score(RANKS * 40, ks=(1, 10))
    assert scores.n == 200
    assert set(scores.metrics) == {"recall@1", "recall@10", "mrr"}
    assert scores.metrics["recall@1"].value == pytest.approx(0.4)
    for metric in scores.metrics.values():
        assert metric.low < metric.value < metric.high


def test_the_interval_of_a_share_is_about_as_wide_as_theory_says() -> None:
    metric = score([1] * 80 + [None] * 120, ks=(1,)).metrics["recall@1"]
    half_width = 1.96 * (0.4 * 0.6 / 200) ** 0.5
    assert metric.high - metric.low == pytest.approx(2 * half_width, rel=0.1)


def test_more_confidence_is_a_wider_interval_and_the_same_seed_the_same_one() -> None:
    narrow, wide = score(RANKS * 10, confidence=0.8), score(RANKS * 10, confidence=0.99)
    assert wide.metrics["mrr"].low < narrow.metrics["mrr"].low
    assert wide.metrics["mrr"].high > narrow.metrics["mrr"].high
    assert score(RANKS * 10) == score(RANKS * 10)


def test_all_right_has_no_spread() -> None:
    assert score([1, 1, 1]).metrics["mrr"].low == 1.0


def test_no_ranks_cannot_be_scored() -> None:
    with pytest.raises(ValueError, match="no ranks"):
        score([])
