"""Finds the simplest exact conditions over integer features that separate two sets of examples.

A table holds one integer of each feature for each example. A `Term` is an integer made of one or two features, a `Literal`
compares a term with a constant, a `Condition` is a conjunction of literals or the negation of one. `conditions_of` finds the
cheapest conditions that hold for all positive examples and for no negative one. It knows nothing about attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal as Choice

import numpy as np
from numpy.typing import NDArray

from assay.harness.localize.rules import cheapest

Table = Mapping[str, NDArray[np.int64]]
"""Feature -> its value for each example, int64 [examples]."""
_Flags = NDArray[np.bool_]
Rounding = Choice["", "up", "down", "mod", "gap"]
# Most literals of a condition: longer conditions fit by chance.
_MAX_LITERALS = 3
# Most positive, and most negative, examples of one search, so that a thousand literals can be compared with each other in a
# fraction of a second. If other examples contradict the conditions, some of these counterexamples are added.
_MAX_EXAMPLES = 1500
# Most rounds of counterexamples: most rules need one or two, and a condition that needs more is not a rule.
_ROUNDS = 6
# Counterexamples of each condition to add in a round.
_COUNTEREXAMPLES = 50
# Most steps of the search for a conjunction.
_STEPS = 400
# A residue or a name with more values than this is compared (!=) only with 0, not with each other value.
_MAX_VALUES = 12
# A condition of at most this cost is plain enough not to look for a negation.
_NO_NEGATION = 4.0
# Between two values further apart than this, constants are not compared one by one.
_WIDE = 4096


@dataclass(frozen=True)
class Term:
    """An integer made of features: ``name // block - minus // block``, optionally modulo `modulo`.

    `minus` may be rounded first: ``name - minus rounded to a multiple of size``.

    Attributes:
        name: a feature.
        minus: the feature to subtract, of the same kind, or an empty string.
        block: the block size in which both are counted.
        modulo: the divisor of a remainder, or 0 for the number itself.
        cost: how far-fetched the term is; conditions are compared by the sum.
        words: whether its values are names rather than amounts, so that no threshold on it makes sense.
        rounding: the rounding of `minus`, see `rounded`, or an empty string.
        size: see `rounded`.
        single: whether a single value may matter. For the number of a call, only thresholds and periods do.
    """

    name: str
    minus: str = ""
    block: int = 1
    modulo: int = 0
    cost: float = 1.0
    words: bool = False
    single: bool = True
    rounding: Rounding = ""
    size: int = 1

    def of(self, table: Table) -> NDArray[np.int64]:
        """Its value for each example, int64 [examples]."""
        value = table[self.name] // self.block
        if self.rounding:
            value = value - rounded(table[self.minus], self.rounding, self.size)
        elif self.minus:
            value = value - table[self.minus] // self.block
        return value % self.modulo if self.modulo else value


def rounded(x: NDArray[np.int64], how: Rounding, size: int) -> NDArray[np.int64]:
    """Round "up" or "down" to a multiple of a size; "mod" is the remainder, and "gap" the distance to the next multiple."""
    if how == "mod":
        return x % size
    if how == "gap":
        return -x % size
    if how == "up":
        return -(-x // size) * size
    return x // size * size if how == "down" else x


_COMPARISONS = {"==": np.equal, "!=": np.not_equal, ">=": np.greater_equal, "<": np.less}


@dataclass(frozen=True)
class Literal:
    """A comparison of a term with a constant."""

    term: Term
    op: Choice["==", "!=", ">=", "<"]
    value: int

    def holds(self, table: Table) -> _Flags:
        """For which examples it holds, bool [examples]."""
        return np.asarray(_COMPARISONS[self.op](self.term.of(table), self.value))

    @property
    def cost(self) -> float:
        """Strangeness: how far-fetched it is."""
        return self.term.cost + {"==": 0.0, ">=": 0.1, "<": 0.1, "!=": 0.6}[self.op] + strangeness(self.value)


@dataclass(frozen=True)
class Condition:
    """A conjunction of literals, or its negation. Without literals it always holds."""

    literals: tuple[Literal, ...] = ()
    negated: bool = False

    def holds(self, table: Table) -> _Flags:
        """For which examples it holds, bool [examples]."""
        flags = np.ones(_size(table), bool)
        for literal in self.literals:
            flags &= literal.holds(table)
        return ~flags if self.negated else flags

    @property
    def cost(self) -> float:
        """Strangeness: how far-fetched it is."""
        return sum(1.0 + literal.cost for literal in self.literals) + 1.5 * self.negated


ALWAYS = Condition()


def conditions_of(table: Table, positive: _Flags, terms: Sequence[Term], most: int = 6) -> list[Condition]:
    """Return the cheapest conditions that hold for all positive examples (at least one) and for no negative one, cheapest first.

    If no conjunction of at most `_MAX_LITERALS` does, or only a far-fetched one, the negation of one is tried. Conditions that
    agree on the examples are rivals, and an example on which they differ decides between them.
    """
    if positive.all():
        return [ALWAYS]
    conditions = _conjunctions(table, positive, terms, most)
    if not conditions or conditions[0].cost > _NO_NEGATION:
        others = _conjunctions(table, ~positive, terms, most)
        conditions += [Condition(other.literals, negated=True) for other in others]
    return sorted(conditions, key=lambda condition: condition.cost)[:most]


def _conjunctions(table: Table, positive: _Flags, terms: Sequence[Term], most: int) -> list[Condition]:
    """Return conjunctions that are exact on all examples. The search uses some of the examples and tests on all."""
    draw = np.random.default_rng(0)
    inside, outside = (draw.permutation(np.flatnonzero(which))[:_MAX_EXAMPLES] for which in (positive, ~positive))
    for _ in range(_ROUNDS):
        holding, against = ({name: column[some] for name, column in table.items()} for some in (inside, outside))
        conditions = _search(_literals(holding, against, terms), against, most)
        wrong = [condition.holds(table) != positive for condition in conditions]
        exact = [condition for condition, off in zip(conditions, wrong, strict=True) if not off.any()]
        if exact or not conditions:
            return exact
        against_them = [draw.permutation(np.flatnonzero(off))[:_COUNTEREXAMPLES] for off in wrong]
        more = np.unique(np.concatenate(against_them))
        inside, outside = np.union1d(inside, more[positive[more]]), np.union1d(outside, more[~positive[more]])
    return []


def _literals(holding: Table, against: Table, terms: Sequence[Term]) -> list[Literal]:
    """Return literals that hold for all positive examples and exclude a negative one."""
    literals: list[Literal] = []
    for term in terms:
        inside, other = term.of(holding), term.of(against)
        low, high = int(inside.min()), int(inside.max())
        if term.single and low == high and (other != low).any():
            literals.append(Literal(term, "==", low))
        values = np.unique(other)
        if term.modulo or term.words:
            if low != high:
                missing = np.setdiff1d(values, inside)
                few = missing if len(values) <= _MAX_VALUES else missing[missing == 0]
                literals += [Literal(term, "!=", int(value)) for value in few]
            continue
        below, above = values[values < low], values[values > high]
        if len(below):
            # The tightest threshold, and the one that excludes least, such as only the first call.
            loose = {int(below[0]) + 1} - {int(below[-1]) + 1}
            literals += [Literal(term, ">=", c) for c in (*_between(int(below[-1]) + 1, low), *loose)]
        if len(above):
            literals += [Literal(term, "<", c) for c in _between(high + 1, int(above[0]))]
    return literals


@lru_cache(maxsize=2**12)
def _between(first: int, last: int) -> list[int]:
    """Return constants from first to last, which all separate the examples: the ends, and the least strange one."""
    if last - first > _WIDE:
        return [first, last]
    return sorted({first, last, min(range(first, last + 1), key=strangeness)})


def strangeness(value: int) -> float:
    """Rate how far-fetched a constant is: least 0, 1, powers of two and their neighbours, then small round ones.

    The ratings only rank rivals, so only their order matters.
    """
    size = abs(value)
    if size <= 1:
        return 0.0
    if size & (size - 1) == 0:
        return 0.1
    if (size - 1) & (size - 2) == 0 or (size + 1) & size == 0:
        return 0.2
    return 0.3 + 0.02 * (size % 2) + 0.02 * (size % 5 != 0) + 0.1 * (size > 9)


def _search(literals: Sequence[Literal], against: Table, most: int) -> list[Condition]:
    """Return the cheapest conjunctions of as few of these literals as possible that exclude all negative examples."""
    distinct: dict[tuple[bytes, Term], tuple[Literal, _Flags]] = {}
    for literal in sorted(literals, key=lambda literal: literal.cost):
        excludes = ~literal.holds(against)
        if excludes.any():
            distinct.setdefault((np.packbits(excludes).tobytes(), literal.term), (literal, excludes))
    if not distinct:
        return []
    every = list(distinct.values())
    costs = np.array([1.0 + literal.cost for literal, _ in every])
    table = np.stack([excludes for _, excludes in every])
    return [Condition(tuple(every[n][0] for n in some)) for some in cheapest(table, costs, most, _MAX_LITERALS, _STEPS)]


def _size(table: Table) -> int:
    return len(next(iter(table.values())))
