"""Rules on which keys are seen and how much they count, mined from what was read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from assay.harness.localize.reading import Numbers
from assay.harness.readout.explained import Explained, common, every, near
from assay.harness.readout.features import DERIVED_PAIR_TERMS, PAIR_TERMS, Ints, chosen, joined
from assay.harness.readout.key_factors import FACTORS, KeyFactors, Part
from assay.harness.readout.mining import Table, mine, mine_further
from assay.harness.readout.queries import Flags, Queries

_PLAIN = 3.5
"""Cost of a rule that is plain enough not to look for another."""
_RIGHT_ROWS, _OTHER_ROWS = 12, 4
"""Right rows that a rule is tried on: of a reading, and of queries that were not read."""
_SCORED_ROWS = 80
"""Rows in which factors of scores are looked at."""
_FAINT = 1e-5
"""A right weight below this says little on whether its key is seen."""
_MANY_KEYS = 160
"""Keys of a row from which on only some are looked at: odd ones, their neighbours, the ends, and some between."""


@dataclass(frozen=True)
class _Row:
    """A query and head, and the factor of each packed key, [total_k]; None for a right one."""

    queries: Queries
    place: int
    factors: Numbers | None

    @property
    def index(self) -> tuple[int, int]:
        """Row and head."""
        return divmod(self.place, self.queries.heads)

    def table(self, keys: Ints) -> Table:
        """Features of some keys."""
        return chosen(self.queries.pairs, keys + self.place * self.queries.call.k.shape[0])


def key_factors(readings: Sequence[Explained], negatives: Sequence[Queries] = (), most: int = 6) -> list[KeyFactors]:
    """Rules on which keys are seen and how much, mined from what was read; cheapest first.

    Args:
        readings: readings of wrong rows.
        negatives: queries on which the kernel is right.
        most: most rules to return, for each way of looking at the rows.
    """
    found = [(one, place, fit) for one, place, fit in every(readings, "keys", "keys-of-all") if fit.keys is not None]
    scored = _score_factors(readings)
    if not found:
        return scored
    # In a short row either form may fit; most rows say which it is.
    of_all = sum(fit.form == "keys-of-all" for _, _, fit in found) > len(found) / 2
    denominator = "all" if of_all else "counted"
    found = [one for one in found if of_all == (one[2].form == "keys-of-all")]
    wrong = [_Row(one.queries, place, fit.keys) for one, place, fit in found]
    right = _right_rows(readings, negatives)
    counted = [_Row(row.queries, row.place, _counted(row.factors)) for row in wrong if row.factors is not None]
    rules: list[KeyFactors] = []
    # With the right rows, a rule says also where the effect shows; without them, that is left to the condition on queries.
    for rows in ([*wrong, *right], wrong, [*counted, *right], counted):
        for parts in _rules(rows, most):
            cost = sum(0.4 + part.condition.cost + 0.3 * (part.factor != 0) for part in parts)
            rules.append(KeyFactors(parts, denominator, cost=cost))
        if rows is wrong and any(rule.cost < _PLAIN for rule in rules):
            break
    return sorted(dict.fromkeys([*rules, *scored]), key=lambda one: one.cost)


def _right_rows(readings: Sequence[Explained], negatives: Sequence[Queries]) -> list[_Row]:
    found = [_Row(one.queries, int(n), None) for one in readings for n in np.flatnonzero(one.right)[:_RIGHT_ROWS]]
    draw = np.random.default_rng(0)
    for queries in negatives:
        places = draw.permutation(len(queries.table["row"]))[:_OTHER_ROWS]
        found += [_Row(queries, int(place), None) for place in places]
    return found


def _score_factors(readings: Sequence[Explained]) -> list[KeyFactors]:
    """Factors of the scores of some keys."""
    found = every(readings, "slopes")
    if not found:
        return []
    read = common([fit.number for _, _, fit in found], 1)[0]
    value = next((one for one in FACTORS if near(one, read, 5e-3)), read)
    # In a short row, every key may be one of those.
    found += [(one, place, fit) for one, place, fit in every(readings, "scale") if near(fit.number, read, 5e-3)]
    found = found[:: len(found) // _SCORED_ROWS + 1]
    tables, flags = [], []
    for one, place, fit in found:
        factors = np.full(one.queries.call.k.shape[0], fit.number) if fit.keys is None else fit.keys
        row = _Row(one.queries, place, factors)
        known = np.flatnonzero(one.queries.visible[row.index[0]] & ~np.isnan(factors))
        tables.append(row.table(known))
        flags.append(factors[known] != 1)
    rules = mine(joined(tables), np.concatenate(flags), PAIR_TERMS, 2)
    return [KeyFactors((Part("seen", rule, value, "score"),), cost=1.4 + rule.cost) for rule in rules]


def _counted(factors: Numbers) -> Numbers:
    """Factors as multiples of the smallest: which of two weights is the right one cannot be told from one row."""
    least = factors[factors > 0].min() if (factors > 0).any() else 1.0
    return np.where(factors > 0, factors / least, factors)


def _rules(rows: Sequence[_Row], most: int) -> list[tuple[Part, ...]]:
    """Parts that explain the rows: the cheapest, and with one of them replaced by a rival; empty if some factor follows no rule."""
    parts: list[list[Part]] = []
    for name, table, values in _universes(rows):
        usual = float(name == "seen")
        odd = common([v for v in values.tolist() if not near(v, usual)], 4) if (values != usual).any() else []
        if len(odd) > 3:
            return []
        for factor in odd:
            flags = np.isclose(values, factor, rtol=3e-3, atol=1e-6)
            if not flags.any():
                continue
            rules = mine_further(table, flags, PAIR_TERMS, DERIVED_PAIR_TERMS, most)
            if not rules:
                return []
            parts.append([Part(name, rule, factor) for rule in rules])
    if not parts:
        return []
    leaders = tuple(options[0] for options in parts)
    return [leaders] + [
        (*leaders[:n], rival, *leaders[n + 1 :]) for n, options in enumerate(parts) for rival in options[1:]
    ]  # fmt: skip


def _universes(rows: Sequence[_Row]) -> Iterable[tuple[str, Table, Numbers]]:
    """For each universe of `Part` that has keys: features of the keys that are looked at, and their factors."""
    found: dict[str, list[tuple[Table, Numbers]]] = {"seen": [], "hidden": [], "foreign": []}
    draw = np.random.default_rng(0)
    for row in rows:
        queries, (t, h) = row.queries, row.index
        seen, own = queries.visible[t], queries.own_rows[t]
        actual = seen.astype(float) if row.factors is None else row.factors
        faint = seen & (queries.weights[t, h, queries.own[h]] < _FAINT)
        for name, inside in (("seen", seen & ~faint), ("hidden", own & ~seen), ("foreign", ~own)):
            keys = _looked_at(inside, actual != float(name == "seen"), draw)
            if len(keys):
                found[name].append((row.table(keys), actual[keys]))
    for name, pieces in found.items():
        if pieces:
            yield name, joined([table for table, _ in pieces]), np.concatenate([values for _, values in pieces])


def _looked_at(inside: Flags, odd: Flags, draw: np.random.Generator) -> Ints:
    """Keys of a row that are looked at."""
    where = np.flatnonzero(inside)
    if len(where) <= _MANY_KEYS:
        return where
    wrong = where[odd[where]]
    ends = np.concatenate([where[:10], where[-40:], where[np.linspace(0, len(where) - 1, 60).astype(int)]])
    beside = np.intersect1d(np.concatenate([wrong[:1] - 1, wrong[-1:] + 1]), where)
    return np.unique(np.concatenate([draw.permutation(wrong)[:60], wrong[:2], wrong[-2:], beside, ends]))
