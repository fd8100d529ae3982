"""Effects that read K, V or both from elsewhere, page by page or within tiles: maps that give the outputs of wrong queries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from assay.harness.localize.reading import Numbers
from assay.harness.readout.block_maps import (
    BEYONDS,
    SIZES,
    Beyond,
    BlockMap,
    inside,
    mapped,
    packed_rows,
    resolved,
    rules_of,
    speaks,
)
from assay.harness.readout.dims import Answer
from assay.harness.readout.elsewhere import Moved
from assay.harness.readout.features import Ints
from assay.harness.readout.mining import ALWAYS
from assay.harness.readout.queries import Flags, Queries

_MOST_ROWS, _MOST_KEYS = 8, 512
"""Wrong queries that maps are compared with, one of a call; and keys beyond which a sequence is left out."""
_SEARCHED = 3
"""Of these queries, those of which all maps are tried: of a short, a middling and a long sequence."""
_LEAST = 0.5
"""Share of the queries that a map must give: others may be wrong in another way."""
_MOST_ALIKE, _MOST = 40, 8
"""Maps that are compared with each other, and those that are tried."""
_SIGNS = 4
"""Sums of the numbers of an output, with random signs, that a map must give."""
_COST = 2.0
"""Cost of a map beside that of its rules: a shift that is always tried and does the same is said first."""
_OF_INDEX: tuple[Beyond, ...] = ("stays", "last", "packed", "zeros", "wraps")
"""What becomes of keys beyond the sequence, where all others are read from the same rows."""


@dataclass(frozen=True)
class _Row:
    """A wrong query and head.

    Attributes:
        start: first packed row of its sequence.
        length: keys of its sequence.
        seen: keys that it should see, from the first on.
        factors: exp(score) of each packed row, and of a row of zeros behind them, float64 [total_k + 1].
        values: sums of V of its kv head, in the same order, float64 [_SIGNS, total_k + 1].
        out: the same sums of what the kernel answered, [_SIGNS].
        margin: by how much these may be off.
    """

    start: int
    length: int
    seen: int
    factors: Numbers
    values: Numbers
    out: Numbers
    margin: float

    def given(self, what: str, to: Ints) -> Flags:
        """Which maps give what the kernel answered, bool [maps].

        Args:
            what: "k", "v" or "kv".
            to: the index that each key is read from, int64 [maps, length].
        """
        rows = packed_rows(to[:, : self.seen], self.start, len(self.factors) - 1)
        own = slice(self.start, self.start + self.seen)
        counted = self.factors[rows].sum(1) if "k" in what else np.full(len(rows), self.factors[own].sum())
        left = np.flatnonzero(counted > 0)
        for values, out in zip(self.values, self.out, strict=True):
            there = rows[left]
            if what == "kv":
                sums = (self.factors * values)[there].sum(1)
            else:
                sums = self.factors[there] @ values[own] if what == "k" else values[there] @ self.factors[own]
            left = left[np.abs(sums / counted[left] - out) <= self.margin]
        found = np.zeros(len(rows), bool)
        found[left] = True
        return found


def block_moves(answers: Sequence[Answer], error: float) -> Iterable[Moved]:
    """Effects that read K, V or both of pages or of tiles from elsewhere.

    Args:
        answers: what the kernel answered.
        error: relative error of a query from which on it is wrong.
    """
    rows = [row for one in answers if (row := _row(*one, error)) is not None][:_MOST_ROWS]
    rows.sort(key=lambda row: row.length)
    searched = [rows[n] for n in sorted({round(x) for x in np.linspace(0, len(rows) - 1, _SEARCHED)})] if rows else []
    for what in ("kv", "v", "k"):
        found = dict.fromkeys(one for row in searched for one in _maps(row, what))
        hits = {one: sum(bool(row.given(what, one.of_length(row.length)[None])[0]) for row in rows) for one in found}
        most = max(hits.values(), default=0)
        if not most or most < _LEAST * len(rows):
            continue
        best = sorted((one for one in found if hits[one] == most), key=lambda one: one.cost)[:_MOST_ALIKE]
        plainest = {one.signature: one for one in reversed(best)}.values()
        for one in sorted(plainest, key=lambda one: one.cost)[:_MOST]:
            yield Moved(what, ALWAYS, one.to, one, cost=_COST + one.cost, of=one.of)


def _maps(row: _Row, what: str) -> list[BlockMap]:
    """The maps that give a row."""
    found: list[BlockMap] = []
    for size in (size for size in SIZES if size < row.length):
        rules = rules_of(size)
        to = mapped(rules, size, "packed", row.length)
        given, leaves = row.given(what, to), np.flatnonzero(~inside(to, row.length)[:, : row.seen].all(1))
        for beyond in BEYONDS:
            hits = given.copy()
            if beyond in _OF_INDEX:
                hits[leaves] = row.given(what, resolved(to[leaves], beyond, row.length))
            else:
                some = np.flatnonzero([speaks(beyond, one) for one in rules])
                hits[:] = False
                hits[some] = row.given(what, mapped([rules[n] for n in some], size, beyond, row.length))
            found += [BlockMap(size, *rules[n], beyond) for n in np.flatnonzero(hits)]
    return found


def _row(queries: Queries, actual: Numbers, bad: Flags, error: float) -> _Row | None:
    """The last wrong query of a call that maps can be compared with; None if there is none."""
    lens = np.array(queries.call.lens_k)
    sequences, finite = queries.table["seq"], np.isfinite(actual).all(-1).ravel()
    usable = bad & finite & (lens[sequences] <= _MOST_KEYS) & np.repeat(queries.visible.sum(1) > 1, queries.heads)
    if not usable.any():
        return None
    place = int(np.flatnonzero(usable)[-1])
    (t, h), of = divmod(place, queries.heads), int(sequences[place])
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (_SIGNS, actual.shape[2]))
    scores, values = np.append(queries.own_scores[t, h], 0.0), queries.values[:, queries.own[h]] @ signs.T
    factors = np.exp(scores - scores.max())
    return _Row(
        int(lens[:of].sum()), int(lens[of]), int(queries.visible[t].sum()), factors, np.append(values.T, np.zeros((_SIGNS, 1)), 1),
        signs @ actual[t, h], error * float(np.abs(actual[t, h]).sum()),
    )  # fmt: skip
