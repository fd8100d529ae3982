"""From forms to effects: finds effects that explain the weights that were read."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from assay.harness.localize.reading import Flags, Numbers, softmax
from assay.harness.readout.conditions import Table, conditions_of
from assay.harness.readout.edges import Search, Sum, amounts_of, edges
from assay.harness.readout.effects import MERGES, PARTS, merged, multiplied
from assay.harness.readout.features import PAIR_TERMS, Ints, chosen, joined
from assay.harness.readout.formulas import SCALES, constant_formula
from assay.harness.readout.key_factors import KeyFactor, KeyFactors
from assay.harness.readout.operators import Effect
from assay.harness.readout.queries import Queries
from assay.harness.readout.samples import Sample, common, every, near

# A rule of at most this cost is plain enough to stop the search.
_PLAIN = 3.5
# Correct rows to test a rule on: of a reading, and of queries that were not read.
_RIGHT_ROWS, _OTHER_ROWS = 12, 4
# A weight that is below this if its key is seen says little about whether it is.
_FAINT = 1e-5
# In a row with more keys, only some are examined: odd ones, their neighbours, the ends, and some in between.
_MANY_KEYS = 160
# Queries, the index of a query and head, and the factor of each packed key there, [total_k], or None for a correct row.
_Row = tuple[Queries, int, "Numbers | None"]


def key_factors(readings: Sequence[Sample], negatives: Sequence[Queries] = ()) -> list[KeyFactors]:
    """Mine rules for the weights of keys from readings of wrong rows and from correct queries, cheapest first."""
    wrong: list[_Row] = [(reading.queries, place, fit.keys) for reading, place, fit in every(readings, "keys")]
    if not wrong:
        return []
    right = _right_rows(readings, negatives)
    counted = [(queries, place, _counted(factors)) for queries, place, factors in wrong if factors is not None]
    rules: list[KeyFactors] = []
    # With the correct rows, a rule also says where the effect shows; without them, the condition on queries does.
    for rows in ([*wrong, *right], wrong, [*counted, *right], counted):
        for parts in _rules(rows):
            cost = sum(0.4 + part.condition.cost + 0.3 * (part.factor != 0) for part in parts)
            rules.append(KeyFactors(parts, cost=cost))
        if rows is wrong and any(rule.cost < _PLAIN for rule in rules):
            break
    return sorted(dict.fromkeys(rules), key=lambda rule: rule.cost)


def _right_rows(readings: Sequence[Sample], negatives: Sequence[Queries]) -> list[_Row]:
    rows: list[_Row] = [
        (reading.queries, int(n), None) for reading in readings for n in np.flatnonzero(~reading.bad)[:_RIGHT_ROWS]
    ]
    draw = np.random.default_rng(0)
    for queries in negatives:
        places = draw.permutation(len(queries.table["row"]))[:_OTHER_ROWS]
        rows += [(queries, int(place), None) for place in places]
    return rows


def _counted(factors: Numbers) -> Numbers:
    """Return factors as multiples of the smallest: one row does not show which of two weights is correct."""
    least = factors[factors > 0].min() if (factors > 0).any() else 1.0
    return np.where(factors > 0, factors / least, factors)


def _rules(rows: Sequence[_Row]) -> list[tuple[KeyFactor, ...]]:
    """Return the cheapest parts that explain the rows, and variants with one rival part, or [] if a factor follows no rule."""
    parts: list[list[KeyFactor]] = []
    for name, table, values in _universes(rows):
        usual = float(name == "seen")
        odd = common([v for v in values.tolist() if not near(v, usual)], 4) if (values != usual).any() else []
        if len(odd) > 3:
            return []
        for factor in odd:
            flags = np.isclose(values, factor, rtol=3e-3, atol=1e-6)
            if not flags.any():
                continue
            rules = conditions_of(table, flags, PAIR_TERMS)
            if not rules:
                return []
            parts.append([KeyFactor(name, rule, factor) for rule in rules])
    if not parts:
        return []
    leaders = tuple(options[0] for options in parts)
    return [leaders] + [
        (*leaders[:n], rival, *leaders[n + 1 :]) for n, options in enumerate(parts) for rival in options[1:]
    ]  # fmt: skip


def _universes(rows: Sequence[_Row]) -> Iterable[tuple[str, Table, Numbers]]:
    """Yield each universe of `KeyFactor` that has keys, with the features of the examined keys and their factors."""
    pieces: dict[str, list[tuple[Table, Numbers]]] = {}
    draw = np.random.default_rng(0)
    for queries, place, factors in rows:
        t, h = divmod(place, queries.heads)
        seen, own = queries.visible[t], queries.own_rows[t]
        actual = seen.astype(float) if factors is None else factors
        for name, inside in queries.universes.items():
            usual = actual == float(name == "seen")
            rivals = seen if name == "seen" else np.ones_like(own) if name == "foreign" else own
            faint = softmax(queries.own_scores[t, h], rivals) < _FAINT
            keys = _looked_at(inside[t] & ~(faint & usual), ~usual, draw)
            if len(keys):
                features = chosen(queries.pairs, keys + place * queries.call.k.shape[0])
                pieces.setdefault(name, []).append((features, actual[keys]))
    for name, some in pieces.items():
        yield name, joined([table for table, _ in some]), np.concatenate([values for _, values in some])


def _looked_at(inside: Flags, odd: Flags, draw: np.random.Generator) -> Ints:
    """Return the keys of a row to examine."""
    where = np.flatnonzero(inside)
    if len(where) <= _MANY_KEYS:
        return where
    wrong = where[odd[where]]
    ends = np.concatenate([where[:10], where[-40:], where[np.linspace(0, len(where) - 1, 60).astype(int)]])
    beside = np.intersect1d(np.concatenate([wrong[:1] - 1, wrong[-1:] + 1]), where)
    return np.unique(np.concatenate([draw.permutation(wrong)[:60], wrong[:2], wrong[-2:], beside, ends]))


# Most rows whose scale is compared with formulas.
_MOST_SCALES = 100


def effects_of(readings: Sequence[Sample], negatives: Sequence[Queries] = ()) -> Iterable[Effect]:
    """Yield effects, without conditions, that explain the weights that were read; the kernel is correct on `negatives`."""
    yield from _scales(readings)
    yield from _phantoms(readings)
    yield from edges(readings, negatives)
    if every(readings, "pieces"):
        yield from (merged(block, law) for block, law in itertools.product(PARTS, MERGES))


def _scales(readings: Sequence[Sample]) -> Iterable[Effect]:
    fits = every(readings, "scale")
    if not fits:
        return
    some = fits[:: len(fits) // _MOST_SCALES + 1]
    for formula in SCALES:
        hits = [near(float(formula.of(reading.queries)[place]), fit.number) for reading, place, fit in some]
        if sum(hits) >= max(2, 0.4 * len(hits)):
            yield multiplied(formula, cost=0.8)
    for value in common([fit.number for _, _, fit in fits]):
        yield multiplied(constant_formula(value), cost=1.2)


def _phantoms(readings: Sequence[Sample]) -> Iterable[Effect]:
    """Yield effects whose denominators count too many keys."""
    fits = [
        (reading, place, fit)
        for reading, place, fit in every(readings, "keys-and-mass")
        if fit.keys is not None and (np.isclose(fit.keys, 1) | (fit.keys == 0)).all()
    ]
    if not fits:
        return
    # The excess is a whole number, since exp(0) = 1.
    counts = np.array([fit.phantom for _, _, fit in fits])
    whole = np.abs(counts - np.round(counts)) < np.minimum(0.02 * np.maximum(1, np.abs(counts)), 0.1)
    if whole.mean() < 0.6 or (np.round(counts[whole]) <= 0).mean() > 0.2:
        return
    wanted = np.round(counts[whole]).astype(np.int64)
    table = chosen(joined([chosen(reading.queries.table, np.array([place])) for reading, place, _ in fits]), whole)
    for number, _ in Counter(wanted.tolist()).most_common(2):
        yield KeyFactors((), phantom=Sum((), int(number)), cost=1.4)
    # Numbers of keys, or of blocks, as sums of lengths.
    for size in (1, *_BLOCKS):
        for count in _COUNTS(table, wanted * size)[:2]:
            yield KeyFactors((), phantom=replace(count, block=size), cost=1.8 + count.cost)


_BLOCKS = (16, 32, 64, 128)
# The number of keys, or blocks of keys, up to the next block, or up to the longest sequence of the batch.
_COUNTS = Search(
    amounts_of(
        (("total", 0.2), ("prefix", 0.2), ("new", 0.3), ("most_total", 0.5), ("most_prefix", 0.5), ("most_new", 0.6))
    ),
    largest=0,
)
