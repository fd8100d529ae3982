"""Has the mean of a series changed, and after which point? A test with a stated rate of false alarms."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_PERMUTATIONS = 9_999
"""Random orders that are drawn at most, unless more are needed for a p value as small as is asked for."""
_BATCH = 200_000
"""Numbers that are permuted at once."""
_FIRST = 200
"""Permutations that are drawn at first; then as many again as there were."""
_CLEAR = 25
"""Permutations that reach the observed statistic, after which p is above any alpha of use, and no more are drawn."""


def change(values: Sequence[float], groups: Sequence[int], alpha: float) -> tuple[int, float]:
    """Find the point after which the mean of a series is another one, and how often chance alone would show as much.

    The statistic is the largest t of Student's test over all splits, the likelihood-ratio test of a change of the mean at an
    unknown point. Its null distribution is that of the same values in random orders, so p is valid for any distribution: it is at
    most alpha in at most a share alpha of the series that do not change and whose values are exchangeable.

    Source: Worsley, On the likelihood ratio test for a shift in location of normal populations, Journal of the American Statistical
    Association 74, 365-367 (1979); permutation: Antoch and Huskova, Permutation tests in change point analysis, Statistics and
    Probability Letters 53, 37-46 (2001).

    Args:
        values: in order; finite.
        groups: number of the group of each, not decreasing, such as its commit: a change is between two groups.
        alpha: what p will be compared with: p is estimated well enough to be below it.

    Returns:
        The index of the first value after the change, and p; (0, 1.0) where there are fewer than two groups or two values.
    """
    x = np.asarray(values, dtype=float)
    splits = np.flatnonzero(np.diff(np.asarray(groups))) + 1
    if not splits.size or np.ptp(x) == 0:
        return 0, 1.0
    x = (x - x.mean()) / x.std()
    observed = _shares(x[None, :], splits)[0]
    best = int(np.argmax(observed))
    limit = observed[best] * (1 - 1e-9)  # equal up to rounding is equal: most series of shares have ties
    # The same numbers give the same p, but no two series share their random orders: one unlucky order would mislead them all.
    random = np.random.default_rng(list(x.tobytes()))
    most = max(_PERMUTATIONS, math.ceil(2 / alpha))
    drawn = reached = 0
    while drawn < most and reached < _CLEAR:
        now = min(_FIRST + drawn, most - drawn, max(1, _BATCH // len(x)))
        orders = random.permuted(np.broadcast_to(x, (now, len(x))), axis=1)
        reached += int((_shares(orders, splits).max(axis=1) >= limit).sum())
        drawn += now
    return int(splits[best]), (1 + reached) / (1 + drawn)


def _shares(rows: NDArray[np.float64], splits: NDArray[np.int64]) -> NDArray[np.float64]:
    """Share of the variance that each split explains, by row of standardised values: it increases with Student's t."""
    n = rows.shape[1]
    before = np.cumsum(rows, axis=1)[:, splits - 1]
    return np.asarray(before**2 / (splits * (n - splits)))


def changes(values: Sequence[float], groups: Sequence[int], alpha: float) -> list[tuple[int, float]]:
    """Find all changes, first to last, by splitting at the clearest one and testing both parts again.

    In a series without a change, any is found with a probability of at most `alpha`. One that changed and came back may be missed:
    the clearest split is between two means, not three.

    Returns:
        The index of the first value after each, and its p.
    """
    at, p = change(values, groups, alpha)
    if p > alpha:
        return []
    later = [(at + index, q) for index, q in changes(values[at:], groups[at:], alpha)]
    return [*changes(values[:at], groups[:at], alpha), (at, p), *later]
