"""Tests of a bounded mean by betting: their error rates hold at every look, so a run may stop as soon as it has its answer.

A gambler who starts with a wealth of 1 bets on each value before it is seen, at odds that are fair or worse if the null hypothesis
is true. Her wealth is then an *e-process*: with probability at least ``1 - alpha`` it never reaches ``1 / alpha`` (Ville's
inequality), whenever and however often one looks, and for whatever reason one stops. A wealth of ``1 / alpha`` therefore rejects
the null hypothesis at level alpha, and 1 over the largest wealth so far is an anytime-valid p value.

Each bet stakes a fixed share of the wealth, and the wealth is the mixture over the shares of `STAKES`. So only the bounds of the
values are assumed, and nothing is tuned to the loss or to the rate at which answers flip.

Sources: Waudby-Smith and Ramdas, Estimating means of bounded random variables by betting, Journal of the Royal Statistical
Society B 86, 1-27 (2024), sections 4 and 5 (arXiv 2010.09686); Ramdas, Grünwald, Vovk and Shafer, Game-theoretic statistics and
safe anytime-valid inference, Statistical Science 38, 576-601 (2023).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from assay.harness.stats.share import Interval, root

Array = NDArray[np.float64]

STAKES = (0.95, 0.6, 0.4, 0.25, 0.15, 0.08, 0.04)
"""Shares of the wealth staked on each value. The largest wins fastest if no answer flips, the smaller ones if many do. None is 1,
which a single value could ruin."""
WEIGHTS = (0.3, 0.15, 0.15, 0.15, 0.1, 0.1, 0.05)
"""Part of the initial wealth for each share of `STAKES`. Chosen by simulation of equal servers at 0 to 10 % of answers flipped
(``benchmarks/accuracy_errors.py``); any weights are valid."""
# The search for an end of an interval keeps this distance from a bound of the values, where no bets are possible.
_EDGE = 1e-9


def log_wealth(values: ArrayLike, null: float, low: float, high: float, population: int | None = None) -> Array:
    """Compute the logarithm of the wealth of bets that the mean is above `null`, after each value.

    The null hypothesis is "the mean is at most `null`", of the source that the values were drawn from independently, or of a
    finite set of `population` values that are drawn in random order, without replacement. Under the second reading the mean
    of the remaining values, ``(N null - sum so far) / (N - number so far)``, bounds the next value's expectation; the bets are made
    against the larger of this and `null`, so that the test is valid under both readings.

    Args:
        values: shape [n], in the order in which they were drawn; each within the bounds.
        null: strictly between the bounds.
        population: number of values in the finite set, or None if the source is endless.

    Returns:
        Shape [n]: natural logarithm of the wealth, which starts at 0.

    Raises:
        ValueError: `null` or a value is outside the bounds.
    """
    x = np.asarray(values, dtype=float)
    if not low < null < high or (x.size and not (low <= x.min() and x.max() <= high)):
        raise ValueError(f"a mean of {null} and values between {low} and {high} were expected")
    price = _fair_price(x, null, population)
    excess = (x - price) / (price - low)
    wealth = np.log(WEIGHTS)[:, None] + np.cumsum(np.log1p(np.multiply.outer(STAKES, excess)), axis=1)
    return np.asarray(np.logaddexp.reduce(wealth, axis=0))


def log_wealth_below(values: ArrayLike, null: float, low: float, high: float, population: int | None = None) -> Array:
    """Compute `log_wealth` of bets that the mean is below `null`: the null hypothesis is "the mean is at least `null`"."""
    return log_wealth(-np.asarray(values, dtype=float), -null, -high, -low, population)


def p_value(log_wealths: Array) -> float:
    """Compute the anytime-valid p value: 1 over the largest wealth so far, at most 1."""
    return math.exp(-max(0.0, float(log_wealths.max(initial=0.0))))


def betting_interval(
    values: ArrayLike, alpha: float, low: float, high: float, population: int | None = None
) -> Interval:
    """Compute the interval of means that no bets have rejected so far: it holds at every look.

    Each end alone is a one-sided bound of error rate `alpha`, so the level is ``1 - 2 alpha``. An end is beyond a bound of the
    policy exactly if the test of that bound rejects. The interval always contains the mean of the values.
    """
    x = np.asarray(values, dtype=float)
    if not x.size:
        return Interval(low, high, 1 - 2 * alpha)
    mean = float(x.mean())
    lower = _lower_end(x, alpha, low, high, population)
    upper = -_lower_end(-x, alpha, -high, -low, population)
    return Interval(min(lower, mean), max(upper, mean), 1 - 2 * alpha)


def _lower_end(x: Array, alpha: float, low: float, high: float, population: int | None) -> float:
    """Compute the largest rejected null hypothesis "the mean is at most this", or return `low` if none is rejected."""

    def short(null: float) -> float:
        return math.log(1 / alpha) - float(log_wealth(x, null, low, high, population).max())

    least, most = low + _EDGE, high - _EDGE
    if short(least) > 0:
        return low
    return most if short(most) <= 0 else root(short, least, most)


def _fair_price(x: Array, null: float, population: int | None) -> Array:
    """Compute the largest expectation that each value can have under the null hypothesis, given the values before it."""
    if population is None:
        return np.full(x.size, null)
    seen = np.arange(x.size)
    before = np.cumsum(x) - x
    left = np.maximum(population - seen, 1)
    return np.maximum(null, (population * null - before) / left)
