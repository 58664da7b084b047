"""Intervals against published values, and their coverage by simulation."""

import numpy as np
import pytest

from actors.evaluation.statistics import (
    design_effect,
    fewest_groups,
    mean_intervals,
    newcombe,
    paired_bootstrap,
    paired_difference,
    percentile,
    score,
    seed_of,
    student,
    wilson,
)


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


@pytest.mark.parametrize(
    ("groups", "skewed", "spread"), [(8, False, 0.3), (12, True, 0.3), (40, False, 0.3), (40, True, 0.0)]
)
def test_the_bootstrap_over_groups_holds_the_truth_as_often_as_it_says(
    groups: int, skewed: bool, spread: float
) -> None:
    """Ten cases a group, or groups of very different sizes; the gain differs between groups by up to `spread`."""
    rng = np.random.default_rng(11)
    hits = above = 0
    for draw in range(200):
        sizes = rng.geometric(0.1, groups) if skewed else np.full(groups, 10)
        member = np.repeat(np.arange(groups), sizes)
        gain = 0.1 + spread * rng.uniform(-1, 1, groups)
        other = rng.random(member.size) < 0.3
        candidate = rng.random(member.size) < np.clip(0.4 + (gain - 0.1), 0, 1)[member]
        found = paired_bootstrap(candidate.tolist(), other.tolist(), member.tolist(), 0.95, seed=draw, resamples=500)
        hits += found.low <= 0.1 <= found.high
        above += found.low > 0.1
    # 200 draws of a 95 % interval: fewer than 179 hits, or 13 above, have a chance below 0.001.
    assert hits >= 179
    assert above <= 13


def test_equal_candidates_pass_no_more_often_than_the_confidence_allows() -> None:
    """The error that moves an alias by luck: no gain on the average, some in every group."""
    rng = np.random.default_rng(5)
    member = np.repeat(np.arange(7), 15)
    passes = 0
    for draw in range(200):
        shift = 0.3 * rng.choice([-1, 1], 7)
        other = rng.random(member.size) < 0.5
        candidate = rng.random(member.size) < (0.5 + shift)[member]
        found = paired_bootstrap(candidate.tolist(), other.tolist(), member.tolist(), 0.95, seed=draw, resamples=500)
        passes += found.low > 0
    assert passes <= 13


def test_the_same_cases_give_the_same_interval_in_any_order_of_their_ids() -> None:
    assert seed_of(["a", "b"]) == seed_of(["b", "a"]) != seed_of(["ab"])
    rng = np.random.default_rng(2)
    ours, theirs = (rng.random(80) < 0.6).tolist(), (rng.random(80) < 0.4).tolist()
    groups = [number % 20 for number in range(80)]
    first, second = (paired_bootstrap(ours, theirs, groups, 0.95, seed=4) for _ in range(2))
    assert first == second
    assert first.low < first.value < first.high


def test_swapping_the_candidates_mirrors_the_bootstrap() -> None:
    rng = np.random.default_rng(2)
    ours, theirs = (rng.random(80) < 0.6).tolist(), (rng.random(80) < 0.4).tolist()
    forth = paired_bootstrap(ours, theirs, range(80), 0.95, seed=1)
    back = paired_bootstrap(theirs, ours, range(80), 0.95, seed=1)
    assert (back.low, back.value, back.high) == pytest.approx((-forth.high, -forth.value, -forth.low), abs=1e-9)


def test_one_group_tells_nothing_however_many_cases_it_has() -> None:
    found = paired_bootstrap([True] * 500, [False] * 500, ["one"] * 500, 0.95, seed=0)
    assert (found.low, found.value, found.high) == (-1.0, 1.0, 1.0)


def test_fewer_groups_than_could_agree_by_luck_tell_nothing() -> None:
    assert (fewest_groups(0.95), fewest_groups(0.99), fewest_groups(0.8)) == (6, 8, 4)
    for groups, passes in ((5, False), (6, True)):
        member = [number % groups for number in range(300)]
        found = paired_bootstrap([True] * 300, [False] * 300, member, 0.95, seed=0)
        assert (found.low > 0) is passes


def test_answers_that_never_differ_leave_the_difference_open() -> None:
    """Resampling zeros gives only zeros; that both answer alike on 40 cases does not prove that they always do."""
    right = [number % 2 == 0 for number in range(40)]
    found = paired_bootstrap(right, right, range(40), 0.95, seed=0)
    assert found.value == 0
    assert found.low < -0.02
    assert found.high > 0.02


def test_a_gain_in_every_case_counts_groups_not_cases() -> None:
    """All alike: nobody can tell whether a group's cases would have differed, so a group counts as one."""
    few = paired_bootstrap([True] * 400, [False] * 400, [number % 8 for number in range(400)], 0.95, seed=0)
    many = paired_bootstrap([True] * 400, [False] * 400, range(400), 0.95, seed=0)
    assert few.low < 0.7 < 0.98 < many.low < 1.0
    assert few.high == many.high == 1.0


def test_cases_and_groups_of_other_lengths_are_the_callers_mistake() -> None:
    with pytest.raises(ValueError, match="8 cases, 7 groups"):
        paired_bootstrap([True] * 8, [False] * 8, range(7), 0.95, seed=0)


def test_an_interval_is_the_same_in_whatever_company() -> None:
    """All values are resampled in one draw, which is the one that each would get by itself."""
    draw = np.random.default_rng(4)
    values = {"some": draw.random(60), "none": np.zeros(60), "half": (draw.random(60) > 0.5).astype(np.float64)}
    groups = [number % 12 for number in range(60)]
    together = mean_intervals(values, groups, 0.95, seed=0)
    for name, given in values.items():
        (alone,) = mean_intervals({name: given}, groups, 0.95, seed=0).values()
        assert (alone.low, alone.high) == pytest.approx((together[name].low, together[name].high), abs=1e-12)
    assert together["none"].low == 0 < together["none"].high < together["some"].low < together["some"].high
    assert mean_intervals({}, groups, 0.95, seed=0) == {}


@pytest.mark.parametrize(("freedom", "published"), [(5, 2.571), (7, 2.365), (11, 2.201), (39, 2.023), (1000, 1.962)])
def test_student_equals_published_quantiles(freedom: int, published: float) -> None:
    assert student(0.975, freedom) == pytest.approx(published, rel=0.003)


def test_a_percentile_is_a_measured_value() -> None:
    values = [float(number) for number in range(200, 0, -1)]
    assert (percentile(values, 0.5), percentile(values, 0.99)) == (100.0, 198.0)
    assert percentile([0.3, 0.1, 0.2], 0.99) == 0.3
    with pytest.raises(ValueError, match="no value"):
        percentile([], 0.5)
