"""Forms in which a query reads what belongs to others: another query's output or q, or the K or V of other keys."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from assay.harness.localize.reading import Flags, Numbers
from assay.harness.readout.features import Ints
from assay.harness.readout.rows import Fit, Row

_MOVED = 400
"""Most weights that are paired with each other, since that takes their number squared."""
_RELATIVE = 1e-4
"""Relative difference of two weights that count as the same: float32 leaves 2e-6, and in a long row other weights are close too."""


def output(row: Row) -> Iterator[Fit]:
    """The output of another query or head."""
    if abs(row.weights.sum() - 1) > 3 * row.tolerance.weight:
        return
    gaps = np.abs(row.context.flat - row.weights.ravel()).sum(-1)
    for source in _sources(row, gaps <= row.tolerance.weight):
        yield Fit("output", source=source)


def query(row: Row) -> Iterator[Fit]:
    """The weights that another query's q has here: in place of this row's, behind this row's mask."""
    found = row.own_logs(3)
    if found is None:
        return
    seen, logs = found
    if not (seen == row.visible)[row.expected[row.own] > 1e-5].all():
        return
    scores = row.context.scores[:, :, row.own].reshape(-1, len(seen))[:, seen]
    for source in _sources(row, np.ptp(logs - scores, axis=-1) <= 20 * row.tolerance.log):
        yield Fit("query", source=source)


def _sources(row: Row, fitting: Flags) -> Iterator[tuple[int, int]]:
    """(packed row of q, q head) of the queries and heads that fit, bool [total_q * num_q_heads], without this row itself."""
    heads = row.context.call.q.shape[1]
    for place in np.flatnonzero(fitting):
        source = divmod(int(place), heads)
        if source != row.itself:
            yield source


def values_moved(row: Row) -> Fit | None:
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


def keys_moved(row: Row) -> Fit | None:
    """Each log weight is the score of another key: keys are read from elsewhere, values are not."""
    if row.reads_also(row.own):
        return None
    weights = row.weights[row.own]
    seen = row.visible & (weights > 10 * row.tolerance.least)
    if seen.sum() < 4 or abs(weights[row.visible].sum() - 1) > 3 * row.tolerance.weight:
        return None
    places, logs = np.flatnonzero(seen), np.log(weights[seen])
    home = row.own * len(weights) + places
    margin = row.tolerance.log / 5  # among hundreds of scores, some are within the tolerance by chance
    scores = row.scores.ravel()
    order = np.argsort(scores)
    ranked = scores[order]
    offsets = np.unique(np.concatenate([logs[n] - scores for n in (0, len(places) // 2, len(places) - 1)]))
    for one in logs:
        offsets = offsets[_distance(ranked, one - offsets)[1] <= margin]
    if not len(offsets):
        return None
    unmoved = [np.abs(scores[home] - (logs - offset)) <= margin for offset in offsets]
    best = int(np.argmax([at_home.sum() for at_home in unmoved]))
    nearest, _ = _distance(ranked, logs - offsets[best])
    to = np.full(len(weights), -1.0)
    to[places] = np.where(unmoved[best], home, order[nearest])
    return Fit("scored", keys=to)


def _distance(ranked: Numbers, wanted: Numbers) -> tuple[Ints, Numbers]:
    """The index of the number nearest to each that is wanted, among numbers in ascending order, and its distance."""
    above = np.searchsorted(ranked, wanted).clip(1, len(ranked) - 1)
    gap_above, gap_below = np.abs(ranked[above] - wanted), np.abs(ranked[above - 1] - wanted)
    nearer = gap_above < gap_below
    return np.where(nearer, above, above - 1), np.where(nearer, gap_above, gap_below)


def query_mixture(row: Row) -> Fit | None:
    """The weights that a mixture of this row's q and another's has here, with the shares that fit best, by least squares."""
    found = row.own_logs(8)  # two shares and a constant fit almost any short row
    if found is None:
        return None
    seen, logs = found
    heads = row.context.call.q.shape[1]
    scores = row.context.scores[:, :, row.own].reshape(-1, len(seen))[:, seen]
    scores = scores - scores.mean(-1, keepdims=True)
    mine, wanted = scores[row.row * heads + row.head], logs - logs.mean()
    aa, bb, ab = mine @ mine, (scores * scores).sum(-1), scores @ mine
    det = aa * bb - ab * ab
    usable = det > 1e-6 * aa * bb  # not parallel to the right scores
    safe = np.where(usable, det, 1.0)
    wa, wb = wanted @ mine, scores @ wanted
    a, b = (wa * bb - wb * ab) / safe, (wb * aa - wa * ab) / safe
    gaps = np.abs(a[:, None] * mine + b[:, None] * scores - wanted).max(-1)
    gaps[~usable] = np.inf
    best = int(gaps.argmin())
    if gaps[best] > 5 * row.tolerance.log or min(abs(a[best]), abs(b[best])) < 0.02:
        return None
    share = round(float(a[best]), 3), round(float(b[best]), 3)
    return Fit("query-mixture", source=divmod(best, heads), share=share)


def mixture(row: Row) -> Fit | None:
    """A sum of the right weights and of another query's, with the shares that fit best, by least squares."""
    weights, mine, other = row.weights.ravel(), row.expected.ravel(), row.context.flat
    if (weights > row.tolerance.least).sum() < 8:
        return None  # two shares fit almost any short row
    aa, bb, ab = mine @ mine, (other * other).sum(-1), other @ mine
    wa, wb = weights @ mine, other @ weights
    det = aa * bb - ab * ab
    usable = det > 1e-9 * aa * bb  # not parallel to the right weights
    a = np.where(usable, (wa * bb - wb * ab) / np.where(usable, det, 1), 0)
    b = np.where(usable, (wb * aa - wa * ab) / np.where(usable, det, 1), 0)
    gaps = np.abs(a[:, None] * mine + b[:, None] * other - weights).sum(-1)
    gaps[~usable] = np.inf
    best = int(gaps.argmin())
    if gaps[best] > 2 * row.tolerance.weight or min(abs(a[best]), abs(b[best])) < 10 * row.tolerance.weight:
        return None
    share = round(float(a[best]), 4), round(float(b[best]), 4)
    return Fit("mixture", source=divmod(best, row.context.call.q.shape[1]), share=share)
