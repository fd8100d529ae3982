"""Explaining the weights of one query: as the right ones changed in one way.

Each form says what became of the weights, without saying why. All forms that fit are kept: in a short row, several do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar

from assay.harness.readout.features import own_keys
from assay.harness.readout.reading import Numbers, Reading, right_weights, scores_of, visible

Ints = NDArray[np.int64]
Form = str


BLANK = -1.0
"""The factor of a key whose K and V are zero to the kernel: it has no weight, and the denominator counts it with a score of 0."""


@dataclass(frozen=True)
class Tolerance:
    """How exact a reading is.

    Attributes:
        weight: total weight of a query that may be misplaced.
        log: error of a log weight.
        least: weights below this are not told from zero.
    """

    weight: float = 5e-5
    log: float = 2e-4
    least: float = 1e-7


@dataclass(frozen=True)
class Fit:
    """A form that fits the weights of one query.

    Attributes:
        form: its name, a key of `FORMS`.
        keys: for a form that speaks of keys, a number for each packed key, float64 [total_k]: its factor, or the row it is read from.
        number: for a form with a parameter, its value.
        source: for a form in which the query takes another's place: (packed row of q, q head).
        share: for a mixture, the share of the right row and that of the source.
        kv: kv head that is read.
        mass: what the weights add up to, where the denominator is not that of the keys that were counted.
        phantom: keys with score zero that the denominator counts too.
    """

    form: Form
    keys: Numbers | None = field(default=None, compare=False)
    number: float = 0.0
    source: tuple[int, int] = (0, 0)
    share: tuple[float, float] = (0.0, 0.0)
    kv: int = 0
    mass: float = 1.0
    phantom: float = 0.0


class CallContext:
    """What all rows of a call have in common: the scores and right weights of every query."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.call = reading.call
        self.rows = np.arange(self.call.q.shape[0])

    @cached_property
    def scores(self) -> Numbers:
        """As `Reading.scores`, of all queries."""
        return scores_of(self.call, self.rows)

    @cached_property
    def right(self) -> Numbers:
        """As `Reading.expected`, of all queries."""
        return right_weights(self.call, self.rows, self.scores)

    @cached_property
    def flat(self) -> Numbers:
        """The right weights of all queries and heads, [rows * heads, kv heads * total_k]."""
        return self.right.reshape(len(self.rows) * self.call.q.shape[1], -1)

    @cached_property
    def visible(self) -> NDArray[np.bool_]:
        """As `Reading.visible`, of all queries."""
        return visible(self.call, self.rows)


@dataclass(frozen=True)
class Row:
    """The reading of one query and head."""

    context: CallContext
    place: int
    head: int
    tolerance: Tolerance

    @property
    def row(self) -> int:
        """The packed row of q."""
        return int(self.context.reading.rows[self.place])

    @cached_property
    def weights(self) -> Numbers:
        """[kv heads, total_k]."""
        return self.context.reading.weights[self.place, self.head]

    @cached_property
    def expected(self) -> Numbers:
        """[kv heads, total_k]."""
        return self.context.reading.expected[self.place, self.head]

    @cached_property
    def scores(self) -> Numbers:
        """[kv heads, total_k]."""
        return self.context.reading.scores[self.place, self.head]

    @property
    def visible(self) -> NDArray[np.bool_]:
        """[total_k]."""
        found: NDArray[np.bool_] = self.context.reading.visible[self.place]
        return found

    @property
    def constant(self) -> Numbers:
        """[head_dim_v]."""
        return self.context.reading.constant[self.place, self.head]

    @property
    def off(self) -> float:
        """See `Reading.off`."""
        return float(self.context.reading.off[self.place, self.head])

    @property
    def own(self) -> int:
        """The kv head that it should read."""
        call = self.context.call
        return self.head // (call.q.shape[1] // call.k.shape[1])

    @cached_property
    def keys(self) -> slice:
        """The keys of its sequence."""
        return next(k for q, k in own_keys(self.context.call) if q.start <= self.row < q.stop)

    def near(self, weights: Numbers) -> bool:
        """Whether these are the weights that were read, up to the tolerance."""
        return bool(np.abs(self.weights - weights).sum() <= self.tolerance.weight * max(1.0, np.abs(weights).sum()))


def _right(row: Row) -> Fit | None:
    return Fit("right") if row.near(row.expected) and np.abs(row.constant).max() < row.tolerance.weight else None


def _zero(row: Row) -> Fit | None:
    return Fit("zero") if np.abs(row.weights).sum() + np.abs(row.constant).max() < row.tolerance.weight else None


def _constant(row: Row) -> Fit | None:
    low, high = row.constant.min(), row.constant.max()
    if np.abs(row.weights).sum() > row.tolerance.weight or high - low > 1e-4 * max(1, abs(high)) or abs(high) < 1e-3:
        return None
    return Fit("constant", number=float(high))


def _mixed_heads(row: Row, kv: int) -> bool:
    """Whether kv heads besides this one have weight."""
    return float(np.abs(row.weights).sum() - np.abs(row.weights[kv]).sum()) > row.tolerance.weight


def _groups(values: Numbers, gap: float) -> Ints:
    """A group number for each value: sorted values belong together up to a gap."""
    order = np.argsort(values)
    found = np.empty(len(values), np.int64)
    found[order] = np.concatenate([[0], np.cumsum(np.diff(values[order]) > gap)])
    return found


def _multiplied(row: Row, kv: int, scores: Numbers, should: NDArray[np.bool_], form: Form) -> Fit | None:
    """Weights in proportion to exp(score), times a factor of few values: 0 for a key that is not seen, 2 for one seen twice."""
    if _mixed_heads(row, kv):
        return None
    weights = row.weights[kv]
    seen = weights > row.tolerance.least
    if not seen.any():
        return None
    logs = np.log(weights[seen]) - scores[seen]
    group = _groups(logs, row.tolerance.log)
    counts = np.bincount(group)
    if len(counts) > 3 or np.ptp(logs[group == counts.argmax()]) > 20 * row.tolerance.log:
        return None
    inside = np.bincount(group[should[seen]], minlength=len(counts)) if should[seen].any() else counts
    base = float(logs[group == inside.argmax()].mean())
    factors = np.zeros(len(weights))
    for number in range(len(counts)):
        value = float(np.exp(logs[group == number].mean() - base))
        factors[np.flatnonzero(seen)[group == number]] = (
            round(value) if abs(value - round(value)) < 3 * row.tolerance.log else value
        )
    counted = factors * np.exp(scores)
    faint = should & ~seen & (np.exp(scores + base) < 10 * row.tolerance.least)
    factors[faint] = 1.0
    total, right = float(counted.sum()), float(np.exp(scores[should]).sum())
    denominator = float(np.exp(-base))
    if abs(denominator / total - 1) < 3 * row.tolerance.log:
        return Fit(form, factors, kv=kv)
    phantom = denominator - total
    if abs(denominator / right - 1) < 3 * row.tolerance.log:
        return Fit(form + "-of-all", factors, kv=kv)
    unseen = should & (factors == 0)
    if unseen.any() and abs(phantom / unseen.sum() - 1) < 3 * row.tolerance.log * denominator / unseen.sum():
        factors[unseen] = BLANK
        return Fit(form, factors, kv=kv)
    return Fit(form + "-and-mass", factors, kv=kv, mass=total / denominator, phantom=phantom)


def _weights(row: Row) -> Fit | None:
    return _multiplied(row, row.own, row.scores[row.own], row.visible, "keys")


def _other_kv(row: Row) -> Fit | None:
    kv = int(np.abs(row.weights).sum(-1).argmax())
    if kv == row.own:
        return None
    found = _multiplied(row, kv, row.scores[kv], row.visible, "kv")
    return found if found and found.form == "kv" and _as(found.keys, row.visible) else None


def _as(factors: Numbers | None, visible: NDArray[np.bool_]) -> bool:
    return factors is not None and bool((factors == visible).all())


def _scaled(row: Row) -> Fit | None:
    """Scores times a factor."""
    if _mixed_heads(row, row.own):
        return None
    weights, scores = row.weights[row.own], row.scores[row.own]
    seen = weights > row.tolerance.least
    if seen.sum() < 3 or (seen & ~row.visible).any():
        return None
    logs, x = np.log(weights[seen]), scores[seen] - scores[seen].mean()
    spread = float(x @ x)
    if not spread > 1e-6 or not np.isfinite(logs).all():
        return None
    slope = float(x @ logs) / spread
    scaled = np.where(row.visible, slope * scores, -np.inf)
    guess = np.exp(scaled - scaled.max())
    expected = np.zeros_like(row.weights)
    expected[row.own] = guess / guess.sum()
    if abs(slope - 1) < row.tolerance.log or not row.near(expected):
        return None
    return Fit("scale", number=slope)


def _slopes(row: Row) -> Fit | None:
    """Scores of some keys times a factor, those of most others right: a factor for each key."""
    if _mixed_heads(row, row.own):
        return None
    weights, scores = row.weights[row.own], row.scores[row.own]
    seen = weights > row.tolerance.least
    if (seen & ~row.visible).any() or seen.sum() < 6:
        return None
    logs = np.log(weights[seen])
    group = _groups(logs - scores[seen], row.tolerance.log)
    counts = np.bincount(group)
    if counts.max() < max(3, 0.2 * len(group)):
        return None
    base = float((logs - scores[seen])[group == counts.argmax()].mean())
    factors = np.ones(len(weights))
    far = np.abs(scores[seen]) > 50 * row.tolerance.log
    ratio = np.where(far, (logs - base) / np.where(far, scores[seen], 1.0), np.nan)
    odd = np.flatnonzero((group != counts.argmax()) & far)
    if len(odd) < 2:
        return None
    values = np.sort(ratio[odd])
    middle = float(np.median(values))
    if np.abs(values - middle).max() > 0.01 * max(abs(middle), 0.1) + 5 * row.tolerance.log:
        return None
    factors[np.flatnonzero(seen)[odd]] = middle
    factors[np.flatnonzero(seen)[~far]] = np.nan
    return Fit("slopes", factors, number=middle)


def _capped(row: Row) -> Fit | None:
    """Scores with a soft cap: c tanh(s / c)."""
    if _mixed_heads(row, row.own):
        return None
    weights, scores = row.weights[row.own], row.scores[row.own]
    seen = weights > row.tolerance.least
    if seen.sum() < 4 or (seen & ~row.visible).any():
        return None
    logs, x = np.log(weights[seen]), scores[seen]

    def misfit(cap: float) -> float:
        return float(np.ptp(logs - cap * np.tanh(x / cap)))

    best = minimize_scalar(lambda power: misfit(float(np.exp(power))), bounds=(-4.0, 5.0), method="bounded")
    cap = float(np.exp(best.x))
    return Fit("capped", number=cap) if misfit(cap) < 5 * row.tolerance.log and cap < 100 else None


def _biased(row: Row) -> Fit | None:
    """Scores that gain a constant per token of distance."""
    if _mixed_heads(row, row.own):
        return None
    weights, scores = row.weights[row.own], row.scores[row.own]
    seen = weights > row.tolerance.least
    if seen.sum() < 5 or (seen & ~row.visible).any():
        return None
    gap = np.log(weights[seen]) - scores[seen]
    last = np.flatnonzero(row.visible)[-1] if row.context.call.causal else None
    if last is None:
        return None
    distance = (last - np.flatnonzero(seen)).astype(float)
    slope, offset = np.polyfit(distance, gap, 1)
    if np.abs(gap - slope * distance - offset).max() > 5 * row.tolerance.log or abs(slope) < 5 * row.tolerance.log:
        return None
    return Fit("biased", number=float(slope))


def _output(row: Row) -> Iterator[Fit]:
    """The output of another query or head."""
    context = row.context
    if abs(row.weights.sum() - 1) > 3 * row.tolerance.weight:
        return
    gap = np.abs(context.flat - row.weights.ravel()).sum(-1)
    heads = context.call.q.shape[1]
    for place in np.flatnonzero(gap <= row.tolerance.weight):
        source = (int(place) // heads, int(place) % heads)
        if source != (row.row, row.head):
            yield Fit("output", source=source)


def _query(row: Row) -> Iterator[Fit]:
    """The weights that another query's q would have here: in place of this row's, behind this row's mask."""
    if _mixed_heads(row, row.own):
        return
    context, heads = row.context, row.context.call.q.shape[1]
    weights = row.weights[row.own]
    seen = weights > row.tolerance.least
    if (
        seen.sum() < 3
        or not bool((seen == row.visible)[row.expected[row.own] > 1e-5].all())
        or (seen & ~row.visible).any()
    ):
        return
    scores = context.scores[:, :, row.own].reshape(-1, len(weights))[:, seen]
    logs = np.log(weights[seen]) - scores
    for place in np.flatnonzero(np.ptp(logs, axis=-1) <= 20 * row.tolerance.log):
        source = (int(place) // heads, int(place) % heads)
        if source != (row.row, row.head):
            yield Fit("query", source=source)


def _values_moved(row: Row) -> Fit | None:
    """Each weight is the right one of another key: values are read from elsewhere."""
    if abs(row.weights.sum() - 1) > 3 * row.tolerance.weight:
        return None
    flat, right = row.weights.ravel(), row.expected[row.own]
    to = np.full(len(right), -1.0)
    base = row.own * len(right)
    same = np.abs(flat[base : base + len(right)] - right) <= 1e-4 * right + row.tolerance.least
    to[same & row.visible] = base + np.flatnonzero(same & row.visible)
    left_from = np.flatnonzero(row.visible & ~same)
    taken = set(to[to >= 0].astype(int).tolist())
    left_to = [n for n in np.flatnonzero(flat > row.tolerance.least) if n not in taken]
    if not len(left_from) or not left_to or len(left_from) > 400:
        return None
    near = (
        np.abs(flat[left_to][:, None] - right[left_from][None]) <= 1e-4 * right[left_from][None] + row.tolerance.least
    )
    for place, target in enumerate(left_to):
        hits = np.flatnonzero(near[place])
        if len(hits) == 1:
            to[left_from[hits[0]]] = target
    rest_from = [n for n in left_from if to[n] < 0]
    used = set(to[to >= 0].astype(int).tolist())
    rest_to = [n for n in left_to if n not in used]
    if len(rest_to) == 1 and abs(flat[rest_to[0]] - right[rest_from].sum()) <= row.tolerance.weight:
        to[rest_from] = rest_to[0]
        rest_from = []
    if rest_from:
        return None
    return Fit("values", keys=to)


def _keys_moved(row: Row) -> Fit | None:
    """Each log weight is the score of another key: keys are read from elsewhere, values are not."""
    if _mixed_heads(row, row.own):
        return None
    weights = row.weights[row.own]
    seen = row.visible & (weights > 10 * row.tolerance.least)
    if seen.sum() < 4 or abs(weights[row.visible].sum() - 1) > 3 * row.tolerance.weight:
        return None
    places, logs = np.flatnonzero(seen), np.log(weights[seen])
    scores = row.scores.ravel()
    order = np.argsort(scores)
    ranked = scores[order]
    base = row.own * len(weights)
    best: tuple[int, Numbers] | None = None
    anchors = [n for n in (0, len(places) // 2, len(places) - 1)]
    offsets = np.unique(np.concatenate([logs[n] - scores for n in anchors]))
    for offset in offsets:
        wanted = logs - offset
        spot = np.clip(np.searchsorted(ranked, wanted), 1, len(ranked) - 1)
        nearest = np.where(np.abs(ranked[spot] - wanted) < np.abs(ranked[spot - 1] - wanted), spot, spot - 1)
        if (np.abs(ranked[nearest] - wanted) > row.tolerance.log / 5).any():
            continue
        to = order[nearest].astype(float)
        at_home = np.abs(scores[base + places] - wanted) <= row.tolerance.log / 5
        to[at_home] = base + places[at_home]
        if best is None or at_home.sum() > best[0]:
            best = (int(at_home.sum()), to)
    if best is None:
        return None
    moved = np.full(len(weights), -1.0)
    moved[places] = best[1]
    return Fit("scored", keys=moved)


def _mixture(row: Row) -> Fit | None:
    """A mixture of the right row and another one."""
    mine, other = row.expected.ravel(), row.context.flat
    weights = row.weights.ravel()
    if (weights > row.tolerance.least).sum() < 8:
        return None
    aa, bb, ab = mine @ mine, (other * other).sum(-1), other @ mine
    wa, wb = weights @ mine, other @ weights
    det = aa * bb - ab * ab
    usable = det > 1e-9 * aa * bb
    a = np.where(usable, (wa * bb - wb * ab) / np.where(usable, det, 1), 0)
    b = np.where(usable, (wb * aa - wa * ab) / np.where(usable, det, 1), 0)
    gap = np.abs(a[:, None] * mine + b[:, None] * other - weights).sum(-1)
    gap[~usable] = np.inf
    best = int(gap.argmin())
    if gap[best] > 2 * row.tolerance.weight or min(abs(a[best]), abs(b[best])) < 10 * row.tolerance.weight:
        return None
    heads = row.context.call.q.shape[1]
    return Fit(
        "mixture", source=(best // heads, best % heads), share=(round(float(a[best]), 4), round(float(b[best]), 4))
    )


def _pieces(row: Row) -> Fit | None:
    """A factor for each block of keys: the factors themselves, for whoever finds out what they follow."""
    if _mixed_heads(row, row.own):
        return None
    weights, scores = row.weights[row.own], row.scores[row.own]
    seen = weights > row.tolerance.least
    if (seen & ~row.visible).any() or seen.sum() < 8:
        return None
    logs = np.full(len(weights), np.nan)
    logs[seen] = np.log(weights[seen]) - scores[seen]
    inner = logs[row.keys]
    jumps = np.abs(np.diff(inner)) > row.tolerance.log
    known = ~np.isnan(inner[1:]) & ~np.isnan(inner[:-1])
    if (jumps & known).sum() > max(1, known.sum() // 8):
        return None
    right = float(np.exp(scores[row.visible]).sum())
    return Fit("pieces", keys=logs + np.log(right))


FORMS: dict[Form, int] = {
    "right": 0, "nan": 1, "zero": 1, "constant": 2, "keys": 2, "kv": 2, "keys-of-all": 3, "scale": 3, "output": 3, "query": 4,
    "values": 4, "scored": 5, "keys-and-mass": 4, "mixture": 6, "pieces": 6, "slopes": 5, "capped": 4,
    "biased": 4,
}  # fmt: skip
"""The forms, and how far-fetched each is."""
_CHEAP: tuple[Callable[[Row], Fit | None], ...] = (_zero, _constant, _weights, _other_kv, _scaled)
_DEAR: tuple[Callable[[Row], Fit | None], ...] = (
    _slopes, _capped, _biased, _values_moved, _keys_moved, _mixture, _pieces
)  # fmt: skip
_MANY_KEYS = 256
"""Keys from which on dear forms are tried only where no plain one fits."""
_SEVERAL: tuple[Callable[[Row], Iterator[Fit]], ...] = (_output, _query)


def _plain(fit: Fit) -> bool:
    """Whether keys are seen not at all, once or twice."""
    return fit.form == "keys" and fit.keys is not None and bool(np.isin(fit.keys, (0.0, 1.0, 2.0)).all())


def fits(row: Row) -> list[Fit]:
    """The forms that fit a query and head; only "right" where that fits, and none where no form does."""
    if right := _right(row):
        return [right]
    if row.off > 20 * row.tolerance.weight:
        return []
    found = [fit for form in _CHEAP if (fit := form(row))]
    if any(_plain(fit) for fit in found) and row.weights.shape[1] > _MANY_KEYS:
        return found
    found += [fit for form in _DEAR if (fit := form(row))]
    for several in _SEVERAL:
        found += list(several(row))[:12]
    return found
