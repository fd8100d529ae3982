"""Rows of K and V that are mapped by page and by tile: key o of page p is read from key g(o) of page f(p).

A wrong block table, a loop that runs backwards or a transposed tile does this. Rules for f and rules for g are combined, for each
size of a page or tile, and with what becomes of keys for which the map leads beyond the sequence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from itertools import combinations, permutations, product
from typing import Literal, get_args

import numpy as np

from assay.harness.attention.call import AttentionCall
from assay.harness.localize.reading import Flags
from assay.harness.readout.features import Ints
from assay.harness.readout.sources import shift

SIZES = (4, 8, 16, 32, 64, 128)
"""Keys of a page or tile."""
Beyond = Literal["stays", "last", "packed", "zeros", "wraps", "whole", "joined", "own size"]
"""What becomes of keys for which a map leads beyond the sequence: they stay in place; the last key is read; what lies there in the
packed buffer is; zeros are; the index is taken modulo the length. Or the map leads nowhere beyond it: only whole pages or tiles are
mapped; pages are put behind each other without gaps; an incomplete tile is mapped by its own size."""
NO_ROW = int(np.iinfo(np.int64).max)
"""The index of a row of zeros."""
_LENGTHS = (*range(1, 40), *range(41, 300, 9), 511, 512, 513)
"""Lengths on which maps are compared: with and without an incomplete last page, for each size."""


@dataclass(frozen=True)
class Rule:
    """Which page is read in place of another one, or which key of a tile.

    Attributes:
        of: what is read from elsewhere: "page p", "key o".
        to: from where: "page p // 2"; in words of a tile, `{last}` and `{size}` stand for numbers.
        at: (indices, their number) -> the index that each is read from, int64.
        cost: how far-fetched it is.
        any_size: of a tile: whether it says something of an incomplete tile too, counted by its own size.
    """

    of: str
    to: str
    at: Callable[[Ints, int], Ints] = field(compare=False)
    cost: float
    any_size: bool = False


def _same(x: Ints, n: int) -> Ints:
    return x


def _quotient(by: int, x: Ints, n: int) -> Ints:
    return x // by


def _remainder(by: int, x: Ints, n: int) -> Ints:
    return x % by


def _times(by: int, x: Ints, n: int) -> Ints:
    return by * x


def _times_wrapped(by: int, x: Ints, n: int) -> Ints:
    return by * x % n


def _flipped(bit: int, x: Ints, n: int) -> Ints:
    return x ^ bit


def _shifted(by: int, first: int, x: Ints, n: int) -> Ints:
    return np.where(x >= first, x + by, x)


def _wrapped(by: int, x: Ints, n: int) -> Ints:
    return (x + by) % n


def _clamped(by: int, x: Ints, n: int) -> Ints:
    return np.clip(x + by, 0, n - 1)


def _reversed(x: Ints, n: int) -> Ints:
    return n - 1 - x


def _one(place: int, x: Ints, n: int) -> Ints:
    return np.full_like(x, np.clip(_index(place, n), 0, n - 1))


def _in_place_of(a: int, b: int, x: Ints, n: int) -> Ints:
    a, b = _index(a, n), _index(b, n)
    return np.where(x == a, b, x) if min(a, b) >= 0 and max(a, b) < n else x


def _exchanged(a: int, b: int, x: Ints, n: int) -> Ints:
    return np.where(x == _index(a, n), _in_place_of(a, b, x, n), _in_place_of(b, a, x, n))


def _transposed(rows: int, x: Ints, n: int) -> Ints:
    """A tile of `rows` rows is read column by column."""
    columns = n // rows
    return x % rows * columns + x // rows


def _index(place: int, n: int) -> int:
    """An index; negative ones count from the end."""
    return place if place >= 0 else n + place


_NAMED = {0: "page 0", 1: "page 1", 2: "page 2", 3: "page 3", -1: "the last page", -2: "the last page but one"}
"""Pages that may be mistaken by themselves."""
SAME = Rule("", "", _same, 0.0)
"""Each page, or each key of a tile, is read from its own place."""
PAGES: tuple[Rule, ...] = (
    *(Rule("page p", f"page p // {c}", partial(_quotient, c), 0.3) for c in (2, 3, 4, 8)),
    *(Rule("page p", f"page p mod {c}", partial(_remainder, c), 0.5) for c in (2, 3, 4, 5, 6, 7, 8)),
    *(Rule("page p", f"page {c} p", partial(_times, c), 0.5) for c in (2, 3, 4)),
    *(Rule("page p", f"page {c} p mod n", partial(_times_wrapped, c), 0.6) for c in (2, 3, 5)),
    *(Rule("page p", f"page p XOR {c}", partial(_flipped, c), 0.4) for c in (1, 2, 3, 4)),
    *(Rule("page p", f"page {shift('p', c)}", partial(_shifted, c, 0), 0.3) for c in (1, -1, 2, -2, 3, -3, 4, -4)),
    *(Rule("page p", f"page ({shift('p', c)}) mod n", partial(_wrapped, c), 0.4) for c in (1, -1, 2, -2, 3, -3)),
    *(Rule("page p", f"page {shift('p', c)}, or the {'last' if c > 0 else 'first'} page where there is none",
           partial(_clamped, c), 0.4) for c in (1, -1, 2, -2)),
    Rule("page p", "page n - 1 - p", _reversed, 0.3),
    *(Rule("page p", _NAMED[a], partial(_one, a), 0.4) for a in (0, 1, -1)),
    *(Rule(f"each page p > {a}", "page p - 1", partial(_shifted, -1, a + 1), 0.6) for a in range(4)),
    *(Rule(f"each page p >= {a}", "page p + 1", partial(_shifted, 1, a), 0.6) for a in range(1, 4)),
    *(Rule(_NAMED[a], _NAMED[b], partial(_in_place_of, a, b), 0.5) for a, b in permutations(_NAMED, 2)),
    *(Rule(_NAMED[a], f"{_NAMED[b]}, and the other way round", partial(_exchanged, a, b), 0.6) for a, b in combinations(_NAMED, 2)),
)  # fmt: skip
"""Pages that are mistaken: index p of n."""


@cache
def tiles(size: int) -> tuple[Rule, ...]:
    """Keys of a tile of this size that are mistaken: index o."""
    inner = [2**n for n in range(1, size.bit_length() - 1)]
    return (
        Rule("key o", "key {last} - o", _reversed, 0.3, any_size=True),
        *(Rule("key o", f"key ({shift('o', c)}) mod {{size}}", partial(_wrapped, c), 0.4, True) for c in (1, -1, 2, -2)),
        *(Rule("key o", f"key {shift('o', c)}, or its {'last' if c > 0 else 'first'} key where there is none",
               partial(_clamped, c), 0.4, True) for c in (1, -1)),
        *(Rule("key o", f"key (o mod {a}) x {size // a} + o // {a}", partial(_transposed, a), 0.5) for a in inner),
        *(Rule("key o", f"key o // {c}", partial(_quotient, c), 0.5) for c in (2, 4)),
        *(Rule("key o", f"key o mod {c}", partial(_remainder, c), 0.5) for c in inner),
        *(Rule("key o", f"key {c} o mod {{size}}", partial(_times_wrapped, c), 0.6, True) for c in (2, 3, 5)),
        *(Rule("key o", f"key o XOR {c}", partial(_flipped, c), 0.5) for c in (*inner[:4], 1, 3)),
        Rule("key o", "key 0", partial(_one, 0), 0.5),
        Rule("key o", "key {last}", partial(_one, -1), 0.5, True),
    )  # fmt: skip


Rules = tuple[Rule, Rule]
"""For pages, and for tiles."""
BEYONDS: tuple[Beyond, ...] = get_args(Beyond)
_PLAIN = 0.4
"""Cost up to which a rule for pages and one for tiles are combined."""
_COSTS: dict[Beyond, float] = {
    "stays": 0.0, "last": 0.1, "packed": 0.1, "zeros": 0.1, "wraps": 0.2, "whole": 0.1, "joined": 0.2, "own size": 0.1
}  # fmt: skip


@dataclass(frozen=True)
class BlockMap:
    """(call) -> the packed row that each packed key is read from, int64 [total_k]; negative where it stays, total_k for zeros.

    Attributes:
        size: keys of a page or tile.
        page: f.
        tile: g.
        beyond: see `Beyond`.
    """

    size: int
    page: Rule = SAME
    tile: Rule = SAME
    beyond: Beyond = "stays"

    def __call__(self, call: AttentionCall) -> Ints:
        rows, start = call.k.shape[0], 0
        found: list[Ints] = []
        for length in call.lens_k:
            found.append(packed_rows(self.of_length(length), start, rows))
            start += length
        return np.concatenate(found)

    def of_length(self, length: int) -> Ints:
        """The index that each key of a sequence is read from, int64 [length]; see `mapped`."""
        found: Ints = mapped([(self.page, self.tile)], self.size, self.beyond, length)[0]
        return found

    @cached_property
    def signature(self) -> bytes:
        """The map on sequences of many lengths: two that do the same have the same."""
        return np.concatenate([self.of_length(length) for length in _LENGTHS]).tobytes()

    @property
    def cost(self) -> float:
        """How far-fetched it is."""
        return self.page.cost + self.tile.cost + _COSTS[self.beyond]

    @property
    def of(self) -> str:
        """What is read from elsewhere, in words: "page p"."""
        if self.tile is SAME:
            return self.page.of
        return f"{self.tile.of} of {self.page.of or f'each tile of {self.size}'}"

    @property
    def to(self) -> str:
        """From where, in words: "page p // 2 (pages of 16 keys)"."""
        key = self.tile.to.format(last=self.size - 1, size=self.size)
        page = self.page.to or "it"
        text = f"{key} of {page}" if key else page
        counted = "n " if re.search(r"\bn\b", self.page.to) else ""
        pages = f"{counted}pages of {self.size} keys" if self.page is not SAME else ""
        notes = "; ".join(filter(None, (pages, self._beyond_words)))
        return f"{text} ({notes})" if notes else text

    @property
    def _beyond_words(self) -> str:
        """What becomes of keys beyond the sequence, in words; empty if there are none."""
        there = BlockMap(self.size, self.page, self.tile, "packed")
        if self.beyond != "packed" and self.signature == there.signature:
            return ""
        if self.beyond == "packed" and all(inside(there.of_length(n), n).all() for n in _LENGTHS):
            return ""
        unit = "tile" if self.page is SAME else "page"
        return {
            "stays": "a key stays where that lies beyond its sequence", "last": "the last key where that lies beyond the sequence",
            "packed": "also beyond the sequence", "zeros": "zeros where that lies beyond the sequence",
            "wraps": "modulo the sequence length", "whole": f"an incomplete {unit} stays",
            "joined": "put behind each other without gaps", "own size": "an incomplete tile by its own size",
        }[self.beyond]  # fmt: skip


def inside(indices: Ints, length: int) -> Flags:
    """Which indices are those of keys of a sequence, bool in their shape."""
    found: Flags = (indices >= 0) & (indices < length)
    return found


def mapped(rules: Sequence[Rules], size: int, beyond: Beyond, length: int) -> Ints:
    """The index in its sequence that each key is read from, int64 [rules, length]; outside of it where "packed" or zeros are read.

    Args:
        rules: for pages, and for tiles.
        size: keys of a page or tile.
        beyond: what becomes of keys for which a rule leads beyond the sequence.
        length: keys of the sequence.
    """
    j = np.arange(length)
    p, o = np.divmod(j, size)
    pages, whole = -(-length // size), length // size
    counted = whole if beyond == "whole" else pages
    if not counted:
        return np.broadcast_to(j, (len(rules), length)).copy()
    of_page = {page: page.at(np.arange(pages), counted) for page in dict.fromkeys(page for page, _ in rules)}
    if beyond == "joined":
        return np.array([_joined(of_page[page], size, length) for page, _ in rules])
    of_tile = {tile: tile.at(np.arange(size), size) for tile in dict.fromkeys(tile for _, tile in rules)}
    to: Ints = np.array([of_page[page] for page, _ in rules])[:, p] * size
    to += np.array([of_tile[tile] for _, tile in rules])[:, o]
    if beyond == "own size" and (rest := length % size):
        to[:, length - rest :] = [whole * size + tile.at(np.arange(rest), rest) for _, tile in rules]
    if beyond == "whole":
        to[:, whole * size :] = j[whole * size :]
    return resolved(to, beyond, length)


def resolved(to: Ints, beyond: Beyond, length: int) -> Ints:
    """Indices, with those beyond the sequence replaced, int64 in their shape."""
    if beyond == "packed":
        return to
    replaced: dict[Beyond, Ints] = {
        "last": np.array(length - 1), "zeros": np.array(NO_ROW), "wraps": to % length
    }  # fmt: skip
    instead = replaced.get(beyond, np.arange(length))
    found: Ints = np.where(inside(to, length), to, instead)
    return found


def _joined(pages: Ints, size: int, length: int) -> Ints:
    """The keys of pages behind each other, as far as there are keys; keys behind them stay."""
    own = pages[(pages >= 0) & (pages * size < length)]
    keys = (own[:, None] * size + np.arange(size)).ravel()
    keys = keys[keys < length][:length]
    return np.concatenate([keys, np.arange(len(keys), length)])


def packed_rows(indices: Ints, start: int, rows: int) -> Ints:
    """Packed rows of indices in a sequence, int64 in their shape; `rows` for zeros.

    Args:
        indices: in the sequence, or beyond it, int64.
        start: its first packed row.
        rows: packed rows of the call.
    """
    there = (indices >= -start) & (indices < rows - start)
    return np.where(there, indices + np.where(there, start, 0), rows)


@cache
def rules_of(size: int) -> tuple[Rules, ...]:
    """The pairs of rules that are tried for a size: for pages alone, for tiles alone, and plain ones for both."""
    pages, keys = ([rule for rule in rules if rule.cost <= _PLAIN] for rules in (PAGES, tiles(size)))
    both = product(pages, keys)
    return (*((page, SAME) for page in PAGES), *((SAME, tile) for tile in tiles(size)), *both)


def speaks(beyond: Beyond, rules: Rules) -> bool:
    """Whether there is such a map: pages are joined, and tiles have a size of their own."""
    page, tile = rules
    if beyond == "own size":
        return page is SAME and tile.any_size
    return tile is SAME or beyond != "joined"
