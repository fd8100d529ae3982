"""Integer expressions over features: sums of lengths, indices and what tiles and pages make of them.

A `Sum` says where a mask ends, or in which row a key is sought. `sums` searches for the cheapest one that gives what was seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from assay.harness.readout.features import Ints
from assay.harness.readout.mining import Table, column, strangeness
from assay.harness.readout.words import SYMBOLS, plus, symbol_of

Rounding = Literal["", "up", "down", "mod", "gap"]


@dataclass(frozen=True)
class Amount:
    """A feature, or what a tile or a page makes of it.

    Attributes:
        name: the feature, or an expression of two; see `assay.harness.readout.mining.column`.
        rounding: "up" or "down", to a multiple of `size`; "mod", the remainder by it; "gap", what is missing to the next multiple.
        size: see `rounding`.
        cost: how far-fetched it is.
        times: a feature that it is multiplied by, as a stride is; empty for none.
    """

    name: str
    rounding: Rounding = ""
    size: int = 1
    cost: float = 0.5
    times: str = ""

    def of(self, table: Table) -> Ints:
        """Its value for each example, int64 [examples]."""
        x = column(table, self.name)
        if self.times:
            return x * table[self.times]
        return rounded(x, self.rounding, self.size)

    @property
    def words(self) -> str:
        """In words: "(total rounded up to 16)"."""
        symbol = symbol_of(self.name)
        if self.times:
            stride = "b" if self.times == "seq" else SYMBOLS[self.times]
            return f"{stride} x {f'({symbol})' if ' ' in symbol else symbol}"
        return _rounding_words(symbol, self.rounding, self.size)


def rounded(x: Ints, how: Rounding, size: int) -> Ints:
    """A number that is rounded, see `Amount.rounding`."""
    if how == "mod":
        return x % size
    if how == "gap":
        return -x % size
    return {"": x, "up": -(-x // size) * size, "down": x // size * size}[how]


def _rounding_words(symbol: str, how: Rounding, size: int) -> str:
    return {
        "": symbol, "up": f"({symbol} rounded up to {size})", "down": f"({symbol} rounded down to {size})",
        "mod": f"({symbol} mod {size})", "gap": f"(-{symbol} mod {size})",
    }[how]  # fmt: skip


@dataclass(frozen=True)
class Sum:
    """Amounts, each added or subtracted, and a number; the sum may be rounded, and a number be added again.

    Attributes:
        amounts: (1 or -1, the amount).
        plus: the number.
        rounding: "up" or "down", to a multiple of `size`; empty for none.
        size: see `rounding`.
        after: what is added to the rounded sum.
    """

    amounts: tuple[tuple[int, Amount], ...]
    plus: int = 0
    rounding: Literal["", "up", "down"] = ""
    size: int = 1
    after: int = 0

    def of(self, table: Table) -> Ints:
        """Its value for each example, int64 [examples]."""
        found = np.full(len(next(iter(table.values()))), self.plus)
        for sign, amount in self.amounts:
            found = found + sign * amount.of(table)
        return rounded(found, self.rounding, self.size) + self.after

    @property
    def cost(self) -> float:
        """How far-fetched it is."""
        own = sum(0.4 + amount.cost + 0.3 * (sign < 0) for sign, amount in self.amounts) + strangeness(self.plus)
        return own + (0.8 + strangeness(self.after)) * bool(self.rounding)

    @property
    def words(self) -> str:
        """In words: "p + (-new mod 16) - 1"."""
        found = ""
        for sign, amount in self.amounts:
            found = f"{found} {'+' if sign > 0 else '-'} {amount.words}" if found else amount.words
        found = plus(found, self.plus)
        if not self.rounding:
            return found
        inner = f"({found})" if " " in found and not _bracketed(found) else found
        return plus(f"({inner} rounded {self.rounding} to {self.size})", self.after)


@dataclass(frozen=True)
class Blocks:
    """A sum, counted in blocks.

    Attributes:
        of_sum: the sum.
        size: of a block.
    """

    of_sum: Sum
    size: int

    def of(self, table: Table) -> Ints:
        """Its value for each example, int64 [examples]."""
        return self.of_sum.of(table) // self.size

    @property
    def cost(self) -> float:
        """How far-fetched it is."""
        return self.of_sum.cost + 0.3

    @property
    def words(self) -> str:
        """In words: "((total rounded up to 64) - (prefix rounded up to 64)) / 64"."""
        text = self.of_sum.words
        return f"{text if _bracketed(text) else f'({text})'} / {self.size}"


def _bracketed(text: str) -> bool:
    return text.startswith("(") and text.endswith(")") and text.count("(") == 1


SIZES = (8, 16, 32, 64, 128, 256)
"""Sizes of vectors, pages, tiles and blocks."""


@dataclass(frozen=True)
class Search:
    """What is searched: sums of one or two of some amounts, and roundings of sums of a few plain ones.

    Attributes:
        amounts: of sums.
        rounded: amounts of sums that are rounded.
        three: amounts of sums of three.
        largest: largest size of the number in a sum.
        most: most sums to return.
        sizes: to which sums are rounded.
    """

    amounts: tuple[Amount, ...]
    rounded: tuple[Amount, ...] = ()
    three: tuple[Amount, ...] = ()
    largest: int = 2
    most: int = 300
    sizes: tuple[int, ...] = SIZES

    def __call__(self, table: Table, target: Ints) -> list[Sum]:
        """The cheapest sums that give the target for every example.

        Args:
            table: features of the examples.
            target: int64 [examples].
        """
        values = np.array([amount.of(table) for amount in self.amounts])
        found = [Sum(((1, self.amounts[n]),), plus) for n, plus in _constant(target - values, self.largest)]
        for a, amount in enumerate(self.amounts):
            rest = target - values[a]
            found += [
                Sum(((1, amount), (1, self.amounts[b])), plus)
                for b, plus in _constant(rest - values, self.largest) if b >= a
            ]  # fmt: skip
            found += [
                Sum(((1, amount), (-1, self.amounts[b])), plus)
                for b, plus in _constant(rest + values, self.largest) if b != a
            ]  # fmt: skip
        found += self._roundings(table, target) + self._threes(table, target)
        return sorted(found, key=lambda one: one.cost)[: self.most]

    @cached_property
    def _plain_sums(self) -> list[Sum]:
        one = [Sum(((1, a),)) for a in self.rounded]
        two = [Sum(((1, a), (1, b))) for n, a in enumerate(self.rounded) for b in self.rounded[n + 1 :]]
        less = [Sum(((1, a), (-1, b))) for a in self.rounded for b in self.rounded if a is not b]
        return one + two + less

    def _threes(self, table: Table, target: Ints) -> list[Sum]:
        """Sums of three: of two, two that are added and one that is subtracted, or the reverse."""
        if not self.three:
            return []
        values = np.array([amount.of(table) for amount in self.three])
        found: list[Sum] = []
        for a, b in combinations(range(len(self.three)), 2):
            pair = ((1, self.three[a]), (1, self.three[b]))
            rest = target - values[a] - values[b]
            found += [
                Sum((*pair, (1, self.three[c])), plus) for c, plus in _constant(rest - values, self.largest) if c > b
            ]
            found += [
                Sum((*pair, (-1, self.three[c])), plus)
                for c, plus in _constant(rest + values, self.largest) if c not in (a, b)
            ]  # fmt: skip
        return found

    def _roundings(self, table: Table, target: Ints) -> list[Sum]:
        found: list[Sum] = []
        if not self.rounded:
            return found
        values = np.array([one.of(table) for one in self._plain_sums])
        for added in (-1, 0, 1):
            for size in self.sizes:
                for how in ("up", "down"):
                    gaps = target - rounded(values + added, how, size)
                    found += [
                        replace(self._plain_sums[n], plus=added, rounding=how, size=size, after=after)
                        for n, after in _constant(gaps, 1)
                    ]
        return found


def _constant(gaps: Ints, largest: int) -> list[tuple[int, int]]:
    """Rows of a table, int64 [amounts, examples], that are one small number throughout, and the number."""
    same: NDArray[np.bool_] = (gaps == gaps[:, :1]).all(1) & (np.abs(gaps[:, 0]) <= largest)
    return [(int(n), int(gaps[n, 0])) for n in np.flatnonzero(same)]


def amounts_of(plain: Sequence[tuple[str, float]], sizes: Sequence[int] = SIZES) -> tuple[Amount, ...]:
    """Features, as they are and rounded in every way.

    Args:
        plain: (feature, cost).
        sizes: of the roundings.
    """
    return (
        *(Amount(name, cost=cost) for name, cost in plain),
        *(Amount(name, rounding, size, cost + 0.5 + 0.1 * (rounding in ("mod", "gap")))
          for name, cost in plain for rounding in ("up", "down", "mod", "gap") for size in sizes),
    )  # fmt: skip
