"""Edges of masks: the last key, or the first, that a query sees, as a sum of lengths, positions and their remainders.

A rule on pairs compares a key with one expression at a time. A tile or a page that moves an edge makes it a sum, such as
``p + (-new mod 16)``: here the edges that were read are searched for the cheapest such sum that gives them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from assay.harness.readout.explained import Explained, every
from assay.harness.readout.features import HISTORY, Ints
from assay.harness.readout.forms import Fit
from assay.harness.readout.mining import Table, strangeness
from assay.harness.readout.operators import Effect
from assay.harness.readout.queries import Flags, Queries, softmax
from assay.harness.readout.reading import Numbers

Rounding = Literal["", "up", "down", "mod", "gap"]


@dataclass(frozen=True)
class Amount:
    """A feature of a query, or what a tile makes of it.

    Attributes:
        name: the feature.
        rounding: "up" or "down", to a multiple of `size`; "mod", the remainder by it; "gap", what is missing to the next multiple.
        size: see `rounding`.
        cost: how far-fetched it is.
    """

    name: str
    rounding: Rounding = ""
    size: int = 1
    cost: float = 0.5

    def of(self, table: Table) -> Ints:
        """Its value for each query and head, int64 [rows * heads]."""
        x = table[self.name]
        if self.rounding == "mod":
            return x % self.size
        if self.rounding == "gap":
            return -x % self.size
        return {"": x, "up": -(-x // self.size) * self.size, "down": x // self.size * self.size}[self.rounding]


@dataclass(frozen=True)
class Sum:
    """Up to two amounts, each added or subtracted, and a number.

    Attributes:
        amounts: (1 or -1, the amount).
        plus: the number.
    """

    amounts: tuple[tuple[int, Amount], ...]
    plus: int = 0

    def of(self, table: Table) -> Ints:
        """Its value for each query and head, int64 [rows * heads]."""
        found = np.full(len(table["row"]), self.plus)
        for sign, amount in self.amounts:
            found = found + sign * amount.of(table)
        return found

    @property
    def cost(self) -> float:
        """How far-fetched it is."""
        return sum(0.4 + amount.cost + 0.3 * (sign < 0) for sign, amount in self.amounts) + strangeness(self.plus)


@dataclass(frozen=True)
class Edge(Effect):
    """A mask with another edge: a query sees its sequence up to a key, or what it should see from a key on.

    Attributes:
        side: "last" or "first", the key that `at` gives.
        at: index of that key.
    """

    side: Literal["last", "first"]
    at: Sum
    cost: float = 1.0

    def outputs(self, queries: Queries) -> Numbers:
        at = self.at.of(queries.table).reshape(*queries.shape, 1)
        j = queries.pairs["j"].reshape(queries.own_scores.shape)
        seen = queries.own_rows[:, None] & (j <= at) if self.side == "last" else queries.visible[:, None] & (j >= at)
        return queries.of_own(softmax(queries.own_scores, seen))


_SIZES = (8, 16, 32, 64, 128, 256)
_PLAIN = (("pos", 0.1), ("prefix", 0.2), ("total", 0.2), ("new", 0.2), ("i", 0.2))
_OTHERS = (
    "previous_total",
    "previous_prefix",
    "next_total",
    "next_prefix",
    "first_total",
    "first_prefix",
    "most_total",
    "most_new",
    *HISTORY,
)
AMOUNTS: tuple[Amount, ...] = (
    *(Amount(name, cost=cost) for name, cost in _PLAIN),
    *(Amount(name, cost=0.9) for name in _OTHERS),
    *(Amount(name, rounding, size, cost + 0.5 + 0.1 * (rounding in ("mod", "gap")))
      for name, cost in _PLAIN for rounding in ("up", "down", "mod", "gap") for size in _SIZES),
)  # fmt: skip
"""What an edge may be made of: lengths and the place of a query, lengths of its neighbours and of calls before, which a kernel may
take for its own, and what tiles and pages of usual sizes make of its own."""
_MOST_ROWS = 200
_LEAST_ROWS = 6
"""Rows whose edges must be known exactly: a sum of two amounts and a number fits three rows by chance."""
_RIVALS = 6
"""Sums that are tried of those that give the edges that were read."""
_BASE = 1.5
"""Cost of an edge beside that of its sum: a rule on pairs that does the same is said first, since masks have names."""
_CONSTANTS, _WINDOWS = 2, 8192
"""Largest size of the number in a sum: the last key is off by one or two, the first one is a window away."""


def edges(readings: Sequence[Explained]) -> Iterable[Edge]:
    """Edges that give the last, or the first, key of every wrong row that was read and sees a run of its own keys."""
    found = [row for row in (_run(*one) for one in every(readings, "keys")) if row is not None]
    found = found[:: len(found) // _MOST_ROWS + 1]
    if len(found) < _LEAST_ROWS:
        return
    table = {name: np.array([row.table[name] for row in found]) for name in found[0].table}
    first, last, end = (np.array([getattr(row, name) for row in found]) for name in ("first", "last", "end"))
    whole = np.array([row.last == row.last_right for row in found])
    if not first.any():
        for at in _sums(table, last, last < end, _CONSTANTS):  # at the end of a sequence, an edge beyond it is cut off
            if (at.of(table) >= last).all():
                yield Edge("last", at, cost=_BASE + at.cost)
    if whole.all():
        for at in _sums(table, first, first > 0, _WINDOWS):
            if (at.of(table) <= first).all():
                yield Edge("first", at, cost=_BASE + at.cost)


@dataclass(frozen=True)
class _Run:
    """A row that sees a run of the keys of its sequence, by index: from first to last, where last_right would be right.

    Attributes:
        table: features of the row.
        first: first key that it sees.
        last: last key that it sees.
        last_right: last key that it should see.
        end: last key of the sequence.
    """

    table: dict[str, int]
    first: int
    last: int
    last_right: int
    end: int


def _run(one: Explained, place: int, fit: Fit) -> _Run | None:
    queries, row = one.queries, place // one.queries.heads
    own = np.flatnonzero(queries.own_rows[row])
    if fit.keys is None or np.delete(fit.keys, own).any():
        return None  # keys of other sequences are no matter of an edge
    seen = np.flatnonzero(fit.keys[own])
    if not len(seen) or len(seen) != seen[-1] - seen[0] + 1 or not np.isclose(fit.keys[own][seen], 1).all():
        return None
    right = np.flatnonzero(queries.visible[row]) - own[0]
    features = {name: int(column[place]) for name, column in queries.table.items()}
    return _Run(features, int(seen[0]), int(seen[-1]), int(right[-1]), len(own) - 1)


def _sums(table: Table, wanted: Ints, known: Flags, largest: int) -> list[Sum]:
    """The cheapest sums, of numbers up to the largest, that give what is wanted of every row of which it is known."""
    if known.sum() < _LEAST_ROWS:
        return []
    some = {name: column[known] for name, column in table.items()}
    values = np.array([amount.of(some) for amount in AMOUNTS])
    target = wanted[known]
    found = [Sum(((1, AMOUNTS[n]),), plus) for n, plus in _constant(target - values, largest)]
    for a, amount in enumerate(AMOUNTS):
        rest = target - values[a]
        found += [Sum(((1, amount), (1, AMOUNTS[b])), plus) for b, plus in _constant(rest - values, largest) if b >= a]
        found += [Sum(((1, amount), (-1, AMOUNTS[b])), plus) for b, plus in _constant(rest + values, largest) if b != a]
    return sorted(found, key=lambda one: one.cost)[:_RIVALS]


def _constant(gaps: Ints, largest: int) -> list[tuple[int, int]]:
    """Rows of a table, int64 [amounts, rows], that are one small number throughout, and the number."""
    same = (gaps == gaps[:, :1]).all(1) & (np.abs(gaps[:, 0]) <= largest)
    return [(int(n), int(gaps[n, 0])) for n in np.flatnonzero(same)]
