"""Log ratios of times measured side by side -> an interval, and a decision against a bound.

The estimate is Hodges and Lehmann's, with the interval of Wilcoxon's signed-rank test. It assumes that a log ratio is as likely to
lie above the truth by some amount as below it; the random order of the blocks of a pair makes this so. It was chosen by
measurement. In 1,000 simulated runs of 4, 7 and 15 rounds, on a drifting clock, with normal, t(3), skewed and stalling noise, at
a nominal 0.95, it covered in 0.937 to 0.970, with a width of 4.6 % if a tenth of 60 blocks stalls. Student's t on the mean log
ratio covered in 0.939 to 0.986, with a width of 20.2 % there; the percentile bootstrap in 0.862 to 0.935; BCa in 0.775 to 0.928.

The test also assumes that the ratios are independent. On a busy machine they are not: one server is slowed down for seconds at a
time. (In ten measurements of two equal servers on a GPU, 20 s each, five intervals missed 1.) The statistic's variance is therefore
multiplied by the dependence that the ratios show; see `dependence`. Coverage in 400 simulated runs each of 6 to 120 rounds
(``benchmarks/intervals.py``), with this factor and without:

    independent ratios                                      0.95 to 0.99    0.93 to 0.96
    one server 15 % slower for 5 to 20 rounds at times      0.92 to 0.98    0.32 to 0.90
    an autoregression of 0.8 from round to round            0.76 to 0.97    0.40 to 0.49

For independent ratios, the intervals are a tenth wider at 30 rounds. Of two servers that are equal over time, one was called
slower, by a bound of 1, in at most 0.05 of these runs (up to 0.24 without the factor), except at an autoregression of 0.95; for a
bench of several loads see `_dependence_of_run`. No interval can account for a disturbance as long as the measurement.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from assay.harness.stats.multiple import holm
from assay.harness.stats.share import Interval
from assay.harness.verdict import Verdict

MIN_RATIOS = 6
"""Fewer ratios give no verdict: an interval of level 0.95 would then be unbounded."""
# A round is warm once neither role's blocks take more than this multiple of their later time.
_WARM_FACTOR = 1.10
# Autocorrelations of one series are computed up to a third of its length: larger lags average too few products.
# Those of several series together reach to half of it.
_MAX_LAG_FRACTION = 3
# Most iterations of a dependence, and the change at which they end: it is known to a tenth at best.
_ITERATIONS, _CONVERGED = 100, 1e-3
# Error rate of the interval that gives the standard error of a p value.
_P_ALPHA = 0.05
# Random assignments of blocks to roles for the p value of a ratio of means.
_DRAWS = 9999
# Up to this many ratios the null distribution is exact; above, it is normal, as in scipy.stats.wilcoxon.
_EXACT_MAX_N = 50


@dataclass(frozen=True)
class _Ratio:
    """A ratio of times; above 1 is slower.

    Attributes:
        value: Hodges and Lehmann's estimate, the median of the mean log ratios of all pairs, or nan without ratios.
        interval: two-sided; from 0 to infinity if too few ratios were measured for its level.
        effective: effective sample size: the number of independent ratios that they are worth, at most `n`.
    """

    value: float
    interval: Interval
    n: int
    effective: float


def ratio_of(logs: Sequence[float], alpha: float, least: float = 1.0) -> _Ratio:
    """Compute the ratio and its interval of level ``1 - alpha``, from log ratios in the order of measurement.

    Without dependence it is the exact signed-rank interval, of this level or slightly more. Otherwise the variance of the statistic
    is multiplied by the dependence, and Student's t for the effective sample size replaces the normal distribution; the interval is
    never wider than the range of the ratios.

    Args:
        least: dependence to assume if the ratios show less.

    Source: Hollander, Wolfe and Chicken, Nonparametric Statistical Methods, 3rd ed., sections 3.2 and 3.3.
    """
    n = len(logs)
    if not n:
        return _Ratio(math.nan, Interval(0.0, math.inf, 1 - alpha), 0, 0.0)
    values = np.asarray(logs, dtype=float)
    means = _means(values)
    middle = float(np.median(means))
    factor = max(dependence(values - middle), least)
    beyond = _beyond(n, alpha / 2)
    if beyond > 0 and factor > 1:
        from scipy.special import stdtrit  # takes 0.2 s to import, and only timings need it

        mean, spread = _moments(n)
        quantile = float(stdtrit(_freedom(n / factor), alpha / 2))
        beyond = min(beyond, max(0, math.floor(mean + quantile * spread * math.sqrt(factor) - 0.5)))
    low, high = (means[beyond], means[-1 - beyond]) if beyond >= 0 else (-math.inf, math.inf)
    return _Ratio(math.exp(middle), Interval(math.exp(low), math.exp(high), 1 - alpha), n, n / factor)


def _means(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute the means of all pairs, including each value with itself, in ascending order."""
    return np.sort(np.add.outer(values, values)[np.triu_indices(len(values))] / 2)


def dependence(*residuals: NDArray[np.float64]) -> float:
    """Compute the factor, at least 1 (independence), by which autocorrelation raises the signed-rank statistic's variance.

    It is the integrated autocorrelation time of the residuals' signed ranks (so that a stall counts for no more than its rank):
    1 + 2 (the sum of the autocorrelations), over all series together. Sums of two consecutive autocorrelations are added, each at
    most as large as the one before, until one is not positive.

    Since the mean is estimated, each autocovariance of n values is too small by the mean's variance, which is this factor times the
    variance over n: both are solved for by iteration.

    Args:
        residuals: for each series, log ratios minus their estimate, in the order of measurement.

    Sources: Geyer, Practical Markov chain Monte Carlo, Statistical Science 7, 473-483 (1992), initial monotone sequence; Percival,
    Three curious properties of the sample variance and autocovariance, The American Statistician 47, 274-276 (1993).
    """
    from scipy.stats import rankdata  # takes 0.6 s to import, and only timings need it

    scores = [np.sign(series) * rankdata(np.abs(series)) for series in residuals]
    scores = [series - series.mean() for series in scores]
    power, n = sum(float(series @ series) for series in scores), min(map(len, scores))
    if not power:
        return 1.0
    lags = range(1, n // (_MAX_LAG_FRACTION if len(scores) == 1 else 2) + 1)
    products = [sum(float(series[lag:] @ series[:-lag]) for series in scores) for lag in lags]
    measured = np.array([1.0, *(product / power * n / (n - lag) for lag, product in zip(lags, products, strict=True))])
    factor = 1.0
    for _ in range(_ITERATIONS):
        correlations = measured + (1 - measured) * factor / n
        total, last = -1.0, math.inf
        for even, following in zip(correlations[0::2], correlations[1::2], strict=False):
            last = min(last, even + following)
            if last <= 0:
                break
            total += 2 * last
        before, factor = factor, min(max(1.0, total), float(n))
        if abs(factor - before) < _CONVERGED:
            break
    return factor


def _moments(n: int) -> tuple[float, float]:
    """Compute the mean and standard deviation of the signed-rank statistic of n independent values."""
    return n * (n + 1) / 4, math.sqrt(n * (n + 1) * (2 * n + 1) / 24)


@cache
def _beyond(n: int, tail: float) -> int:
    """Count the ordered means of pairs outside each end of the interval: the largest k with P(signed-rank sum <= k) <= tail.

    Return -1 if no k satisfies this.
    """
    if n > _EXACT_MAX_N:
        mean, spread = _moments(n)
        return math.floor(mean + NormalDist().inv_cdf(tail) * spread - 0.5)
    counts = np.ones(1)
    for rank in range(1, n + 1):
        with_rank = np.zeros(len(counts) + rank)
        with_rank[: len(counts)] = counts
        with_rank[rank:] += counts
        counts = with_rank
    return int(np.searchsorted(np.cumsum(counts) / counts.sum(), tail, side="right")) - 1


def _p_at_most(logs: Sequence[float], bound: float, least: float = 1.0) -> float:
    """Compute the one-sided p value of "the ratio is at most ``bound``": small if the ratio is clearly above it.

    The larger of two p values: Wilcoxon's signed-rank test, which assumes no distribution but ignores dependence; and, if there is
    dependence, Student's t of the distance in standard errors, taken from the width of the interval, which accounts for it. So
    autocorrelated ratios prove less near the bound, but no less far beyond it.
    """
    from scipy.special import stdtr, stdtrit
    from scipy.stats import wilcoxon  # takes 0.6 s to import, and only timings need it

    above = np.asarray(logs, dtype=float) - math.log(bound)
    if not above.any():
        return 1.0
    p = float(wilcoxon(above, alternative="greater").pvalue)
    ratio = ratio_of(logs, _P_ALPHA, least)
    width = math.log(ratio.interval.high / ratio.interval.low) / 2 if ratio.interval.low else math.inf
    if ratio.effective == ratio.n or not 0 < width < math.inf:
        return p
    freedom = _freedom(ratio.effective)
    error = width / -float(stdtrit(freedom, _P_ALPHA / 2))
    return max(p, float(stdtr(freedom, -math.log(ratio.value / bound) / error)))


def _freedom(effective: float) -> float:
    """Compute the degrees of freedom of Student's t for an effective sample size."""
    return max(2.0, effective - 1)


def _mean_ratio(rounds: Sequence[Sequence[float]], bound: float) -> tuple[float, float]:
    """Compute a ratio of means, which slow requests raise however rare they are, and the p value of "it is at most the bound".

    The four blocks of a round were played in random order, so each of the six assignments to two roles was equally likely. Divided
    by the bound, the candidate's sum is compared with the sums under other assignments, whatever the distribution of the times.

    Sources: Edgington and Onghena, Randomization Tests, 4th ed., chapter 3; Phipson and Smyth, Permutation p-values should never be
    zero, Statistical Applications in Genetics and Molecular Biology 9 (2010), for counting the played assignment too.

    Args:
        rounds: for each round, the times of two blocks of the reference and two of the candidate.
    """
    if not rounds:
        return math.nan, 1.0
    times = np.asarray(rounds, dtype=float)
    ours, theirs = times[:, :2].sum(), times[:, 2:].sum()
    times[:, 2:] /= bound
    sums = np.stack([times[:, pair].sum(axis=1) for pair in combinations(range(4), 2)], axis=1)
    rng, drawn = np.random.default_rng(0), np.zeros(_DRAWS)
    for by_assignment in sums:
        drawn += by_assignment[rng.integers(0, sums.shape[1], _DRAWS)]
    # Sums of the same blocks may differ by rounding.
    as_large = drawn >= times[:, 2:].sum() * (1 - 1e-12)
    return float(theirs / ours), float((1 + as_large.sum()) / (1 + _DRAWS))


_RatioReason = Literal[
    "too few", "below", "above", "too noisy", "not significant", "not clear", "mean above", "mean not clear"
]
"""The reason for a ratio's verdict: too few were measured, or where its interval lies about the bound. Above it, the ratio may
be too noisy to call, by the reference against itself, or not significant among all ratios of the run. Below it, the mean of all
requests may lie above the bound, significantly or not, because some requests are far slower."""


@dataclass(frozen=True)
class RatioDecision:
    """The verdict on one ratio.

    Attributes:
        ratio: candidate over reference.
        floor: reference over reference.
        mean: ratio of the means over all requests, or nan without means.
        p: p value of "at most the bound", corrected for the number of ratios of the run (Holm): of the mean, if that decided.
    """

    verdict: Verdict
    reason: _RatioReason
    ratio: _Ratio
    floor: _Ratio
    mean: float
    p: float


def decide_ratios(
    measured: Sequence[tuple[Sequence[float], Sequence[float]]],
    bound: float,
    alpha: float,
    means: Sequence[Sequence[Sequence[float]]] = (),
) -> list[RatioDecision]:
    """Decide on all ratios of a run together.

    - *regression*: the entire interval is above the bound and farther from 1 than both ends of the reference's own interval (see
      `_extent`); the reference against itself is not also above the bound; and the p value of "at most the bound" is below
      ``alpha`` after Holm's correction for the number of ratios (one of many is always the largest). So a machine too busy to time
      anything raises no false alarm.
    - *pass*: the entire interval is below the bound, and so is the ratio of means. A run passes only if all its ratios do, which
      needs no correction. If the ratio of means is above the bound, the ratio is a *regression* if its p value is below
      ``alpha`` after the same correction, otherwise *inconclusive*.
    - *inconclusive*: neither, or fewer than `MIN_RATIOS` were measured, of the ratio or of the reference against itself.

    Args:
        measured: for each ratio, the log ratios of candidate over reference and of reference over reference.
        bound: largest ratio that passes; at least 1.
        alpha: error rate of each interval, and of a false regression anywhere in the run.
        means: the argument of `_mean_ratio` for each ratio, or empty to leave means out.

    Raises:
        ValueError: the bound is below 1, so that the reference itself would fail.
    """
    if bound < 1:
        raise ValueError(f"a bound of {bound} fails the reference against itself")
    averaged = [_mean_ratio(rounds, bound) for rounds in means]
    least = _dependence_of_run(logs for logs, _ in measured)
    corrected = holm([*(_p_at_most(logs, bound, least) for logs, _ in measured), *(p for _, p in averaged)])
    alone = [(math.nan, 1.0)] * len(measured)
    of_means = [(mean, p) for (mean, _), p in zip(averaged, corrected[len(measured) :], strict=True)] or alone
    return [
        _decide(ratio_of(logs, alpha), ratio_of(floor, alpha), p, mean, bound, alpha)
        for (logs, floor), p, mean in zip(measured, corrected, of_means, strict=False)
    ]


def _dependence_of_run(measured: Iterable[Sequence[float]]) -> float:
    """Return the dependence to assume for each ratio of a run: that of all its ratios together.

    A few ratios show their own dependence poorly, and the largest of many is then one whose error was underestimated. With 8
    loads, each an autoregression of 0.95, equal servers raise an alarm by a bound of 1 in 0.25, 0.14, 0.08 and 0 of the benches of
    6, 8, 12 and 30 rounds (0.31, 0.22, 0.28 and 0.15 by the upper quartile of the ratios' own dependences;
    ``benchmarks/intervals.py``). It costs power if times wander: 1.3 is shown to be above 1.1 in 0.66 at an autoregression of
    0.8 and 30 rounds (1.0 before).
    """
    arrays = [np.asarray(logs, dtype=float) for logs in measured if len(logs) >= MIN_RATIOS]
    return dependence(*(values - np.median(_means(values)) for values in arrays)) if arrays else 1.0


def _decide(
    ratio: _Ratio, floor: _Ratio, p: float, of_mean: tuple[float, float], bound: float, alpha: float
) -> RatioDecision:
    mean, p_mean = of_mean
    low = ratio.interval.low
    verdict: Verdict = "inconclusive"
    reason: _RatioReason = "not clear"
    if min(ratio.n, floor.n) < MIN_RATIOS:
        reason = "too few"
    elif ratio.interval.high < bound and mean > bound:
        verdict, reason, p = (
            ("regression", "mean above", p_mean) if p_mean < alpha else (verdict, "mean not clear", p_mean)
        )
    elif ratio.interval.high < bound:
        verdict, reason = "pass", "below"
    elif low > bound and (low <= _extent(floor) or floor.interval.low > bound):
        reason = "too noisy"
    elif low > bound and p < alpha:
        verdict, reason = "regression", "above"
    elif low > bound:
        reason = "not significant"
    return RatioDecision(verdict, reason, ratio, floor, mean, p)


def _extent(floor: _Ratio) -> float:
    """Return how far from 1 a true ratio of 1 may be measured, by its interval, as a factor of at least 1.

    A busy machine slows one server's processes for seconds at a time: its blocks agree with each other, and no interval shows
    it. Without this condition, 2 of 20 measurements of 5 s on two busy cores called one of two equal servers a regression.
    """
    low, high = floor.interval.low, floor.interval.high
    return max(high, 1 / low if low else math.inf)


def warm_up(series: Sequence[Sequence[Sequence[float]]]) -> int:
    """Count the rounds at the start that are warm-up.

    A round's level in a role is the median, over the role's series, of its time divided by the series' median over the second half
    of the run. The first round is always warm-up, and so is every round before the first in which both levels are at most
    `_WARM_FACTOR`; at most half of the rounds are. Both roles lose the same rounds, so no ratio is selected by its value.

    Args:
        series: for each role, for each load, seconds by round; all of the same length.
    """
    rounds = min((len(times) for role in series for times in role), default=0)
    levels = np.ones(rounds)
    for role in series:
        times = np.array([list(times_)[:rounds] for times_ in role])
        if rounds:
            levels = np.maximum(levels, np.median(times / np.median(times[:, rounds // 2 :], axis=1)[:, None], axis=0))
    warm = np.flatnonzero(levels[1:] <= _WARM_FACTOR) + 1
    first = int(warm[0]) if warm.size else rounds
    return min(first, max(1, rounds // 2))
