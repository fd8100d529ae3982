"""Shares of independent items that have a property: intervals, and tests."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# Not scipy.stats or statsmodels, which give the same figures: the report of a finished run may cost 1.5 s of CPU, and importing
# these takes 0.6 s and 1 s of it.
from scipy.special import bdtrc, betainccinv, betaincinv, gammaln, ndtri


@dataclass(frozen=True)
class Interval:
    """A confidence interval; ``level`` is its confidence, such as 0.95."""

    low: float
    high: float
    level: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


def clopper_pearson(count: int, n: int, alpha: float) -> Interval:
    """The exact two-sided interval of a share: its coverage is at least ``1 - alpha``.

    Each end alone is a one-sided bound of level ``1 - alpha / 2``. ``n == 0`` gives [0, 1].

    Raises:
        ValueError: `count` is negative or above `n`.
    """
    _check(count, n)
    low = float(betaincinv(count, n - count + 1, alpha / 2)) if count else 0.0
    high = float(betainccinv(count + 1, n - count, alpha / 2)) if count < n else 1.0
    return Interval(low, high, 1 - alpha)


def wilson(count: float, n: float, alpha: float) -> Interval:
    """Wilson's score interval of a share: shorter than the exact one. ``n == 0`` gives [0, 1].

    Args:
        count: items with the property; need not be whole, where items are worth fewer independent ones.
        n: items.
        alpha: one minus the level.

    Raises:
        ValueError: `count` is negative or above `n`.
    """
    _check(count, n)
    if not n:
        return Interval(0.0, 1.0, 1 - alpha)
    share, z2 = count / n, float(ndtri(alpha / 2)) ** 2
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = math.sqrt(z2 * (share * (1 - share) / n + z2 / (4 * n * n))) / (1 + z2 / n)
    # By rounding, the ends would miss 0 and 1.
    return Interval(0.0 if share == 0 else middle - half, 1.0 if share == 1 else middle + half, 1 - alpha)


def _check(count: float, n: float) -> None:
    if not 0 <= count <= n:
        raise ValueError(f"{count} of {n} is not a share")


def p_not_above(count: int, n: int, chance: float) -> float:
    """Exact p value of "the share is at most ``chance``": small where the share is clearly above it. 1 where ``n == 0``."""
    return float(bdtrc(count - 1, n, chance)) if n else 1.0


def fisher_exact_greater(a: int, b: int, c: int, d: int) -> float:
    """p value of Fisher's exact test that the share ``a / (a + b)`` is not larger than ``c / (c + d)``.

    The hypergeometric tail from `a` upwards, as ``scipy.stats.fisher_exact([[a, b], [c, d]], alternative="greater")`` gives it.
    """

    def log_choose(n: npt.ArrayLike, k: npt.ArrayLike) -> npt.NDArray[np.float64]:
        return np.asarray(gammaln(np.add(n, 1)) - gammaln(np.add(k, 1)) - gammaln(np.subtract(n, k) + 1))

    first, second, both = a + b, c + d, a + c
    counts = np.arange(a, min(first, both) + 1)
    log_p = log_choose(first, counts) + log_choose(second, both - counts) - log_choose(first + second, both)
    return min(1.0, float(np.exp(log_p).sum()))
