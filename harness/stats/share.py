"""Shares of independent items that have a property: intervals and tests.

`scipy.special` is imported where it is needed, since it takes 0.2 s (`scipy.stats` 0.6 s).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """A confidence interval with its confidence ``level``, such as 0.95."""

    low: float
    high: float
    level: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


def clopper_pearson(count: int, n: int, alpha: float) -> Interval:
    """Compute the exact two-sided interval of a share: its coverage is at least ``1 - alpha``.

    Each end alone is a one-sided bound of level ``1 - alpha / 2``. ``n == 0`` gives [0, 1].

    Raises:
        ValueError: `count` is negative or above `n`.
    """
    from scipy.special import betaincinv

    _check(count, n)
    # Where a tail of the binomial distribution is alpha / 2: both are quantiles of beta distributions.
    low = float(betaincinv(count, n - count + 1, alpha / 2)) if count else 0.0
    high = float(betaincinv(count + 1, n - count, 1 - alpha / 2)) if count < n else 1.0
    return Interval(low, high, 1 - alpha)


def _check(count: float, n: float) -> None:
    if not 0 <= count <= n:
        raise ValueError(f"{count} of {n} is not a share")


def p_not_above(count: int, n: int, chance: float) -> float:
    """Compute the exact p value of "the share is at most ``chance``": small if it is clearly above; 1 if ``n == 0``."""
    from scipy.special import bdtrc

    return float(bdtrc(count - 1, n, chance)) if n and count else 1.0


def mcnemar(lost: int, gained: int) -> float:
    """Run McNemar's exact test of equal accuracies, two-sided: two roles answered the same questions, and only flips count.

    Returns:
        The p value, which is 1 if no answer flipped.
    """
    from scipy.special import bdtr

    return min(1.0, 2 * float(bdtr(min(lost, gained), lost + gained, 0.5)))


def mcnemar_of_loss(lost: int, gained: int) -> float:
    """Run the same test one-sided: the p value of "the candidate is no worse"."""
    return p_not_above(lost, lost + gained, 0.5)


def fisher_exact_greater(a: int, b: int, c: int, d: int) -> float:
    """Compute the p value of Fisher's exact test that the share ``a / (a + b)`` is not larger than ``c / (c + d)``."""
    from scipy.stats import hypergeom

    return float(hypergeom.sf(a - 1, a + b + c + d, a + c, a + b))


def root(f: Callable[[float], float], low: float, high: float) -> float:
    """Find the root of a function that changes its sign between `low` and `high`, by bisection to 1e-13.

    Raises:
        ValueError: its signs there are equal.
    """
    # Not scipy.optimize.brentq, which takes 0.3 s to import.
    if f(high) == 0:
        return high
    rising = f(high) > 0
    if (f(low) > 0) == rising:
        raise ValueError(f"f({low}) = {f(low)} and f({high}) = {f(high)} have the same sign")
    while high - low > 1e-13:
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (low, middle) if (f(middle) > 0) == rising else (middle, high)
    return (low + high) / 2
