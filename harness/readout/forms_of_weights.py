"""Forms in which a query reads its own keys and values: some are not seen, or their scores are changed.

Tolerances are multiples of `Tolerance.log`, the error of one log weight: 3 for a mean over keys that is compared with a number, 5
for the largest difference in a row, and 20 where a row only has to be told from what is wrong by far more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from assay.harness.localize.reading import Flags, Numbers
from assay.harness.readout.exponentials import laws_of
from assay.harness.readout.features import Ints
from assay.harness.readout.rows import BLANK, Fit, Row

_FACTORS = 3
"""Most different factors of a row: not seen, seen once, seen twice are three. With more, any row fits."""
_CAPS = (-4.0, 5.0)
"""Logs of the soft caps that are sought, 0.02 to 148; models have caps of 15 to 50."""
_LARGEST_CAP = 100.0
"""A cap beyond this says that scores are too small to tell: the largest cap fits them best."""
_LEVELS, _POINTS = 5, 33
"""Grids, and points of each, when a cap is sought: each grid is 16 times as fine, and the last is as fine as 9e-6."""


def right(row: Row) -> Fit | None:
    """The weights are right, and nothing is added to the values."""
    return Fit("right") if row.near(row.expected) and np.abs(row.constant).max() < row.tolerance.weight else None


def zero(row: Row) -> Fit | None:
    """The output is zero."""
    return Fit("zero") if np.abs(row.weights).sum() + np.abs(row.constant).max() < row.tolerance.weight else None


def constant(row: Row) -> Fit | None:
    """The output is one number, which V does not change."""
    low, high = row.constant.min(), row.constant.max()
    if np.abs(row.weights).sum() > row.tolerance.weight or high - low > 1e-4 * max(1, abs(high)) or abs(high) < 1e-3:
        return None
    return Fit("constant", number=float(high))


def seen_keys(row: Row) -> Fit | None:
    """Other keys are seen than should be, or some count more than once."""
    return _multiplied(row, row.own)


def other_kv(row: Row) -> Fit | None:
    """The keys and values of another kv head are read, and nothing else is wrong."""
    kv = int(np.abs(row.weights).sum(-1).argmax())
    if kv == row.own:
        return None
    found = _multiplied(row, kv)
    if found is None or found.form != "keys" or found.keys is None or not (found.keys == row.visible).all():
        return None
    return replace(found, form="kv")


def _multiplied(row: Row, kv: int) -> Fit | None:
    """Weights in proportion to exp(score), times a factor of few values: 0 for a key that is not seen, 2 for one seen twice."""
    if row.reads_also(kv):
        return None
    weights, scores, should = row.weights[kv], row.scores[kv], row.visible
    seen = weights > row.tolerance.least
    if not seen.any():
        return None
    found: list[Fit] = []
    for base, of_seen in _factors(np.log(weights[seen]) - scores[seen], should[seen], row.tolerance.log):
        factors = np.zeros(len(weights))
        factors[seen] = of_seen
        counted = float((factors * np.exp(scores)).sum())
        faint = should & ~seen & (np.exp(scores + base) < 10 * row.tolerance.least)
        factors[faint] = 1.0  # too small to be seen: nothing says that it is left out
        found.append(_denominated(Fit("keys", factors, kv=kv), float(np.exp(-base)), counted, row))
    if found and found[0].form == "keys-and-mass":  # then the factor of most keys may not be 1
        return next((fit for fit in found if fit.form == "keys-of-all"), found[0])
    return found[0] if found else None


def _factors(gaps: Numbers, should: Flags, tolerance: float) -> list[tuple[float, Numbers]]:
    """What log weights minus scores say: that of a factor of 1, and the factor of each key; empty if they are too many.

    Args:
        gaps: of the keys with weight.
        should: which of them should be seen: the factor of most of these is 1, which comes first.
        tolerance: of a log weight.
    """
    group = _groups(gaps, tolerance)
    counts = np.bincount(group)
    if len(counts) > _FACTORS or np.ptp(gaps[group == counts.argmax()]) > 20 * tolerance:
        return []
    inside = np.bincount(group[should], minlength=len(counts)) if should.any() else counts
    found = []
    for usual in np.argsort(-inside, kind="stable"):
        base = float(gaps[group == usual].mean())
        values = np.array([np.exp(gaps[group == number].mean() - base) for number in range(len(counts))])
        whole = np.round(values)
        found.append((base, np.where(np.abs(values - whole) < 3 * tolerance, whole, values)[group]))
    return found


def _groups(values: Numbers, gap: float) -> Ints:
    """A group number for each value: sorted values belong together up to a gap."""
    order = np.argsort(values)
    found = np.empty(len(values), np.int64)
    found[order] = np.concatenate([[0], np.cumsum(np.diff(values[order]) > gap)])
    return found


def _denominated(fit: Fit, denominator: float, counted: float, row: Row) -> Fit:
    """The fit, with what its denominator is.

    Args:
        fit: the factors of keys.
        denominator: sum of exp(score) that the weights were divided by.
        counted: the same sum over the keys with weight, times their factors.
        row: the row.
    """
    assert fit.keys is not None
    close = 3 * row.tolerance.log
    if abs(denominator / counted - 1) < close:
        return fit
    phantom = denominator - counted
    of_all = float(np.exp(row.scores[fit.kv][row.visible]).sum())
    if abs(denominator / of_all - 1) < close:
        return replace(fit, form="keys-of-all")
    unseen = row.visible & (fit.keys == 0)
    if unseen.any() and abs(phantom / unseen.sum() - 1) < close * denominator / unseen.sum():
        return replace(fit, keys=np.where(unseen, BLANK, fit.keys))
    return replace(fit, form="keys-and-mass", mass=counted / denominator, phantom=phantom)


def scaled(row: Row) -> Fit | None:
    """All scores are multiplied by a number."""
    found = row.own_logs(3)
    if found is None:
        return None
    seen, logs = found
    scores = row.scores[row.own]
    centred = scores[seen] - scores[seen].mean()
    spread = float(centred @ centred)
    if not spread > 1e-6:
        return None  # equal scores have no slope
    slope = float(centred @ logs) / spread
    changed = np.where(row.visible, slope * scores, -np.inf)
    weights = np.exp(changed - changed.max())
    expected = np.zeros_like(row.weights)
    expected[row.own] = weights / weights.sum()
    if abs(slope - 1) < row.tolerance.log or not row.near(expected):
        return None
    return Fit("scale", number=slope)


def slopes(row: Row) -> Fit | None:
    """The scores of some keys are multiplied by a number, those of at least a fifth are right."""
    found = row.own_logs(6)
    if found is None:
        return None
    seen, logs = found
    scores = row.scores[row.own][seen]
    gaps = logs - scores
    group = _groups(gaps, row.tolerance.log)
    counts = np.bincount(group)
    if counts.max() < max(3, 0.2 * len(group)):
        return None
    usual = group == counts.argmax()
    far = np.abs(scores) > 50 * row.tolerance.log  # the slope of a score near zero is not known
    odd = ~usual & far
    if odd.sum() < 2:
        return None
    ratios = (logs - gaps[usual].mean())[odd] / scores[odd]
    middle = float(np.median(ratios))
    if np.abs(ratios - middle).max() > 0.01 * max(abs(middle), 0.1) + 5 * row.tolerance.log:
        return None
    factors = np.ones(len(seen))
    factors[seen] = np.where(odd, middle, np.where(far, 1.0, np.nan))
    return Fit("slopes", factors, number=middle)


def capped(row: Row) -> Fit | None:
    """Scores have a soft cap c: they become c tanh(score / c)."""
    found = row.own_logs(4)
    if found is None:
        return None
    seen, logs = found
    scores = row.scores[row.own][seen]

    def misfit(powers: Numbers) -> Numbers:
        caps = np.exp(powers)[:, None]
        gaps: Numbers = np.ptp(logs - caps * np.tanh(scores / caps), axis=-1)
        return gaps

    power, least = _least(misfit, *_CAPS)
    cap = float(np.exp(power))
    return Fit("capped", number=cap) if least < 5 * row.tolerance.log and cap < _LARGEST_CAP else None


def bent(row: Row) -> Iterator[Fit]:
    """Weights are in proportion to another function than exp(score)."""
    if (found := row.own_logs(4)) is None:
        return
    seen, logs = found
    scores = row.scores[row.own]
    if np.ptp(logs - scores[seen]) < 5 * row.tolerance.log:
        return  # in proportion to exp(score)
    top = float(scores[row.visible].max())
    for law, number in laws_of(scores[seen], logs, top, 5 * row.tolerance.log):
        yield Fit("bent", law=law, number=number)


def _least(function: Callable[[Numbers], Numbers], low: float, high: float) -> tuple[float, float]:
    """Where a function of numbers is least, and its value there, on grids that grow finer around the least value so far."""
    for _ in range(_LEVELS):
        grid = np.linspace(low, high, _POINTS)
        values = function(grid)
        best = int(values.argmin())
        low, high = float(grid[max(best - 1, 0)]), float(grid[min(best + 1, _POINTS - 1)])
    return float(grid[best]), float(values[best])


def biased(row: Row) -> Fit | None:
    """Scores gain a number per token of distance from the query."""
    found = row.own_logs(5)
    if found is None or not row.context.call.causal:
        return None
    seen, logs = found
    gaps = logs - row.scores[row.own][seen]
    distance = (np.flatnonzero(row.visible)[-1] - np.flatnonzero(seen)).astype(float)
    slope, offset = np.polyfit(distance, gaps, 1)
    if np.abs(gaps - slope * distance - offset).max() > 5 * row.tolerance.log or abs(slope) < 5 * row.tolerance.log:
        return None
    return Fit("biased", number=float(slope))


def pieces(row: Row) -> Fit | None:
    """A factor that is constant over runs of keys: the logs of the factors, for whoever finds out what they follow."""
    found = row.own_logs(8)
    if found is None:
        return None
    seen, logs = found
    scores = row.scores[row.own]
    gaps = np.full(len(seen), np.nan)
    gaps[seen] = logs - scores[seen]
    inner = gaps[row.keys]
    jumps = np.abs(np.diff(inner)) > row.tolerance.log
    known = ~np.isnan(inner[1:]) & ~np.isnan(inner[:-1])
    if (jumps & known).sum() > max(1, known.sum() // 8):
        return None  # runs of fewer than eight keys are no runs
    return Fit("pieces", keys=gaps + np.log(np.exp(scores[row.visible]).sum()))
