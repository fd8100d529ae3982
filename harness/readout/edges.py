"""Edges of masks: the last or the first key that a query sees, as a sum of lengths, positions and their remainders.

A rule on pairs compares a key with one expression at a time. If a tile or a page moves an edge, the edge is a sum, such as ``p +
(-new mod 16)``. This module finds the cheapest such sum that gives all edges that were read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from assay.harness.attention.oracle import sequences
from assay.harness.localize.reading import Flags, Numbers
from assay.harness.readout.conditions import Rounding, Table, rounded, strangeness
from assay.harness.readout.features import Ints, chosen, joined
from assay.harness.readout.forms import Fit
from assay.harness.readout.operators import Told
from assay.harness.readout.queries import Queries, weighted_softmax
from assay.harness.readout.samples import Sample, every
from assay.harness.readout.words import SYMBOLS, plus


@dataclass(frozen=True)
class Amount:
    """A feature, as it is, rounded by a tile or a page (see `rounded`), or multiplied by another feature like a stride."""

    name: str
    rounding: Rounding = ""
    size: int = 1
    cost: float = 0.5
    times: str = ""

    def of(self, table: Table) -> Ints:
        """Its value for each example, int64 [examples]."""
        x = table[self.name]
        if self.times:
            return x * table[self.times]
        return rounded(x, self.rounding, self.size)

    @property
    def words(self) -> str:
        """The expression as text: "(total rounded up to 16)"."""
        symbol = SYMBOLS[self.name]
        if self.times:
            stride = "b" if self.times == "seq" else SYMBOLS[self.times]
            return f"{stride} x {f'({symbol})' if ' ' in symbol else symbol}"
        return {
            "": symbol, "up": f"({symbol} rounded up to {self.size})", "down": f"({symbol} rounded down to {self.size})",
            "mod": f"({symbol} mod {self.size})", "gap": f"(-{symbol} mod {self.size})",
        }[self.rounding]  # fmt: skip


@dataclass(frozen=True)
class Sum:
    """Amounts, each added (1) or subtracted (-1), and a number.

    The sum may be rounded to a multiple of `size` before `after` is added; the result is counted in blocks of `block`.
    """

    amounts: tuple[tuple[int, Amount], ...]
    plus: int = 0
    rounding: Literal["", "up", "down"] = ""
    size: int = 1
    after: int = 0
    block: int = 1

    def of(self, table: Table) -> Ints:
        """Its value for each example, int64 [examples]."""
        value = np.full(len(next(iter(table.values()))), self.plus)
        for sign, amount in self.amounts:
            value = value + sign * amount.of(table)
        return (rounded(value, self.rounding, self.size) + self.after) // self.block

    @property
    def cost(self) -> float:
        """Strangeness: how far-fetched it is."""
        own = sum(0.4 + amount.cost + 0.3 * (sign < 0) for sign, amount in self.amounts) + strangeness(self.plus)
        return own + (0.8 + strangeness(self.after)) * bool(self.rounding) + 0.3 * (self.block > 1)

    @property
    def words(self) -> str:
        """The sum as text: "p + (-new mod 16) - 1", "((total rounded up to 64) - (prefix rounded up to 64)) / 64"."""
        text = ""
        for sign, amount in self.amounts:
            text = f"{text} {'+' if sign > 0 else '-'} {amount.words}" if text else amount.words
        text = plus(text, self.plus)
        if self.rounding:
            inner = f"({text})" if " " in text and not _bracketed(text) else text
            text = plus(f"({inner} rounded {self.rounding} to {self.size})", self.after)
        if self.block == 1:
            return text
        return f"{text if _bracketed(text) else f'({text})'} / {self.block}"


def _bracketed(text: str) -> bool:
    return text.startswith("(") and text.endswith(")") and text.count("(") == 1


# Sizes of vectors, pages, tiles and blocks.
_SIZES = (8, 16, 32, 64, 128, 256)
# Most sums to return from a search.
_MOST_SUMS = 300


def plain_sums(amounts: Sequence[Amount]) -> list[Sum]:
    """List the sums of one or two amounts, and the differences of two."""
    single = [Sum(((1, a),)) for a in amounts]
    added = [Sum(((1, a), (1, b))) for n, a in enumerate(amounts) for b in amounts[n + 1 :]]
    return single + added + [Sum(((1, a), (-1, b))) for a in amounts for b in amounts if a is not b]


@dataclass(frozen=True)
class Search:
    """A search: sums of one or two amounts, sums of three, and roundings of sums of a few, with a number of up to `largest`."""

    amounts: tuple[Amount, ...]
    rounded: tuple[Amount, ...] = ()
    three: tuple[Amount, ...] = ()
    largest: int = 2

    def __call__(self, table: Table, target: Ints) -> list[Sum]:
        """Return the cheapest sums that give the target, int64 [examples], for every example."""
        values = np.array([amount.of(table) for amount in self.amounts])
        sums = [Sum(((1, self.amounts[n]),), plus) for n, plus in _constant(target - values, self.largest)]
        for a in range(len(self.amounts)):
            sums += self._with_one_more(self.amounts, values, target, (a,))
        sums += self._roundings(table, target)
        values = np.array([amount.of(table) for amount in self.three])
        for pair in combinations(range(len(self.three)), 2):
            sums += self._with_one_more(self.three, values, target, pair)
        return sorted(sums, key=lambda candidate: candidate.cost)[:_MOST_SUMS]

    def _with_one_more(
        self, amounts: Sequence[Amount], values: Ints, target: Ints, some: tuple[int, ...]
    ) -> Iterator[Sum]:
        """Yield sums of some amounts plus or minus another one; a single amount may be added to itself."""
        added = tuple((1, amounts[n]) for n in some)
        rest = target - values[list(some)].sum(0)
        for sign in (1, -1):
            for n, number in _constant(rest - sign * values, self.largest):
                if n >= some[-1] + len(some) - 1 if sign > 0 else n not in some:
                    yield Sum((*added, (sign, amounts[n])), number)

    def _roundings(self, table: Table, target: Ints) -> list[Sum]:
        if not self.rounded:
            return []
        sums: list[Sum] = []
        plain = plain_sums(self.rounded)
        values = np.array([sum_.of(table) for sum_ in plain])
        for added in (-1, 0, 1):
            for size in _SIZES:
                for how in ("up", "down"):
                    gaps = target - rounded(values + added, how, size)
                    sums += [
                        replace(plain[n], plus=added, rounding=how, size=size, after=after)
                        for n, after in _constant(gaps, 1)
                    ]
        return sums


def _constant(gaps: Ints, largest: int) -> list[tuple[int, int]]:
    """Return (row, number) for each row of a table, int64 [amounts, examples], that equals one small number everywhere."""
    same: NDArray[np.bool_] = (gaps == gaps[:, :1]).all(1) & (np.abs(gaps[:, 0]) <= largest)
    return [(int(n), int(gaps[n, 0])) for n in np.flatnonzero(same)]


def amounts_of(plain: Sequence[tuple[str, float]], sizes: Sequence[int] = _SIZES) -> tuple[Amount, ...]:
    """Return amounts for features, given with their costs: as they are, and rounded in every way."""
    return (
        *(Amount(name, cost=cost) for name, cost in plain),
        *(Amount(name, rounding, size, cost + 0.5 + 0.1 * (rounding in ("mod", "gap")))
          for name, cost in plain for rounding in ("up", "down", "mod", "gap") for size in sizes),
    )  # fmt: skip


def edge(
    side: Literal["last", "first"],
    at: Sum,
    within: bool = False,
    beyond: bool = False,
    cost: float = 1.0,
) -> Told:
    """Return the effect of a mask with another edge: a query sees its sequence up to a key, or its correct keys from a key on.

    Args:
        side: "last" or "first": `at` gives the index of this key in the query's sequence.
        within: whether the query sees only correct keys up to the last one.
        beyond: whether keys continue into the rows after the sequence, and into zeros after the last row.
    """
    return Told(_edge_words(side, at.words, within, beyond), _edge, (side, at, within, beyond), cost)


def _edge_words(side: str, at: str, within: bool, beyond: bool) -> str:
    if side == "first":
        return f"query i sees no keys j < {at}"
    text = f"query i does not see keys j > {at}" if within else f"query i sees keys j <= {at}"
    return f"{text}, beyond the end of its sequence" if beyond else text


def _edge(queries: Queries, side: str, edge: Sum, within: bool, beyond: bool) -> Numbers:
    at = edge.of(queries.table).reshape(*queries.shape, 1)
    # Index of each packed key relative to the first key of the query's sequence; negative in earlier sequences.
    starts = np.array([k.start for _, k in sequences(queries.call)])[queries.table["seq"][:: queries.heads]]
    index = np.arange(queries.call.k.shape[0])[None, None] - starts[:, None, None]
    should = queries.visible[:, None]
    if side == "first":
        return queries.of_own(
            weighted_softmax((should & (index >= at)).astype(float), queries.own_scores, queries.sinks)
        )
    inside = should if within else (index >= 0) if beyond else queries.own_rows[:, None]
    seen = inside & (index <= at)
    behind = np.maximum(at - index[..., -1:], 0).astype(float) if beyond else None
    return queries.of_own(weighted_softmax(seen.astype(float), queries.own_scores, queries.sinks, phantom=behind))


_PLAIN = (("pos", 0.1), ("prefix", 0.2), ("total", 0.2), ("new", 0.2), ("i", 0.2))
_OTHERS = (
    "previous_total", "previous_prefix", "next_total", "next_prefix", "first_total", "first_prefix", "most_total", "most_new",
    "most_prefix", "least_prefix", "ranked_total", "group", "member", "peers_after", "window",
)  # fmt: skip
_TILES = (16, 32, 64, 128)
# Amounts for sums of three.
_THREE: tuple[Amount, ...] = (
    *(Amount(name, cost=cost) for name, cost in _PLAIN), *(Amount(name, cost=0.9) for name in _OTHERS)
)  # fmt: skip
# Terms of an edge: lengths and the position of a query; lengths of its neighbours and of earlier calls, which a kernel may
# confuse with its own; and its own, rounded by tiles and pages of usual sizes.
_AMOUNTS: tuple[Amount, ...] = (*amounts_of(_PLAIN), *_THREE[len(_PLAIN) :])
# Where the tile of a query begins and ends.
_ENDS: tuple[Amount, ...] = tuple(
    Amount(f"{end}_{name}", cost=0.9) for end in ("first", "last") for name in (*_TILES, "packed_64", "packed_128")
)
# Sums of these are rounded.
_TILED: tuple[Amount, ...] = (*_THREE[: len(_PLAIN)], *_ENDS, *(Amount("i", "down", size, 0.9) for size in _TILES))
_LAST = Search((*_AMOUNTS, *_ENDS), _TILED, _THREE)
# The searches for edges: the last key is off by one or two, and the first one is a window away.
_FIRST = Search(_AMOUNTS, _TILED, _THREE, 8192)
_MOST_ROWS = 200
# Fewest rows with exactly known edges: a sum of two amounts and a number fits three rows by chance.
_LEAST_ROWS = 6
# Cost of an edge in addition to its sum's: an equivalent rule on pairs comes first, since masks have names.
_BASE = 1.5
# Sums to try among those that give the edges: this many of the plainest, and of those that change the fewest correct rows.
_RIVALS = 4


def edges(readings: Sequence[Sample], negatives: Sequence[Queries] = ()) -> Iterable[Told]:
    """Yield edges that give the last, or the first, key of every wrong row whose reading is a run of its own keys."""
    if not readings:
        return
    rest = [chosen(reading.queries.table, ~reading.bad) for reading in readings]
    kept = joined([*rest, *(queries.table for queries in negatives)])
    rows = (_run(*fit) for fit in every(readings, "keys", "keys-and-mass"))
    runs = [row for row in rows if row is not None]
    runs = runs[:: len(runs) // _MOST_ROWS + 1]
    if len(runs) < _LEAST_ROWS:
        return
    table = {name: np.array([row[name] for row in runs]) for name in runs[0]}
    first, last, right, end = (table[name] for name in ("first", "last", "right", "end"))
    if not first.any():
        yield from _last_edges(table, last, right, end, kept)
    if (last == right).all():
        sums = _sums(_FIRST, table, first, first > 0)
        for at in _best([at for at in sums if (at.of(table) <= first).all()], lambda at: at.of(kept) > 0):
            yield edge("first", at, cost=_BASE + at.cost)


def _best(sums: Sequence[Sum], changes: Callable[[Sum], Flags]) -> list[Sum]:
    """Return the plainest sums, and those that change the fewest correct rows."""
    spared = sorted(sums, key=lambda at: (int(changes(at).sum()), at.cost))[:_RIVALS]
    return list(dict.fromkeys([*spared, *sums[:_RIVALS]]))


def _last_edges(table: Table, last: Ints, right: Ints, end: Ints, kept: Table) -> Iterable[Told]:
    beyond = bool((last > end).any())
    known = np.ones(len(last), bool) if beyond else last < end
    sums = _sums(_LAST, table, last, known)
    sums = [at for at in sums if (at.of(table) >= last).all()]  # an edge beyond the end of a sequence is cut off
    place = np.where(kept["causal"] == 1, kept["pos"], kept["total"] - 1)
    room = kept["total"] - 1 if not beyond else np.full_like(place, np.iinfo(np.int64).max)
    for at in _best(sums, lambda at: np.minimum(at.of(kept), room) != place):
        yield edge("last", at, False, beyond, _BASE + at.cost + 0.5 * beyond)
    if (last < right).all():
        for at in _best(sums, lambda at: at.of(kept) < place):
            yield edge("last", at, True, False, _BASE + at.cost + 0.1)


# A row that sees a run of keys: its features, and four indices from the start of its sequence. "first" and "last" are the first
# and the last key that it sees; "last" may lie in the rows after the sequence, and in zeros after these. "right" is the last key
# that it should see, and "end" the last key of the sequence.
_Run = dict[str, int]
# Tolerance for the number of counted rows of zeros to be a whole number.
_WHOLE = 2e-3


def _run(reading: Sample, place: int, fit: Fit) -> _Run | None:
    queries, row = reading.queries, place // reading.queries.heads
    own = np.flatnonzero(queries.own_rows[row])
    if fit.keys is None or fit.keys[: own[0]].any():
        return None  # an edge does not explain keys of earlier sequences
    blank = 0
    if fit.form == "keys-and-mass":
        blank = round(fit.phantom)
        if blank < 1 or abs(fit.phantom - blank) > _WHOLE * blank:
            return None
    seen = np.flatnonzero(fit.keys[own[0] :])
    if not len(seen) or len(seen) != seen[-1] - seen[0] + 1 or not np.isclose(fit.keys[own[0] :][seen], 1).all():
        return None
    if blank and own[0] + seen[-1] != len(fit.keys) - 1:
        return None
    right = np.flatnonzero(queries.visible[row]) - own[0]
    return {name: int(column[place]) for name, column in queries.table.items()} | {
        "first": int(seen[0]), "last": int(seen[-1]) + blank, "right": int(right[-1]), "end": len(own) - 1
    }  # fmt: skip


def _sums(search: Search, table: Table, wanted: Ints, known: Flags) -> list[Sum]:
    """Find the cheapest sums that give the wanted number, int64 [rows], in every row where it is known, bool [rows]."""
    if known.sum() < _LEAST_ROWS:
        return []
    return search({name: column[known] for name, column in table.items()}, wanted[known])
