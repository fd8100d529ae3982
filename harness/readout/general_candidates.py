"""Effects that are tried whatever was read, with parameters that follow from the outputs alone."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from assay.harness.localize.reading import Numbers
from assay.harness.readout.block_scales import block_scales
from assay.harness.readout.dims import DIMS, Answer, lost_dims
from assay.harness.readout.effects import ATOMS, Kept, Plus, RunningAverage, ScaleAndTimes, Times, WithAtom, kept_output
from assay.harness.readout.elsewhere import FromElsewhere, Moved
from assay.harness.readout.explained import common
from assay.harness.readout.formulas import DESCALES, TIMES, constant_formula
from assay.harness.readout.key_factors import FACTORS, KeyFactors, Part
from assay.harness.readout.maps import MAPS, unmoved
from assay.harness.readout.mining import ALWAYS, Condition, Literal, Term
from assay.harness.readout.online_softmax import online_softmaxes
from assay.harness.readout.operators import Effect
from assay.harness.readout.queries import Queries
from assay.harness.readout.sources import SOURCES

_FIRST_KEYS = tuple(Condition((Literal(Term("j", cost=0.2), "<", n),)) for n in (1, 2, 4, 8, 16)) + tuple(
    Condition((Literal(Term("key_row", cost=1.0), "<", n),)) for n in (1, 2, 4, 8, 16, 32, 64)
)
"""Keys that a kernel may not have written yet: a sink, and the first vector, page or tile."""
_CACHED = Condition((Literal(Term("j", "prefix", cost=0.2), "<", 0),))
_NEW = Condition((Literal(Term("j", "prefix", cost=0.2), ">=", 0),))
_HALF = (0.5, 0.5)
"""Shares that are tried where they cannot be fitted, since the output is not linear in q and K: the mean of two rows."""
_CALLS, _ROWS = 4, 6
"""Calls, and rows of each, in which shares are fitted."""
_BLENDED = 1e-7
"""Square of the relative error up to which an output is the mixture that was fitted: what float32 leaves of it."""
_FLAT = 1e-3
"""By how much numbers that were added to an output may differ, relative to the largest, to count as one."""


def general_effects(answers: Sequence[Answer]) -> Iterable[Effect]:
    """Effects that are tried whatever was read.

    Args:
        answers: what the kernel answered.
    """
    yield from lost_dims(answers)
    yield from DIMS
    for formula in TIMES:
        yield Times(formula, cost=1.5)
    yield from (ScaleAndTimes(*both) for both in DESCALES)
    yield from _averages(answers)
    yield from block_scales()
    yield from online_softmaxes()
    yield from _blends(answers)
    for of, factor in itertools.product((_CACHED, _NEW), FACTORS):
        yield KeyFactors((Part("seen", of, factor, "score"),), cost=2.0 + of.cost)
    yield from _kept(answers)
    yield from _added(answers)
    yield from _multiplied(answers)
    for (words, row), what in itertools.product(MAPS, ("kv", "v", "k")):
        for condition in (ALWAYS, _CACHED, _NEW):
            yield Moved(what, condition, words, row, cost=2.0 + condition.cost + 0.2 * (what != "kv"))


def _kept(answers: Sequence[Answer]) -> Iterable[Effect]:
    """Mixtures with the output of the call before."""
    shares: Counter[tuple[float, float]] = Counter()
    for queries, actual, bad in answers:
        before = kept_output(queries)
        if before is None:
            continue
        columns = np.stack([queries.right, before], -1).reshape(len(bad), -1, 2)[bad].reshape(-1, 2)
        wanted = actual.reshape(len(bad), -1)[bad].ravel()
        if np.isfinite(wanted).all() and np.isfinite(columns).all():
            shares[_share(*np.linalg.lstsq(columns, wanted, rcond=None)[0])] += 1
    for share, _ in shares.most_common(2):
        yield Kept(share)


def _averages(answers: Sequence[Answer]) -> Iterable[Effect]:
    """Mixtures with the output of the query before, as the kernel gave it."""
    shares: Counter[tuple[float, float]] = Counter()
    for queries, actual, bad in answers:
        wrong = bad.reshape(queries.shape)
        follows = (
            np.flatnonzero((np.diff(queries.rows) == 1) & (np.diff(queries.table["seq"][:: queries.heads]) == 0)) + 1
        )
        for row, head in itertools.product(follows, range(queries.heads)):
            columns = np.stack([queries.right[row, head], actual[row - 1, head]], -1)
            if wrong[row, head] and np.isfinite(columns).all() and (share := _fitted(columns, actual[row, head])):
                shares[share] += 1
    for share, _ in shares.most_common(2):
        yield RunningAverage(share)


def _added(answers: Sequence[Answer]) -> Iterable[Effect]:
    """A number that is added to every number of an output."""
    added: list[tuple[float, float]] = []
    for queries, actual, bad in answers:
        with np.errstate(invalid="ignore"):
            gap = (actual - queries.right).reshape(len(bad), -1)[bad]
            flat = np.ptp(gap, axis=-1) < _FLAT * np.abs(gap).max(-1)
        added += [(float(value), queries.mean_size) for value in gap[flat].mean(-1)[:4]]
    if added:
        yield from map(Plus, common([value for value, _ in added], 1))
        yield from (Plus(value, relative=True) for value in common([value / size for value, size in added], 1))


def _multiplied(answers: Sequence[Answer]) -> Iterable[Effect]:
    """A factor of outputs."""
    factors: list[float] = []
    for queries, actual, bad in answers:
        given, right = (x.reshape(len(bad), -1)[bad] for x in (actual, queries.right))
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            factor = (given * right).sum(-1) / (right * right).sum(-1)
            gaps = np.abs(given - factor[:, None] * right).sum(-1) / np.abs(given).sum(-1)
        factors += factor[np.nan_to_num(gaps, nan=np.inf) < _FLAT][:_ROWS].tolist()
    yield from (Times(constant_formula(factor), cost=1.4) for factor in (common(factors, 2) if factors else []))


def _blends(answers: Sequence[Answer]) -> Iterable[Effect]:
    """Mixtures of the right output and another, whose shares follow from the outputs."""
    for atom in ATOMS:
        yield from (WithAtom(atom, share) for share in _shares(answers, atom.outputs))
    for words, row in MAPS:
        whole = Moved("v", ALWAYS, words, row)
        yield from (replace(whole, share=share, cost=2.2) for share in _shares(answers, whole.outputs))
        yield from (Moved(what, ALWAYS, words, row, share=_HALF, cost=2.4) for what in ("k", "kv"))
    for source in SOURCES:
        if source.cost <= 1.0:
            other = FromElsewhere(source, cost=2.0 + source.cost)
            yield other
            yield from (replace(other, share=share) for share in _shares(answers, other.outputs))
            yield FromElsewhere(source, "query", _HALF, cost=2.0 + source.cost)
            weights = FromElsewhere(source, "weights", cost=2.0 + source.cost)
            yield from (replace(weights, share=share) for share in _shares(answers, weights.outputs))
    for what, condition in itertools.product(("k", "v", "kv"), (ALWAYS, *_FIRST_KEYS)):
        yield Moved(what, condition, "", unmoved, stale=True, cost=2.0 + condition.cost)


def _shares(answers: Sequence[Answer], other: Callable[[Queries], Numbers]) -> list[tuple[float, float]]:
    """By which shares of the right output and another one the wrong outputs are made, as far as they are."""
    found: Counter[tuple[float, float]] = Counter()
    for queries, actual, bad in answers[:_CALLS]:
        chosen = np.flatnonzero(bad)[:_ROWS]
        wanted = actual.reshape(len(bad), -1)[chosen]
        columns = np.stack([queries.right, other(queries)], -1).reshape(len(bad), -1, 2)[chosen]
        found.update(share for x, y in zip(columns, wanted, strict=True) if (share := _fitted(x, y)))
    return [share for share, _ in found.most_common(2)]


def _fitted(columns: Numbers, wanted: Numbers) -> tuple[float, float] | None:
    """The shares of two columns, [head_dim_v, 2], that make an output; None if none do, or the second has no share."""
    if not np.isfinite(wanted).all():
        return None
    (a, b), rest, rank, _ = np.linalg.lstsq(columns, wanted, rcond=None)
    if rank < 2 or not rest.size or rest[0] > _BLENDED * (wanted**2).sum() or abs(b) <= 1e-3:
        return None
    return _share(a, b)


def _share(right: float, other: float) -> tuple[float, float]:
    """Shares as few digits say them; the sum turns -0.0 into 0.0."""
    return round(float(right), 3) + 0.0, round(float(other), 3) + 0.0
