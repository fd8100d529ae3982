"""Rows of K and V that were read from elsewhere: which ones, mined from what was read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from assay.harness.readout.elsewhere import MAPS, SHIFTS, Map, Moved, shifted, unmoved
from assay.harness.readout.features import PAIR_TERMS, Ints, chosen, joined
from assay.harness.readout.forms import Fit
from assay.harness.readout.mining import ALWAYS, Condition, mine
from assay.harness.readout.operators import Effect
from assay.harness.readout.queries import Flags, Queries
from assay.harness.readout.samples import Explained, every

_MOST_ROWS = 60
"""Rows that maps are compared with."""
_MOST_MOVES = 8
"""Moves that are tried, of values and of keys."""
_ALL = 0.97
"""Share of the keys that were seen astray that the shifts must account for; a few are taken for others with an equal score."""
_SUBSETS = 4
"""Halves of the rows in which a rule is sought that does not hold in all."""
_EXPLAINED = 0.6
"""Share of the keys that were seen astray that a map must put in their place."""


@dataclass(frozen=True)
class _Row:
    """A row, and where each key was seen to be read from: `kv head * total_k + packed row`, negative where that is not known."""

    queries: Queries
    place: int
    seen: Ints

    @cached_property
    def keys(self) -> int:
        return len(self.seen)

    @cached_property
    def own(self) -> int:
        """The kv head that it should read."""
        return int(self.queries.own[self.place % self.queries.heads])

    @cached_property
    def home(self) -> Ints:
        """Where each key should be read from."""
        return self.own * self.keys + np.arange(self.keys)

    @cached_property
    def astray(self) -> Flags:
        """Keys that were read from elsewhere."""
        found: Flags = (self.seen >= 0) & (self.seen != self.home)
        return found


def moves(readings: Sequence[Explained]) -> Iterable[Effect]:
    """Effects that read rows of V, of K or of both from elsewhere."""
    for form, what in (("values", "v"), ("scored", "k")):
        found = every(readings, form)
        rows = [_row(*one) for one in found[:: len(found) // _MOST_ROWS + 1]]
        if not rows:
            continue
        calls = {id(row.queries): row.queries.call for row in rows}
        options: list[tuple[float, Moved]] = []
        for words, to in (("", unmoved), *MAPS, *_seen_maps(rows)):
            there = {of: to(call) for of, call in calls.items()}
            for kv in (0, 1, -1) if words else (1, -1):
                hits, conditions = _mined(rows, there, kv)
                where = f"{words or 'key j'} of the {'next' if kv > 0 else 'previous'} kv head" if kv else words
                for condition in conditions:
                    cost = 1.5 + condition.cost + 0.5 * bool(kv)
                    options.append((hits - cost, Moved(what, condition, where, to, kv, cost=cost)))
        for _, effect in sorted(options, key=lambda option: -option[0])[:_MOST_MOVES]:
            yield effect
            yield replace(effect, what="kv")


def _row(one: Explained, place: int, fit: Fit) -> _Row:
    assert fit.keys is not None
    return _Row(one.queries, place, fit.keys.astype(np.int64))


def _mined(rows: Sequence[_Row], there: Mapping[int, Ints], kv: int) -> tuple[int, list[Condition]]:
    """How many keys a map puts in the place where they were seen, and rules on which it moves; no rule if it explains too little.

    Args:
        rows: the rows.
        there: the packed row that each key is read from, by the id of the row's queries.
        kv: by how many kv heads further.
    """
    hits = total = 0
    places: list[tuple[_Row, Flags, Flags]] = []
    for row in rows:
        to = there[id(row.queries)]
        target = (row.own + kv) % row.queries.kv_heads * row.keys + to
        known = (row.seen >= 0) & (to >= 0) & (target != row.home)
        moved = known & (row.seen == target)
        hits, total = hits + int(moved.sum()), total + int(row.astray.sum())
        places.append((row, known, moved))
    if not hits or hits < _EXPLAINED * total:
        return 0, []
    # A weight may be taken for that of another key. Rows that the map explains throughout have no such mistake.
    whole = [(row, known, moved) for row, known, moved in places if (moved == row.astray).all()] or places
    return hits, [ALWAYS, *_rules([(row, np.flatnonzero(known), moved[known]) for row, known, moved in whole])]


def _rules(rows: Sequence[tuple[_Row, Ints, Flags]]) -> list[Condition]:
    """Rules on which of some keys of each row move: of all rows, or of some of them if hardly a key of the others disagrees."""
    tables = [chosen(row.queries.pairs, keys + row.place * row.keys) for row, keys, _ in rows]
    every, moved = joined(tables), np.concatenate([flags for *_, flags in rows])
    found = mine(every, moved, PAIR_TERMS, 2) if moved.any() else []
    draw = np.random.default_rng(0)
    for _ in range(_SUBSETS):
        if found or len(rows) < 4:
            break
        some = draw.permutation(len(rows))[: len(rows) // 2]
        flags = np.concatenate([rows[n][2] for n in some])
        if flags.any():
            rules = mine(joined([tables[n] for n in some]), flags, PAIR_TERMS, 2)
            found = [rule for rule in rules if (rule.holds(every) == moved).mean() >= _ALL]
    return found


def _seen_maps(rows: Sequence[_Row]) -> list[Map]:
    """Shifts that rows were seen to have, besides those that are always tried."""
    shifts: Counter[int] = Counter()
    for row in rows:
        shifts.update((row.seen - row.home)[row.astray].tolist())
    return [shifted(by) for by in dict(shifts.most_common(3)) if by not in SHIFTS]
