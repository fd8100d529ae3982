"""Explains the weights of one query as a single change of the correct ones.

Each form describes the change without its reason. All forms that fit are kept: in a short row, several do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from assay.harness.attention.oracle import sequences
from assay.harness.localize.reading import Flags, Numbers, WeightReading
from assay.harness.readout.features import Ints

# The weights of a query relative to the correct ones, which are proportional to exp(score):
#
# - "right";
# - "keys": times a factor for each key, mostly 0 (not seen), 1 or 2 (seen twice), and normalised; "keys-and-mass": the same, but
#   normalised by something other than their sum;
# - "scale": scores times a factor; "pieces": a factor that is constant over runs of keys;
# - "values": correct, but applied to the V of other keys.
_Form = Literal["right", "keys", "keys-and-mass", "scale", "pieces", "values"]
BLANK = -1.0
"""Replaces a factor (which is never negative) for a key whose K and V the kernel takes as zero: it adds nothing to the output,
and exp(0) = 1 to the denominator."""


@dataclass(frozen=True)
class Tolerance:
    """The tolerance of a reading: the misplaced weight of a query, the error of a log weight, and the largest weight that is
    zero.

    Readings of correct float32 kernels (PyTorch's, blockwise and split ones) on all of `fixed_plans` are off by at most 5e-7 of
    the weights' sum, and 2e-6 in log weights: float32 rounds by 6e-8, and scores are of size 1 to 10. The defaults allow a
    hundred times that, for kernels that round more; the smallest fault of interest shifts 1e-4 of the weight. Next to a weight of
    1, float32 loses weights below `least`.
    """

    weight: float = 5e-5
    log: float = 2e-4
    least: float = 1e-7


@dataclass(frozen=True)
class Fit:
    """A form that fits the weights of one query.

    Attributes:
        form: the form.
        keys: for a form about keys, a number for each packed key, float64 [total_k]. "keys…": its factor, or `BLANK`; "pieces":
            the log of its factor, or NaN if it is not seen; "values": the packed row of V used instead, counted through all kv
            heads (kv head * total_k + row), or -1.
        number: "scale": the factor.
        phantom: the number of additional keys with a score of zero in the denominator.
    """

    form: _Form
    keys: Numbers | None = field(default=None, compare=False)
    number: float = 0.0
    phantom: float = 0.0


class Row:
    """The reading of one query and head, at index `place` of the reading.

    It has the query's packed row; its own kv head; the weights that were read, the correct ones and the scores, [num_kv_heads,
    total_k]; the keys that it should see, [total_k]; the part that does not depend on V, [head_dim_v]; `WeightReading.off`; and
    the keys of its sequence.
    """

    def __init__(self, reading: WeightReading, place: int, head: int, tolerance: Tolerance) -> None:
        self.tolerance, self.own, row = tolerance, reading.call.heads.kv_head(head), int(reading.rows[place])
        self.weights: Numbers = reading.weights[place, head]
        self.expected: Numbers = reading.expected[place, head]
        self.scores: Numbers = reading.scores[place, head]
        self.visible: Flags = reading.visible[place]
        self.constant: Numbers = reading.constant[place, head]
        self.off = float(reading.off[place, head])
        self.keys = next(k for q, k in sequences(reading.call) if q.start <= row < q.stop)
        sinks = reading.call.spec.sinks
        self.sunk = float(np.exp(sinks[head])) if sinks else 0.0  # the sink's term of the denominator

    def _near(self, weights: Numbers) -> bool:
        """Return True if these weights equal the ones that were read, up to the tolerance."""
        return bool(np.abs(self.weights - weights).sum() <= self.tolerance.weight * max(1.0, np.abs(weights).sum()))

    @property
    def _reads_others(self) -> bool:
        """Return True if other kv heads have weight."""
        return float(np.abs(self.weights).sum() - np.abs(self.weights[self.own]).sum()) > self.tolerance.weight

    def _own_logs(self, least: int) -> tuple[Flags, Numbers] | None:
        """Return flags of the own kv head's keys with weight, bool [total_k], and the logs of these weights.

        Return None if there are fewer than `least`, if one of them should not be seen, or if other kv heads have weight too.
        """
        if self._reads_others:
            return None
        weights = self.weights[self.own]
        seen = weights > self.tolerance.least
        if seen.sum() < least or (seen & ~self.visible).any():
            return None
        return seen, np.log(weights[seen])


# Most distinct factors of a row: not seen, seen once and seen twice are three. With more, any row fits.
_FACTORS = 3


def _right(row: Row) -> Fit | None:
    """Fit correct weights without an added constant."""
    return Fit("right") if row._near(row.expected) and np.abs(row.constant).max() < row.tolerance.weight else None


def _seen_keys(row: Row) -> Fit | None:
    """Fit weights proportional to exp(score) times one of a few factors: 0 for a key that is not seen, 2 for one seen twice."""
    if row._reads_others:
        return None
    weights, scores, should = row.weights[row.own], row.scores[row.own], row.visible
    seen = weights > row.tolerance.least
    if not seen.any():
        return None
    fitted = _factors(np.log(weights[seen]) - scores[seen], should[seen], row.tolerance.log)
    if fitted is None:
        return None
    base, of_seen = fitted
    factors = np.zeros(len(weights))
    factors[seen] = of_seen
    counted = float((factors * np.exp(scores)).sum()) + row.sunk
    faint = should & ~seen & (np.exp(scores + base) < 10 * row.tolerance.least)
    factors[faint] = 1.0  # too small to tell whether it is seen
    return _denominated(Fit("keys", factors), float(np.exp(-base)), counted, row)


def _factors(gaps: Numbers, should: Flags, tolerance: float) -> tuple[float, Numbers] | None:
    """Return the log weight minus score at a factor of 1, and the factor of each key, or None if there are too many factors.

    Most keys that should be seen have the factor 1.
    """
    group = _groups(gaps, tolerance)
    counts = np.bincount(group)
    if len(counts) > _FACTORS or np.ptp(gaps[group == counts.argmax()]) > 20 * tolerance:
        return None
    inside = np.bincount(group[should], minlength=len(counts)) if should.any() else counts
    base = float(gaps[group == inside.argmax()].mean())
    values = np.array([np.exp(gaps[group == number].mean() - base) for number in range(len(counts))])
    whole = np.round(values)
    return base, np.where(np.abs(values - whole) < 3 * tolerance, whole, values)[group]


def _groups(values: Numbers, gap: float) -> Ints:
    """Return a group index for each value: sorted values belong together up to a gap."""
    order = np.argsort(values)
    group = np.empty(len(values), np.int64)
    group[order] = np.concatenate([[0], np.cumsum(np.diff(values[order]) > gap)])
    return group


def _denominated(fit: Fit, denominator: float, counted: float, row: Row) -> Fit:
    """Add the denominator to a fit of keys' factors.

    `denominator` is the sum of exp(score) that the weights were divided by, and `counted` the sum over keys times their factors.
    """
    assert fit.keys is not None
    close = 3 * row.tolerance.log
    if abs(denominator / counted - 1) < close:
        return fit
    phantom = denominator - counted
    unseen = row.visible & (fit.keys == 0)
    if unseen.any() and abs(phantom / unseen.sum() - 1) < close * denominator / unseen.sum():
        return replace(fit, keys=np.where(unseen, BLANK, fit.keys))
    return replace(fit, form="keys-and-mass", phantom=phantom)


def _scaled(row: Row) -> Fit | None:
    """Fit scores multiplied by a number."""
    if (own := row._own_logs(3)) is None:
        return None
    seen, logs = own
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
    if abs(slope - 1) < row.tolerance.log or not row._near(expected):
        return None
    return Fit("scale", number=slope)


def _pieces(row: Row) -> Fit | None:
    """Fit a factor that is constant over runs of keys; its logs are left to explain by a formula."""
    if (own := row._own_logs(8)) is None:
        return None
    seen, logs = own
    scores = row.scores[row.own]
    gaps = np.full(len(seen), np.nan)
    gaps[seen] = logs - scores[seen]
    inner = gaps[row.keys]
    jumps = np.abs(np.diff(inner)) > row.tolerance.log
    known = ~np.isnan(inner[1:]) & ~np.isnan(inner[:-1])
    if (jumps & known).sum() > max(1, known.sum() // 8):
        return None  # a run has at least eight keys
    return Fit("pieces", keys=gaps + np.log(np.exp(scores[row.visible]).sum()))


# Most weights to pair with each other, since pairing is quadratic.
_MOVED = 400
# Relative difference up to which two weights are equal: float32 leaves 2e-6, and in a long row other weights are close too.
_RELATIVE = 1e-4


def _values_moved(row: Row) -> Fit | None:
    """Fit values that are read from elsewhere: each weight is the correct one of another key."""
    if abs(row.weights.sum() - 1) > 3 * row.tolerance.weight:
        return None
    return _exchanged(row) or _gained(row)


def _exchanged(row: Row) -> Fit | None:
    """Fit rows of V that each have the weight of one key, or one row that has the weights of all misplaced keys."""
    flat, expected = row.weights.ravel(), row.expected[row.own]
    margin = _RELATIVE * expected + row.tolerance.least
    home = row.own * len(expected) + np.arange(len(expected))
    unmoved = row.visible & (np.abs(flat[home] - expected) <= margin)
    to = np.where(unmoved, home, -1)
    sources = np.flatnonzero(row.visible & ~unmoved)
    targets = np.setdiff1d(np.flatnonzero(flat > row.tolerance.least), to[unmoved])
    if not len(sources) or not len(targets) or len(sources) > _MOVED:
        return None
    near = np.abs(flat[targets][:, None] - expected[sources]) <= margin[sources]
    for target, hits in zip(targets, near, strict=True):
        if hits.sum() == 1:
            to[sources[hits]] = target
    missing, left = sources[to[sources] < 0], np.setdiff1d(targets, to)
    if len(left) == 1 and abs(flat[left[0]] - expected[missing].sum()) <= row.tolerance.weight:
        to[missing] = left[0]  # several keys are read from one row, whose weight is their sum
    elif len(missing):
        return None
    return Fit("values", keys=to.astype(float))


def _gained(row: Row) -> Fit | None:
    """Fit keys whose weight moved to other keys: the others' values are read twice."""
    flat, expected = row.weights.ravel(), row.expected[row.own]
    margin = _RELATIVE * expected + row.tolerance.least
    home = row.own * len(expected) + np.arange(len(expected))
    lost = row.visible & (flat[home] <= row.tolerance.least) & (expected > margin)
    gains = flat.copy()
    gains[home[~lost]] -= expected[~lost]
    targets = np.flatnonzero(gains > 10 * row.tolerance.least)
    if not lost.any() or not len(targets) or lost.sum() > _MOVED or (gains[home] < -margin).any():
        return None
    sources = np.flatnonzero(lost)
    near = np.abs(gains[targets][:, None] - expected[sources]) <= margin[sources] + _RELATIVE * flat[targets][:, None]
    if (near.sum(0) != 1).any() or (near.sum(1) != 1).any():
        return None
    to = np.where(row.visible & ~lost & (expected > 10 * row.tolerance.least), home, -1)
    to[sources] = targets[near.argmax(0)]
    return Fit("values", keys=to.astype(float))


_CHEAP: tuple[Callable[[Row], Fit | None], ...] = (_seen_keys, _scaled)
_DEAR: tuple[Callable[[Row], Fit | None], ...] = (_values_moved, _pieces)
# From this many keys on, expensive forms are tried only if no plain one fits.
_MANY_KEYS = 256
# The output that the weights give on ordinary values may be off by this multiple of `Tolerance.weight`. Beyond it, the weights
# depend on V and say nothing. Correct float32 kernels are off by at most 2e-6.
_NOT_LINEAR = 20


def fits(row: Row) -> list[Fit]:
    """Return all forms that fit a query and head, but only "right" if that fits."""
    if right := _right(row):
        return [right]
    if row.off > _NOT_LINEAR * row.tolerance.weight:
        return []
    fitting = [fit for form in _CHEAP if (fit := form(row))]
    if any(_plain(fit) for fit in fitting) and row.weights.shape[1] > _MANY_KEYS:
        return fitting
    return fitting + [fit for form in _DEAR if (fit := form(row))]


def _plain(fit: Fit) -> bool:
    """Return True if the only change is that keys are seen 0, 1 or 2 times."""
    return fit.form == "keys" and fit.keys is not None and bool(np.isin(fit.keys, (0.0, 1.0, 2.0)).all())
