"""From forms to effects: which effects could have made the weights that were read."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from assay.harness.readout.effects import Biased, Constant, Limited, Scale, Times
from assay.harness.readout.elsewhere import FromElsewhere, OtherKvHead
from assay.harness.readout.explained import Explained, common, every, near
from assay.harness.readout.features import ROW_TERMS, chosen, joined
from assay.harness.readout.formulas import SCALES, TIMES, constant_formula
from assay.harness.readout.key_factors import KeyFactors
from assay.harness.readout.merges import BLOCKS, CACHED_LAWS, LAWS, Merged
from assay.harness.readout.mining import Table, Term, Value, mine_values
from assay.harness.readout.moves import moves
from assay.harness.readout.operators import Effect
from assay.harness.readout.sources import SOURCES

_MOST_SOURCES = 8
"""Sources of one form that are tried."""


def effects_of(readings: Sequence[Explained]) -> Iterable[Effect]:
    """Effects that could have made these weights, without conditions."""
    yield from _constants(readings)
    yield from _scales(readings)
    yield from _bent(readings)
    yield from _masses(readings)
    yield from _kv_heads(readings)
    for form in ("output", "query", "mixture"):
        yield from _sources(readings, form)
    yield from moves(readings)
    yield from _merges(readings)


def _constants(readings: Sequence[Explained]) -> Iterable[Effect]:
    if every(readings, "zero"):
        yield Constant(0.0)
    numbers = Counter(round(fit.number, 5) for _, _, fit in every(readings, "constant"))
    for value, _ in numbers.most_common(3):
        yield Constant(value, cost=1.0)


def _scales(readings: Sequence[Explained]) -> Iterable[Effect]:
    found = every(readings, "scale")
    if not found:
        return
    for formula in SCALES:
        hits = [near(float(formula.of(one.queries)[place]), fit.number) for one, place, fit in found]
        if sum(hits) >= max(2, 0.5 * len(hits)):
            yield Scale(formula, cost=0.8)
    for value in common([fit.number for _, _, fit in found]):
        yield Scale(constant_formula(value), cost=1.2)


def _bent(readings: Sequence[Explained]) -> Iterable[Effect]:
    """Soft caps, and biases by distance."""
    if caps := [float(f"{fit.number:.2g}") for _, _, fit in every(readings, "capped")]:
        for value in common(caps, 2):
            yield Limited("scores", value, "capped")
    if slopes := [float(f"{fit.number:.3g}") for _, _, fit in every(readings, "biased")]:
        for value in common(slopes, 2):
            yield Biased(value)


def _masses(readings: Sequence[Explained]) -> Iterable[Effect]:
    """Outputs that are multiplied, and denominators that count too many keys."""
    found = [
        (one, place, fit)
        for one, place, fit in every(readings, "keys-and-mass")
        if fit.keys is not None and (np.isclose(fit.keys, 1) | (fit.keys == 0)).all()
    ]
    if not found:
        return
    for formula in TIMES:
        yield Times(formula, cost=1.0)
    for factor in common([fit.mass for _, _, fit in found]):
        yield Times(constant_formula(factor), cost=1.2)
    counts = np.array([fit.phantom for _, _, fit in found])
    whole = np.abs(counts - np.round(counts)) < 0.02 * np.maximum(1, np.abs(counts))
    if whole.mean() < 0.6 or (np.round(counts[whole]) <= 0).mean() > 0.2:
        return
    wanted = np.round(counts[whole]).astype(np.int64)
    for number, _ in Counter(wanted.tolist()).most_common(2):
        yield KeyFactors((), phantom=Value(None, int(number)), cost=1.4)
    for value in mine_values(chosen(_table(found), whole), wanted, PHANTOMS, 2):
        yield KeyFactors((), phantom=value, cost=1.6)


PHANTOMS: tuple[Term, ...] = tuple(term for term in ROW_TERMS if not term.words and not term.minus)
"""What the number of keys that are counted in vain may follow: amounts of one feature, such as a length or its rest in a block."""


def _table(found: Sequence[tuple[Explained, int, object]]) -> Table:
    """Features of places in readings."""
    return joined([chosen(one.queries.table, np.array([place])) for one, place, _ in found])


def _kv_heads(readings: Sequence[Explained]) -> Iterable[Effect]:
    found = every(readings, "kv")
    if not found:
        return
    table = _table(found)
    wanted, count = np.array([fit.kv for _, _, fit in found]), table["kv_heads"]
    options = [Value(Term("kv"), by) for by in (1, -1, 2)] + [Value(Term("head")), Value(Term("member"))]
    options += [Value(None, int(kv)) for kv in np.unique(wanted)[:4]]
    for value in options:
        if (value.of(table) % count == wanted).mean() > 0.4:
            yield OtherKvHead(value, cost=0.8 + value.cost)


def _sources(readings: Sequence[Explained], form: str) -> Iterable[Effect]:
    """Sources that many rows of a form are explained by."""
    wanted: dict[int, dict[int, set[tuple[int, int]]]] = {}
    shares: Counter[tuple[float, float]] = Counter()
    for number, one in enumerate(readings):
        for place, fit in one.having(form):
            wanted.setdefault(number, {}).setdefault(place, set()).add(fit.source)
            shares[round(fit.share[0], 3), round(fit.share[1], 3)] += 1
    total = sum(len(places) for places in wanted.values())
    if not total:
        return
    hits: list[tuple[float, int]] = []
    for index, source in enumerate(SOURCES):
        count = 0
        for number, places in wanted.items():
            rows, heads = source.row(readings[number].queries), source.head(readings[number].queries)
            count += sum((int(rows[place]), int(heads[place])) in those for place, those in places.items())
        if count >= max(1, 0.3 * total):
            hits.append((count - 0.01 * source.cost, index))
    for _, index in sorted(hits, reverse=True)[:_MOST_SOURCES]:
        source = SOURCES[index]
        if form != "mixture":
            yield FromElsewhere(source, form, cost=1.0 + source.cost + 0.3 * (form == "query"))
            continue
        for share, _ in shares.most_common(2):
            yield FromElsewhere(source, share=share, cost=2.0 + source.cost)


def _merges(readings: Sequence[Explained]) -> Iterable[Effect]:
    if every(readings, "pieces"):
        for block, law in itertools.product(BLOCKS, LAWS):
            yield Merged(block, law)
        for law in CACHED_LAWS:
            yield Merged(0, law)
