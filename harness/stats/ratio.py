"""Log ratios of times that were measured side by side -> an interval, and a decision against a bound.

The estimate is that of Hodges and Lehmann with the interval of Wilcoxon's signed-rank test. It asks that a log ratio
be as likely to lie so far above the truth as below it, which the random order of the blocks of a pair sees to. It was chosen by
measure. In 1,000 simulated runs of 4, 7 and 15 rounds, on a drifting clock, with normal, t(3), skewed and stalling noise, at a
nominal 0.95, it covered in 0.937 to 0.970, with a width of 4.6 % where every tenth of 60 blocks stalls; Student's t on the mean
log ratio in 0.939 to 0.986, with 20.2 % there; the percentile bootstrap in 0.862 to 0.935, BCa in 0.775 to 0.928.

The test also asks that the ratios be independent, and on a busy machine they are not: it slows one server down for seconds on
end. (Of ten measurements of two equal servers on a GPU, 20 s each, five intervals missed 1.) So the statistic's variance is
multiplied by the dependence that the ratios show, see `dependence`. In 400 simulated runs each of 6 to 120 rounds
(``benchmarks/intervals.py``), independent ratios were covered in 0.95 to 0.99 (in 0.93 to 0.96 without), by intervals a tenth wider
at 30 rounds; where one server is 15 % slower for 5 to 20 rounds now and then in 0.92 to 0.98 (0.32 to 0.90), under an
autoregression of 0.8 from round to round in 0.76 to 0.92 (0.40 to 0.49); and of two servers that are equal over time one was called
slower, by a bound of 1, in at most 0.035 of these runs (up to 0.22). What lasts as long as the measurement no interval knows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm, rankdata, t, wilcoxon

from assay.harness.stats.decision import StatOutcome
from assay.harness.stats.share import Interval

FEWEST = 6
"""Fewer ratios than this give no verdict: no interval of level 0.95 is shorter than the whole line then."""
MOST_NEEDED = 10_000
SETTLED = 1.10
"""A round is warm once neither role's blocks take more than this times what they take later."""
_LAGS = 3
"""Autocorrelations are looked at up to a third of the length: those farther apart are means of too few products."""
_P_ALPHA = 0.05
"""The interval of this error rate gives the standard error behind a p value."""
_EXACT = 50
"""Up to so many ratios the null distribution is exact, and normal above, as in scipy.stats.wilcoxon."""


@dataclass(frozen=True)
class Ratio:
    """A ratio of times; above 1 is slower.

    Attributes:
        value: Hodges and Lehmann's estimate, the median of the mean log ratios of all pairs; nan if there is none.
        interval: two-sided; from 0 to infinity where too few ratios were measured for its level.
        n: ratios measured.
        effective: how many independent ones they are worth, at most `n`.
    """

    value: float
    interval: Interval
    n: int
    effective: float


def ratio_of(logs: Sequence[float], alpha: float) -> Ratio:
    """The ratio whose logarithms were measured, in the order of measuring, with its interval of level ``1 - alpha``.

    Where they show no dependence it is the exact signed-rank interval, of this level or a little more. Otherwise the variance of
    the statistic is multiplied by the dependence, and Student's t for the ratios' worth stands in for the normal distribution; the
    interval never becomes wider than all the ratios.

    Source: Hollander, Wolfe and Chicken, Nonparametric Statistical Methods, 3rd ed., sections 3.2 and 3.3.
    """
    n = len(logs)
    if not n:
        return Ratio(math.nan, Interval(0.0, math.inf, 1 - alpha), 0, 0.0)
    values = np.asarray(logs, dtype=float)
    means = _means(values)
    middle = float(np.median(means))
    alike = dependence(values - middle)
    beyond = _beyond(n, alpha / 2)
    if beyond > 0 and alike > 1:
        mean, spread = _moments(n)
        quantile = float(t.ppf(alpha / 2, _freedom(n / alike)))
        beyond = min(beyond, max(0, math.floor(mean + quantile * spread * math.sqrt(alike) - 0.5)))
    low, high = (means[beyond], means[-1 - beyond]) if beyond >= 0 else (-math.inf, math.inf)
    return Ratio(math.exp(middle), Interval(math.exp(low), math.exp(high), 1 - alpha), n, n / alike)


def _means(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The means of all pairs, each value with itself included, in order."""
    return np.sort(np.add.outer(values, values)[np.triu_indices(len(values))] / 2)


def dependence(residuals: NDArray[np.float64]) -> float:
    """By how much neighbours' likeness raises the variance of the signed-rank statistic: 1 if they are independent, at least 1.

    It is the integrated autocorrelation time, of the residuals' signed ranks, so that a stall counts for no more than its rank:
    1 + 2 (the sum of the autocorrelations), where sums of two that follow each other are added up, each at most as large as the one
    before, until one is not positive.

    Args:
        residuals: log ratios less their estimate, in the order of measuring.

    Source: Geyer, Practical Markov chain Monte Carlo, Statistical Science 7, 473-483 (1992), initial monotone sequence. An
    autocorrelation is by 1 / n too small on average, since the mean is estimated; that is added.
    """
    n = len(residuals)
    scores = np.sign(residuals) * rankdata(np.abs(residuals))
    scores = scores - scores.mean()
    power = float(scores @ scores)
    if not power:
        return 1.0
    found = [1.0] + [float(scores[lag:] @ scores[:-lag]) / power + 1 / n for lag in range(1, n // _LAGS + 1)]
    total, last = -1.0, math.inf
    for one, following in zip(found[0::2], found[1::2], strict=False):
        last = min(last, one + following)
        if last <= 0:
            break
        total += 2 * last
    return max(1.0, total)


def _moments(n: int) -> tuple[float, float]:
    """Mean and standard deviation of the signed-rank statistic of n independent values."""
    return n * (n + 1) / 4, math.sqrt(n * (n + 1) * (2 * n + 1) / 24)


@cache
def _beyond(n: int, tail: float) -> int:
    """How many of the ordered means of pairs lie beyond each end: the largest k with P(signed-rank sum <= k) <= tail, or -1."""
    if n > _EXACT:
        mean, spread = _moments(n)
        return math.floor(mean + float(norm.ppf(tail)) * spread - 0.5)
    counts = np.ones(1)
    for rank in range(1, n + 1):
        with_rank = np.zeros(len(counts) + rank)
        with_rank[: len(counts)] = counts
        with_rank[rank:] += counts
        counts = with_rank
    return int(np.searchsorted(np.cumsum(counts) / counts.sum(), tail, side="right")) - 1


def p_at_most(logs: Sequence[float], bound: float) -> float:
    """One-sided p value of "the ratio is at most ``bound``": small where it is clearly above.

    The larger of two: that of Wilcoxon's signed-rank test, which asks for no distribution but knows of no dependence; and where
    there is any, Student's, of the distance in standard errors by the width of the interval, which knows it. So ratios that are
    alike prove less near the bound, and as much as they can where they are far beyond it.
    """
    above = np.asarray(logs, dtype=float) - math.log(bound)
    if not above.any():
        return 1.0
    p = float(wilcoxon(above, alternative="greater").pvalue)
    ratio = ratio_of(logs, _P_ALPHA)
    width = math.log(ratio.interval.high / ratio.interval.low) / 2 if ratio.interval.low else math.inf
    if ratio.effective == ratio.n or not 0 < width < math.inf:
        return p
    freedom = _freedom(ratio.effective)
    error = width / -float(t.ppf(_P_ALPHA / 2, freedom))
    return max(p, float(t.sf(math.log(ratio.value / bound) / error, freedom)))


def _freedom(effective: float) -> float:
    """Degrees of freedom of Student's t for what dependent ratios are worth."""
    return max(2.0, effective - 1)


def holm(p: Sequence[float]) -> list[float]:
    """P values corrected for their number, each in its place: below a level, no true null hypothesis is refused but with that rate.

    Source: Holm, A simple sequentially rejective multiple test procedure, Scandinavian Journal of Statistics 6, 65-70 (1979). As
    ``statsmodels.stats.multitest.multipletests`` gives it, which collects all garbage at each call.
    """
    order = np.argsort(p)
    raised = np.maximum.accumulate(np.asarray(p, dtype=float)[order] * np.arange(len(p), 0, -1))
    found = np.empty(len(p))
    found[order] = np.minimum(1.0, raised)
    return [float(one) for one in found]


@dataclass(frozen=True)
class RatioDecision:
    """The verdict on one ratio.

    Attributes:
        verdict: "pass", "regression" or "inconclusive".
        why: one sentence.
        ratio: candidate over reference.
        floor: reference over reference.
        p: p value of "at most the bound", corrected for the number of ratios of the run (Holm).
        needed: ratios that would bring a verdict if their spread stays; None otherwise, and where no usable number would.
    """

    verdict: StatOutcome
    why: str
    ratio: Ratio
    floor: Ratio
    p: float
    needed: int | None


def decide_ratios(
    measured: Sequence[tuple[Sequence[float], Sequence[float]]], bound: float, alpha: float
) -> list[RatioDecision]:
    """Decide on all ratios of a run together.

    - *regression*: the whole interval is above the bound; it is farther from 1 than either end of the interval of the reference
      against itself (see `extent`), and that one is not above the bound too, so that a machine which is too busy to time
      anything accuses nobody; and the p value of "at most the bound" stays below ``alpha`` under Holm's correction for the
      number of ratios (many are looked at, and one of them is always the largest).
    - *pass*: the whole interval is below the bound. A run passes only if all its ratios do, which needs no correction.
    - *inconclusive*: neither, or fewer than `FEWEST` were measured, of the ratio or of the reference against itself.

    Args:
        measured: for each, the log ratios of candidate over reference and of reference over reference.
        bound: largest ratio that still passes; at least 1.
        alpha: error rate of each interval, and of a false regression anywhere in the run.

    Raises:
        ValueError: a bound below 1, by which the reference itself would fail.
    """
    if bound < 1:
        raise ValueError(f"a bound of {bound} fails the reference against itself")
    corrected = holm([p_at_most(logs, bound) for logs, _ in measured])
    return [
        _decide(ratio_of(logs, alpha), ratio_of(floor, alpha), p, bound, alpha)
        for (logs, floor), p in zip(measured, corrected, strict=True)
    ]


def _decide(ratio: Ratio, floor: Ratio, p: float, bound: float, alpha: float) -> RatioDecision:
    low, high = ratio.interval.low, ratio.interval.high
    text = f"{ratio.value:.3f} ({low:.3f} to {high:.3f} with {100 * ratio.interval.level:.0f} % confidence)"
    verdict: StatOutcome = "inconclusive"
    needed = None
    if min(ratio.n, floor.n) < FEWEST:
        why = f"{ratio.n} ratios were measured, {floor.n} of the reference against itself; {FEWEST} are needed of each."
        needed = FEWEST * max(1, ratio.n // max(1, floor.n))
    elif high < bound:
        verdict, why = "pass", f"{text}: below the bound of {bound:g}."
    elif low > bound and (low <= extent(floor) or floor.interval.low > bound):
        why = (
            f"{text}: above the bound of {bound:g}, but the reference against itself comes to {floor.value:.3f} "
            f"({floor.interval.low:.3f} to {floor.interval.high:.3f}): too noisy to accuse. A quieter machine or more rounds "
            "would settle it."
        )
    elif low > bound and p < alpha:
        verdict, why = "regression", f"{text}: above the bound of {bound:g}."
    else:
        needed = ratios_needed(ratio, bound)
        settles = f"about {needed} ratios would settle it" if needed else "no usable number of ratios would settle it"
        beyond = "above" if low > bound else "not clear of"
        corrected = f", yet not beyond the chance of one among all ratios (p = {p:.2g})" if low > bound else ""
        worth = (
            f", which are worth {ratio.effective:.0f}: neighbours are alike" if ratio.effective < ratio.n / 2 else ""
        )
        why = f"{text}: {beyond} the bound of {bound:g}{corrected}; {settles}, {ratio.n} were measured{worth}."
    return RatioDecision(verdict, why, ratio, floor, p, needed)


def extent(floor: Ratio) -> float:
    """How far from 1 a ratio that is 1 may come out, by its interval, as a factor of at least 1.

    A busy machine slows one server's processes down for seconds on end: its blocks agree with each other, and no interval knows.
    On two busy cores 2 of 20 measurements of 5 s called one of two equal servers a regression before this was asked for.
    """
    low, high = floor.interval.low, floor.interval.high
    return max(high, 1 / low if low else math.inf)


def ratios_needed(ratio: Ratio, bound: float) -> int | None:
    """Ratios with which the interval would clear the bound, if it shrinks with the square root of their number.

    Returns:
        None where more than `MOST_NEEDED` would be needed; at least one more than were measured otherwise.
    """
    distance = abs(math.log(ratio.value / bound))
    end = ratio.interval.high if ratio.value < bound else ratio.interval.low
    if not (distance and end and math.isfinite(end)):
        return None
    needed = ratio.n * (abs(math.log(end / ratio.value)) / distance) ** 2
    return max(ratio.n + 1, math.ceil(needed)) if needed <= MOST_NEEDED else None


def warm_up(series: Sequence[Sequence[Sequence[float]]]) -> int:
    """Rounds at the start that are warm-up.

    A round's level in a role is the median, over the role's series, of its time divided by the series' own median over the later
    half of the run. The first round is always warm-up, and so is every one before the first in which both levels are at most
    `SETTLED`; at most half of the rounds are. Both roles lose the same rounds, so no ratio is chosen by its value.

    Args:
        series: for each role, for each of its cells, seconds by round; all of one length.
    """
    rounds = min((len(times) for role in series for times in role), default=0)
    levels = np.ones(rounds)
    for role in series:
        times = np.array([list(one)[:rounds] for one in role])
        if rounds:
            levels = np.maximum(levels, np.median(times / np.median(times[:, rounds // 2 :], axis=1)[:, None], axis=0))
    settled = np.flatnonzero(levels[1:] <= SETTLED) + 1
    first = int(settled[0]) if settled.size else rounds
    return min(first, max(1, rounds // 2))
