"""Intervals: for one proportion, and for the difference of two that were measured on the same cases. Pure."""

from collections.abc import Sequence
from math import sqrt
from statistics import NormalDist

import numpy as np

from cluster.config import Config

RESAMPLES = 10_000


class Interval(Config):
    """A value and the interval around it."""

    value: float
    low: float
    high: float


def proportion(successes: int, n: int, *, confidence: float) -> Interval:
    """Wilson's score interval (Wilson 1927), which stays within [0, 1] and is honest near both ends.

    Raises `ValueError` unless 0 ≤ successes ≤ n and n > 0.
    """
    if n <= 0 or not 0 <= successes <= n:
        raise ValueError(f"{successes} of {n} is no proportion")
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share = successes / n
    centre = share + z * z / (2 * n)
    half = z * sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    return Interval(value=share, low=max(0.0, (centre - half) / scale), high=min(1.0, (centre + half) / scale))


def paired_difference(
    candidate: Sequence[bool], reference: Sequence[bool], *, confidence: float, seed: int = 0
) -> Interval:
    """candidate − reference with a percentile bootstrap over cases (Efron and Tibshirani 1993, chapter 13).

    Both were asked the same cases in the same order, so cases are resampled in pairs: what both get right or
    wrong adds no noise. Resampling n pairs is one multinomial draw of the three kinds of pair, hence exact and
    fast. The same seed gives the same interval. Raises `ValueError` for unequal or no cases.
    """
    if len(candidate) != len(reference) or not candidate:
        raise ValueError(f"{len(candidate)} and {len(reference)} results are no pairs")
    n = len(candidate)
    gained = sum(ours and not theirs for ours, theirs in zip(candidate, reference, strict=True))
    lost = sum(theirs and not ours for ours, theirs in zip(candidate, reference, strict=True))
    drawn = np.random.default_rng(seed).multinomial(n, [gained / n, lost / n, (n - gained - lost) / n], RESAMPLES)
    tail = (1 - confidence) / 2
    low, high = np.quantile((drawn[:, 0] - drawn[:, 1]) / n, [tail, 1 - tail])
    return Interval(value=(gained - lost) / n, low=float(low), high=float(high))
