"""From forms to effects: which effects could have made the weights that were read."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from assay.harness.readout.edges import edges
from assay.harness.readout.effects import Biased, Constant, Limited, Scale, Times
from assay.harness.readout.elsewhere import FromElsewhere, OtherKvHead
from assay.harness.readout.explained import Explained, common, every, near
from assay.harness.readout.exponentials import Exponential
from assay.harness.readout.expressions import Blocks, Search, amounts_of
from assay.harness.readout.features import ROW_TERMS, Ints, chosen, joined
from assay.harness.readout.forms import Fit
from assay.harness.readout.formulas import QUANTISED, SCALES, TIMES, constant_formula
from assay.harness.readout.key_factors import KeyFactors
from assay.harness.readout.merges import BLOCKS, LAWS, PART_LAWS, Merged
from assay.harness.readout.mining import Table, Term, Value, mine_values
from assay.harness.readout.moves import moves
from assay.harness.readout.operators import Effect
from assay.harness.readout.queries import Queries
from assay.harness.readout.sources import SOURCES, Source

_MOST_SOURCES = 16
"""Sets of rows, each of which other sources explain, that are tried for one form."""
_RIVALS = 3
"""Sources that are tried of those that explain the same rows."""
_MOST_SCALES = 100
"""Rows whose scale is compared with formulas."""
_FAR = 0.3
"""Share of the rows that a source must explain more for one more of cost."""
_SHARE = 0.15
"""Share of the rows that a source must explain: where two heads are swapped, each source is that of half of the rows at most."""


def effects_of(readings: Sequence[Explained], negatives: Sequence[Queries] = ()) -> Iterable[Effect]:
    """Effects that could have made these weights, without conditions.

    Args:
        readings: what was read.
        negatives: queries on which the kernel is right.
    """
    yield from _constants(readings)
    yield from _scales(readings)
    yield from _bent(readings)
    yield from _exponentials(readings)
    yield from _masses(readings)
    yield from _kv_heads(readings)
    for form in ("output", "query", "mixture", "query-mixture"):
        yield from _sources(readings, form)
    yield from edges(readings, negatives)
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
    some = found[:: len(found) // _MOST_SCALES + 1]
    for formula in (*SCALES, *QUANTISED):
        hits = [near(float(formula.of(one.queries)[place]), fit.number) for one, place, fit in some]
        if sum(hits) >= max(2, 0.4 * len(hits)):
            yield Scale(formula, cost=0.8 + 0.6 * (formula in QUANTISED))
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


def _exponentials(readings: Sequence[Explained]) -> Iterable[Effect]:
    """Functions in place of exp(score) that many of the rows with one have in common."""
    found = [(fit.law, fit.number) for _, _, fit in every(readings, "bent") if fit.law is not None]
    rows = len({(id(one), place) for one, place, _ in every(readings, "bent")})
    for law, count in Counter(law for law, _ in found).most_common():
        if count < max(2, _SHARE * rows):
            break
        numbers = common([number for which, number in found if which == law], 2) if law.fitted else [0.0]
        for number in numbers:
            yield Exponential(law, number)


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
    yield from _phantoms(found)


def _phantoms(found: Sequence[tuple[Explained, int, Fit]]) -> Iterable[Effect]:
    """Denominators that count too many keys: the sum of their exp(score) is a whole number of equal terms."""
    sums = np.array([fit.phantom for _, _, fit in found])
    for score in _PHANTOM_SCORES:
        counts = sums / math.exp(score)
        whole = np.abs(counts - np.round(counts)) < np.minimum(0.02 * np.maximum(1, np.abs(counts)), 0.1)
        if whole.mean() < 0.6 or (np.round(counts[whole]) <= 0).mean() > 0.2:
            continue
        wanted = np.round(counts[whole]).astype(np.int64)
        far = 0.5 * bool(score)
        for number, _ in Counter(wanted.tolist()).most_common(2):
            yield KeyFactors((), phantom=Value(None, int(number)), phantom_score=score, cost=1.4 + far)
        for value in mine_values(chosen(_table(found), whole), wanted, PHANTOMS, 2):
            yield KeyFactors((), phantom=value, phantom_score=score, cost=1.6 + far)
        if not score:
            yield from _counted_in_vain(chosen(_table(found), whole), wanted)


def _counted_in_vain(table: Table, wanted: Ints) -> Iterable[Effect]:
    """Numbers of keys, or of blocks, by sums of lengths."""
    for size in (1, *_BLOCKS):
        for count in _COUNTS(table, wanted * size)[:2]:
            yield KeyFactors((), phantom=count if size == 1 else Blocks(count, size), cost=1.8 + count.cost)


_BLOCKS = (16, 32, 64, 128)
_COUNTS = Search(
    (
        *amounts_of(
            (
                ("total", 0.2),
                ("prefix", 0.2),
                ("new", 0.3),
                ("most_total", 0.5),
                ("most_prefix", 0.5),
                ("most_new", 0.6),
            )
        ),
    ),
    largest=0,
)
"""How many keys, or blocks of keys, are missing to the next block, or to the longest sequence of the batch."""


_PHANTOM_SCORES = (0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5, 3.0, 4.0)
"""Scaled scores of keys that are counted in vain: 0 for rows of zeros, and small numbers that a kernel may fill in."""


PHANTOMS: tuple[Term, ...] = tuple(term for term in ROW_TERMS if not (term.words or term.minus or term.unit))
"""What the number of keys that are counted in vain may follow: amounts of one feature, such as a length or its rest in a block."""


def _table(found: Sequence[tuple[Explained, int, object]]) -> Table:
    """Features of places in readings."""
    return joined([chosen(one.queries.table, np.array([place])) for one, place, _ in found])


def _kv_heads(readings: Sequence[Explained]) -> Iterable[Effect]:
    for form, what in (("kv", "kv"), ("values", "v"), ("scored", "k")):
        found = [
            (one, place, kv)
            for one, place, fit in every(readings, form)
            if (kv := _kv_head(one, place, fit)) is not None
        ]
        if found:
            yield from _other_kv_heads(found, what)


def _kv_head(one: Explained, place: int, fit: Fit) -> int | None:
    """The kv head that a row reads its keys or values from, in their right rows; None if it reads other rows too."""
    if fit.form == "kv":
        return fit.kv
    assert fit.keys is not None
    known = np.flatnonzero(fit.keys >= 0)
    kv, keys = np.divmod(fit.keys[known].astype(np.int64), len(fit.keys))
    plain = len(known) and (keys == known).all() and (kv == kv[0]).all()
    return int(kv[0]) if plain and kv[0] != one.queries.own[place % one.queries.heads] else None


def _other_kv_heads(found: Sequence[tuple[Explained, int, int]], what: str) -> Iterable[Effect]:
    table = _table(found)
    wanted, count = np.array([kv for _, _, kv in found]), table["kv_heads"]
    options = [Value(Term("kv"), by) for by in (1, -1, 2)] + [Value(Term("head")), Value(Term("member"))]
    options += [Value(None, int(kv)) for kv in np.unique(wanted)[:4]]
    for value in options:
        if (value.of(table) % count == wanted).mean() > 0.4:
            yield OtherKvHead(value, what, cost=0.8 + value.cost)


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
    alike: dict[tuple[bool, ...], list[Source]] = {}
    for source in SOURCES:
        explained: list[bool] = []
        for number, places in wanted.items():
            rows, heads = source.row(readings[number].queries), source.head(readings[number].queries)
            explained += [(int(rows[place]), int(heads[place])) in those for place, those in places.items()]
        if sum(explained) >= max(1, _SHARE * total):
            alike.setdefault(tuple(explained), []).append(source)
    plain = {which: sorted(some, key=lambda one: one.cost)[:_RIVALS] for which, some in alike.items()}
    best = sorted(plain, key=lambda which: sum(which) / total - _FAR * plain[which][0].cost, reverse=True)
    for source in (source for which in best[:_MOST_SOURCES] for source in plain[which]):
        if form in ("output", "query"):
            yield FromElsewhere(source, form, cost=1.0 + source.cost + 0.3 * (form == "query"))
            continue
        for share, _ in shares.most_common(2):
            what = "output" if form == "mixture" else "query"
            yield FromElsewhere(source, what, share, cost=2.0 + source.cost)


def _merges(readings: Sequence[Explained]) -> Iterable[Effect]:
    if every(readings, "pieces"):
        for block, law in itertools.product(BLOCKS, LAWS):
            yield Merged(block, law)
        for law in PART_LAWS:
            yield Merged(0, law)
