"""Explaining the weights of one query: as the right ones changed in one way.

Each form says what became of the weights, without saying why. All forms that fit are kept: in a short row, several do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Literal

import numpy as np

from assay.harness.attention.oracle import sequences
from assay.harness.localize.reading import Flags, Numbers, WeightReading
from assay.harness.readout.features import Ints
from assay.harness.readout.queries import Queries

# What the weights of a query are. In terms of the right weights, in proportion to exp(score):
#
# - "right";
# - "keys": times a factor for each key, mostly 0 (not seen), 1 or 2 (seen twice), and normalised; "keys-and-mass": but normalised
#   by something else than their sum;
# - "scale": scores times a factor; "pieces": a factor that is constant over runs of keys;
# - "output": the right weights of another query or head; "query": the weights that the q of another query or head gives here;
# - "values": right, but on the V of other keys.
_Form = Literal[
    "right", "keys", "keys-and-mass", "scale", "pieces", "output", "query", "values"
]  # fmt: skip
BLANK = -1.0
"""Stands in place of a factor, which is never negative, for a key whose K and V are zero to the kernel: it adds nothing to the
output, and exp(0) = 1 to the denominator."""


@dataclass(frozen=True)
class Tolerance:
    """The exactness of a reading: the weight of a query that may be misplaced, the error of a log weight, and the weight of zero.

    Read off right float32 kernels (PyTorch's, and blockwise and split ones) on all of `fixed_plans`, weights miss the right ones by
    at most 5e-7 of their sum, and log weights by at most 2e-6: float32 rounds by 6e-8, and scores are of size 1 to 10. The defaults
    leave a hundred times that, for kernels that round more; the smallest fault that is sought shifts 1e-4 of the weight. Beside a
    weight of 1, float32 loses those below `least`.
    """

    weight: float = 5e-5
    log: float = 2e-4
    least: float = 1e-7


@dataclass(frozen=True)
class Fit:
    """A form that fits the weights of one query.

    Attributes:
        form: which one.
        keys: for a form that speaks of keys, a number for each packed key, float64 [total_k]. "keys…": its
            factor, or `BLANK`; "pieces": the log of its factor, NaN if it is not seen; "values": the packed row of V in its place,
            counted through all kv heads (kv head * total_k + row), or -1.
        number: "scale": the factor.
        source: for a form in which the query takes another's place: (packed row of q, q head).
        phantom: keys with a score of zero that the denominator counts too.
    """

    form: _Form
    keys: Numbers | None = field(default=None, compare=False)
    number: float = 0.0
    source: tuple[int, int] = (0, 0)
    phantom: float = 0.0


class Row:
    """The reading of one query and head: the place-th of those that were read; `every` holds all queries of the call.

    Of the query: its packed row; its own kv head; the weights that were read, the right ones and the scores, [num_kv_heads,
    total_k]; the keys that it should see, [total_k]; what does not come from V, [head_dim_v]; `WeightReading.off`; and the keys of
    its sequence.
    """

    def __init__(self, reading: WeightReading, every: Queries, place: int, head: int, tolerance: Tolerance) -> None:
        self.every, self.head, self.tolerance = every, head, tolerance
        self.row, self.own = int(reading.rows[place]), reading.call.heads.kv_head(head)
        self.weights: Numbers = reading.weights[place, head]
        self.expected: Numbers = reading.expected[place, head]
        self.scores: Numbers = reading.scores[place, head]
        self.visible: Flags = reading.visible[place]
        self.constant: Numbers = reading.constant[place, head]
        self.off = float(reading.off[place, head])
        self.keys = next(k for q, k in sequences(reading.call) if q.start <= self.row < q.stop)
        sinks = reading.call.spec.sinks
        self.sunk = float(np.exp(sinks[head])) if sinks else 0.0  # what the sink adds to the denominator

    def _near(self, weights: Numbers) -> bool:
        """Return True if these are the weights that were read, up to the tolerance."""
        return bool(np.abs(self.weights - weights).sum() <= self.tolerance.weight * max(1.0, np.abs(weights).sum()))

    @property
    def _reads_others(self) -> bool:
        """True if kv heads besides its own have weight."""
        return float(np.abs(self.weights).sum() - np.abs(self.weights[self.own]).sum()) > self.tolerance.weight

    def _own_logs(self, least: int) -> tuple[Flags, Numbers] | None:
        """The keys of the own kv head with weight, bool [total_k], and the logs of these weights.

        None if there are fewer than `least`, if one of them should not be seen, or if other kv heads have weight too.
        """
        if self._reads_others:
            return None
        weights = self.weights[self.own]
        seen = weights > self.tolerance.least
        if seen.sum() < least or (seen & ~self.visible).any():
            return None
        return seen, np.log(weights[seen])


# Most different factors of a row: not seen, seen once, seen twice are three. With more, any row fits.
_FACTORS = 3


def _right(row: Row) -> Fit | None:
    """The weights are right, and nothing is added to the values."""
    return Fit("right") if row._near(row.expected) and np.abs(row.constant).max() < row.tolerance.weight else None


def _seen_keys(row: Row) -> Fit | None:
    """Weights in proportion to exp(score), times a factor of few values: 0 for a key that is not seen, 2 for one seen twice."""
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
    factors[faint] = 1.0  # too small to be seen: nothing says that it is left out
    return _denominated(Fit("keys", factors), float(np.exp(-base)), counted, row)


def _factors(gaps: Numbers, should: Flags, tolerance: float) -> tuple[float, Numbers] | None:
    """Return what log weights minus scores say: that of a factor of 1, and the factor of each key; None if they are too many.

    The factor of most of the keys that should be seen is 1.
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
    """A group number for each value: sorted values belong together up to a gap."""
    order = np.argsort(values)
    group = np.empty(len(values), np.int64)
    group[order] = np.concatenate([[0], np.cumsum(np.diff(values[order]) > gap)])
    return group


def _denominated(fit: Fit, denominator: float, counted: float, row: Row) -> Fit:
    """Add to the factors of keys what their denominator is.

    `denominator` is the sum of exp(score) that the weights were divided by, `counted` that of keys times their factors.
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
    """All scores are multiplied by a number."""
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
    """A factor that is constant over runs of keys: the logs of the factors, for whoever finds out what they follow."""
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
        return None  # runs of fewer than eight keys are no runs
    return Fit("pieces", keys=gaps + np.log(np.exp(scores[row.visible]).sum()))


# Most weights that are paired with each other, since that takes their number squared.
_MOVED = 400
# Relative difference of two weights that count as the same: float32 leaves 2e-6, and in a long row other weights are close too.
_RELATIVE = 1e-4


def _output(row: Row) -> Iterator[Fit]:
    """The output of another query or head."""
    if abs(row.weights.sum() - 1) > 3 * row.tolerance.weight:
        return
    right = row.every.weights.reshape(-1, row.weights.size)
    gaps = np.abs(right - row.weights.ravel()).sum(-1)
    for source in _sources(row, gaps <= row.tolerance.weight):
        yield Fit("output", source=source)


def _query(row: Row) -> Iterator[Fit]:
    """The weights that another query's q has here: in place of this row's, behind this row's mask."""
    if (own := row._own_logs(3)) is None:
        return
    seen, logs = own
    if not (seen == row.visible)[row.expected[row.own] > 1e-5].all():
        return
    scores = row.every.scores[:, :, row.own].reshape(-1, len(seen))[:, seen]
    for source in _sources(row, np.ptp(logs - scores, axis=-1) <= 20 * row.tolerance.log):
        yield Fit("query", source=source)


def _sources(row: Row, fitting: Flags) -> Iterator[tuple[int, int]]:
    """(packed row of q, q head) of the queries and heads that fit, bool [total_q * num_q_heads], without this row itself."""
    heads = row.every.heads
    for place in np.flatnonzero(fitting):
        source = divmod(int(place), heads)
        if source != (row.row, row.head):
            yield source


def _values_moved(row: Row) -> Fit | None:
    """Each weight is the right one of another key: values are read from elsewhere."""
    if abs(row.weights.sum() - 1) > 3 * row.tolerance.weight:
        return None
    return _exchanged(row) or _gained(row)


def _exchanged(row: Row) -> Fit | None:
    """Each row of V has the weight of one key, its own or another; or one row has those of all keys that are not at home."""
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
    """Some keys have lost their weight, which is added to that of others: the others' values are read twice."""
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
# Forms that may fit in several ways.
_SEVERAL: tuple[Callable[[Row], Iterator[Fit]], ...] = (_output, _query)
# Keys from which on dear forms are tried only where no plain one fits.
_MANY_KEYS = 256
# Most sources of a form: with equal queries, all fit.
_SOURCES = 12
# Multiple of `Tolerance.weight` by which weights may fail to give the output on ordinary values. Beyond it they depend on V, and
# say nothing. Right float32 kernels are off by 2e-6 at most.
_NOT_LINEAR = 20


def fits(row: Row) -> list[Fit]:
    """The forms that fit a query and head; only "right" where that fits, and none where no form does."""
    if right := _right(row):
        return [right]
    if row.off > _NOT_LINEAR * row.tolerance.weight:
        return []
    fitting = [fit for form in _CHEAP if (fit := form(row))]
    if any(_plain(fit) for fit in fitting) and row.weights.shape[1] > _MANY_KEYS:
        return fitting
    fitting += [fit for form in _DEAR if (fit := form(row))]
    for several in _SEVERAL:
        fitting += islice(several(row), _SOURCES)
    return fitting


def _plain(fit: Fit) -> bool:
    """Return True if keys are seen not at all, once or twice, and nothing else."""
    return fit.form == "keys" and fit.keys is not None and bool(np.isin(fit.keys, (0.0, 1.0, 2.0)).all())
