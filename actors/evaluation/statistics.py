"""Confidence intervals for shares of right answers, alone and in pairs. Pure; no randomness.

Cases of one group (a package, a user) are alike, so n cases tell less than n independent ones. The intervals
below are therefore taken at the effective number of cases, n / design effect (Kish 1965), which was found to
cover well for shares from clustered samples (Franco, Little, Louis and Slud 2019, J Surv Stat Methodol 7:334).
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from statistics import NormalDist

from actors.evaluation.report import Interval, Score


def wilson(correct: float, n: float, confidence: float) -> tuple[float, float]:
    """Bounds of a share by Wilson's score interval (1927, JASA 22:209). `n` may be fractional and is > 0."""
    if not n > 0 or not 0 <= correct <= n:
        raise ValueError(f"{correct} of {n} is no share")
    z = _z(confidence)
    share = correct / n
    center = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    # At 0 and n the bound is exact; rounding must not put it on the other side of the estimate.
    return (min(share, max(0.0, center - half)), max(share, min(1.0, center + half)))


def score(right: Sequence[bool], groups: Sequence[Hashable], confidence: float) -> Score:
    """The share of right answers, at the effective number of cases. `groups[i]` is the group of case i."""
    n, correct = len(right), sum(right)
    effective = n / design_effect([float(one) for one in right], groups)
    low, high = wilson(correct / n * effective, effective, confidence)
    return Score(value=correct / n, low=low, high=high, confidence=confidence, correct=correct, n=n)


def paired_difference(
    candidate: Sequence[bool], base: Sequence[bool], groups: Sequence[Hashable], confidence: float
) -> Interval:
    """Candidate's share minus base's on the same cases, at the effective number of cases.

    Both were asked the same cases in the same order, so what both get right or wrong adds no noise: Newcombe's
    square-and-add interval for paired shares (1998, Stat Med 17:2635, method 10).
    """
    pairs = list(zip(candidate, base, strict=True))
    deff = design_effect([float(ours) - float(theirs) for ours, theirs in pairs], groups)
    cells = [pairs.count(cell) / deff for cell in ((True, True), (True, False), (False, True), (False, False))]
    low, high = newcombe(*cells, confidence=confidence)
    value = (sum(candidate) - sum(base)) / len(pairs)
    return Interval(value=value, low=low, high=high, confidence=confidence)


def newcombe(
    both: float, first_only: float, second_only: float, neither: float, *, confidence: float
) -> tuple[float, float]:
    """Bounds of (first - second) from the four counts of a paired table; counts may be fractional."""
    n = both + first_only + second_only + neither
    first, second = (both + first_only) / n, (both + second_only) / n
    low1, high1 = wilson(both + first_only, n, confidence)
    low2, high2 = wilson(both + second_only, n, confidence)
    phi = _correlation(both, first_only, second_only, neither)
    down1, up1, down2, up2 = first - low1, high1 - first, second - low2, high2 - second
    below = math.sqrt(max(0.0, down1**2 - 2 * phi * down1 * up2 + up2**2))
    above = math.sqrt(max(0.0, up1**2 - 2 * phi * up1 * down2 + down2**2))
    return (max(-1.0, first - second - below), min(1.0, first - second + above))


def design_effect(values: Sequence[float], groups: Sequence[Hashable]) -> float:
    """How many times the variance of the mean of `values` is what independent cases would have; at least 1.

    The variance over groups is the sandwich estimate with the G/(G-1) correction. With a single group it cannot
    be told and is taken as 1.
    """
    n = len(values)
    totals: dict[Hashable, float] = defaultdict(float)
    mean = sum(values) / n
    for value, group in zip(values, groups, strict=True):
        totals[group] += value - mean
    number = len(totals)
    squares = sum((value - mean) ** 2 for value in values)
    if number < 2 or n < 2 or squares == 0:
        return 1.0
    independent = squares / (n - 1) / n
    clustered = number / (number - 1) * sum(total**2 for total in totals.values()) / n**2
    return max(1.0, clustered / independent)


def _correlation(both: float, first_only: float, second_only: float, neither: float) -> float:
    """φ of the table, with Newcombe's continuity correction where it is positive."""
    margins = (both + first_only) * (second_only + neither) * (both + second_only) * (first_only + neither)
    if margins == 0:
        return 0.0
    n = both + first_only + second_only + neither
    product = both * neither - first_only * second_only
    corrected = max(product - n / 2, 0.0) if product > 0 else product
    return corrected / math.sqrt(margins)


def _z(confidence: float) -> float:
    return NormalDist().inv_cdf(0.5 + confidence / 2)
