"""A loss of accuracy against a margin, from a fixed number of paired answers: an exact test and its interval.

For complete results whose content did not decide when to stop, such as the logs of two finished evaluations. A run that may
stop as soon as its answers decide needs `assay.harness.stats.betting` instead, whose error rates hold at every look.

Of n questions, the candidate lost L and gained G; the loss is (p_L - p_G). The statistic is Tango's score statistic, which
estimates the nuisance parameter, the share of flips, under the null hypothesis. Its normal approximation is too lenient if few
answers flip: at a margin of 0.02 it passes from 133 questions without a flip, although a candidate that loses exactly the
margin shows no flip in 6.8 % of cases. So only the order of outcomes is taken from it, and the p value is exact: the largest
probability, over the shares of flips that the data allow, of an outcome at least as extreme.

Sources: Tango, Equivalence test and confidence interval for the difference in proportions for the paired-sample design,
Statistics in Medicine 17, 891-908 (1998); Suissa and Shuster, The 2 x 2 matched-pairs trial, Biometrics 47, 361-372 (1991);
Berger and Boos, P values maximized over a confidence set for the nuisance parameter, JASA 89, 1012-1016 (1994).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from assay.harness.stats.share import Interval, clopper_pearson

# Error rate of the interval for the share of flips over which the p value is maximised; it is added to the p value.
_BERGER_BOOS = 1e-6
# Shares of flips to try; 512 changed none of five p values by more than 5e-5.
_GRID = 64
# Precision of the ends of an interval of the loss.
_ENDS = 1e-4

_Floats = NDArray[np.float64]


@lru_cache(maxsize=4096)
def p_not_below(lost: int, gained: int, n: int, margin: float) -> float:
    """Compute the exact p value of "the loss is at least `margin`": small if the loss is shown to be below.

    Args:
        n: questions, fixed before any was asked.
        margin: a difference of two shares, strictly between -1 and 1.

    Raises:
        ValueError: the counts do not fit `n` questions, or the margin is out of range.
    """
    if not (lost >= 0 <= gained and lost + gained <= n and -1 < margin < 1):
        raise ValueError(f"{lost} lost and {gained} gained of {n}, with a margin of {margin}")
    if not n:
        return 1.0
    observed = float(_score(np.array([lost], float), np.array([gained], float), n, margin)[0])
    flips = np.arange(n + 1)
    most = _most_lost(observed, flips, n, margin)
    allowed = clopper_pearson(lost + gained, n, _BERGER_BOOS)
    low, high = max(allowed.low, abs(margin)), max(allowed.high, abs(margin))
    worst = max(_probability(most, n, margin, share) for share in np.linspace(low, high, _GRID))
    return min(1.0, worst + _BERGER_BOOS)


def p_not_above(lost: int, gained: int, n: int, margin: float) -> float:
    """Compute the exact p value of "the loss is at most `margin`": small if it is shown to be above. See `p_not_below`."""
    return p_not_below(gained, lost, n, -margin)


def loss_interval(lost: int, gained: int, n: int, alpha: float) -> Interval:
    """Compute the losses that no exact test rejects at level `alpha`; their level is ``1 - 2 alpha``. [-1, 1] without questions."""
    if not n:
        return Interval(-1.0, 1.0, 1 - 2 * alpha)
    loss = (lost - gained) / n
    high = _end(lambda bound: p_not_below(lost, gained, n, bound) <= alpha, loss)
    low = -_end(lambda bound: p_not_below(gained, lost, n, bound) <= alpha, -loss)
    return Interval(low, high, 1 - 2 * alpha)


def _end(rejected: Callable[[float], bool], inside: float) -> float:
    low, high = max(inside, -1 + _ENDS), 1 - _ENDS
    if not rejected(high):
        return 1.0
    while high - low > _ENDS:
        middle = (low + high) / 2
        low, high = (low, middle) if rejected(middle) else (middle, high)
    return high


def _score(lost: _Floats, gained: _Floats, n: int, margin: float) -> _Floats:
    """Compute Tango's score statistic of "the loss is `margin`": negative if the observed loss is below it."""
    b = -lost - gained + (2 * n - lost + gained) * margin
    c = -gained * margin * (1 - margin)
    q = (np.sqrt(np.maximum(b * b - 8 * n * c, 0)) - b) / (4 * n)  # the share of gains under the null hypothesis
    variance = n * (2 * q + margin * (1 - margin))
    with np.errstate(divide="ignore", invalid="ignore"):
        z = (lost - gained - n * margin) / np.sqrt(variance)
    certain = np.copysign(np.inf, lost - gained - n * margin)
    return np.where(variance > 0, z, np.where(lost - gained == n * margin, 0.0, certain))


def _most_lost(observed: float, flips: NDArray[np.int64], n: int, margin: float) -> NDArray[np.int64]:
    """Find, for each number of flips, the largest number of losses at least as extreme as the observed one, or -1 if none is."""
    low, high = np.full(flips.shape, -1), flips.copy()
    while (open_ := low < high).any():
        middle = (low + high + 1) // 2
        within = _score(middle.astype(float), (flips - middle).astype(float), n, margin) <= observed + 1e-9
        low = np.where(open_ & within, middle, low)
        high = np.where(open_ & ~within, middle - 1, high)
    return low


def _probability(most: NDArray[np.int64], n: int, margin: float, share: float) -> float:
    """Compute the probability of at most `most[k]` losses among k flips if each question flips with probability `share`."""
    from scipy.special import bdtr, gammaln  # takes 0.2 s to import

    spread = 10 * math.sqrt(n * share * (1 - share)) + 10
    k = np.arange(max(0, int(n * share - spread)), min(n, int(n * share + spread)) + 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1)
        logs = logs + np.where(k > 0, k * math.log(share) if share else -math.inf, 0.0)
        logs = logs + np.where(k < n, (n - k) * (math.log1p(-share) if share < 1 else -math.inf), 0.0)
    lost = min(1.0, max(0.0, (1 + margin / share) / 2)) if share else 0.5
    tail = np.where(most[k] < 0, 0.0, bdtr(np.maximum(most[k], 0), k, lost))
    return float(np.exp(logs) @ tail)
