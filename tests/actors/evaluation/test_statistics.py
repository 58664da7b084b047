"""Intervals against published values, and their coverage by simulation."""

import numpy as np
import pytest

from actors.evaluation.statistics import design_effect, newcombe, paired_difference, score, wilson


@pytest.mark.parametrize(
    ("correct", "n", "low", "high"),
    [
        # Newcombe 1998, Stat Med 17:857, table I, method 3.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_equals_published_bounds(correct: int, n: int, low: float, high: float) -> None:
    assert wilson(correct, n, 0.95) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize(
    ("table", "low", "high"),
    [
        # Newcombe 1998, Stat Med 17:2635, table II, method 10.
        ((36, 12, 2, 0), 0.0569, 0.3404),
        # Fagerland, Lydersen and Laake 2013, BMC Med Res Methodol 13:91: airway hyper-responsiveness.
        ((1, 1, 7, 12), -0.507, -0.026),
    ],
)
def test_newcombe_equals_published_bounds(table: tuple[int, int, int, int], low: float, high: float) -> None:
    assert newcombe(*table, confidence=0.95) == pytest.approx((low, high), abs=5e-4)


def test_swapping_the_candidates_mirrors_the_difference() -> None:
    low, high = newcombe(30, 11, 4, 15, confidence=0.9)
    assert newcombe(30, 4, 11, 15, confidence=0.9) == pytest.approx((-high, -low))


def test_a_difference_of_everything_stays_inside_one_and_excludes_zero() -> None:
    found = paired_difference([True] * 40, [False] * 40, range(40), 0.95)
    assert found.value == 1.0
    assert 0.8 < found.low < 1.0
    assert found.high == 1.0


def test_more_confidence_is_a_wider_interval() -> None:
    right = [number % 3 == 0 for number in range(90)]
    narrow, wide = score(right, range(90), 0.8), score(right, range(90), 0.99)
    assert wide.low < narrow.low < narrow.value < narrow.high < wide.high


def test_cases_that_are_copies_count_once() -> None:
    """Ten copies of every case, each set of copies one group: about what the distinct cases alone would give."""
    rng = np.random.default_rng(1)
    distinct = rng.random(50) < 0.4
    copies, groups = np.repeat(distinct, 10).tolist(), np.repeat(np.arange(50), 10).tolist()
    assert design_effect([float(one) for one in copies], groups) == pytest.approx(10, rel=0.03)
    alone, copied = score(distinct.tolist(), range(50), 0.95), score(copies, groups, 0.95)
    assert (copied.low, copied.high) == pytest.approx((alone.low, alone.high), abs=0.01)


@pytest.mark.parametrize(("groups", "spread"), [(400, 0.0), (40, 0.0), (40, 0.25)])
def test_the_paired_interval_holds_the_truth_as_often_as_it_says(groups: int, spread: float) -> None:
    """400 cases in `groups` groups; the candidate's gain differs between groups by `spread`. True mean gain 0.1."""
    rng = np.random.default_rng(7)
    member = np.arange(400) % groups
    hits = 0
    for _ in range(300):
        base_rate = 0.3 + spread * rng.uniform(-1, 1, groups)
        gain = 0.1 + spread * rng.uniform(-1, 1, groups)
        base = rng.random(400) < base_rate[member]
        candidate = rng.random(400) < np.clip(base_rate + gain, 0, 1)[member]
        found = paired_difference(candidate.tolist(), base.tolist(), member.tolist(), 0.95)
        hits += found.low <= 0.1 <= found.high
    # 300 draws of a 95 % interval: fewer than 270 hits has a chance below 0.001.
    assert hits >= 270


def test_without_the_groups_the_same_simulation_is_overconfident() -> None:
    """Why groups are asked for: treated as independent, clustered cases give an interval that misses too often."""
    rng = np.random.default_rng(7)
    member = np.arange(400) % 20
    hits = 0
    for _ in range(300):
        gain = 0.1 + 0.3 * rng.choice([-1, 1], 20)
        base = rng.random(400) < 0.3
        candidate = rng.random(400) < np.clip(0.3 + gain, 0, 1)[member]
        found = paired_difference(candidate.tolist(), base.tolist(), range(400), 0.95)
        hits += found.low <= 0.1 <= found.high
    assert hits < 250


def test_a_share_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no share"):
        wilson(1, 0, 0.95)
