"""Data from elsewhere: another query's output, weights or q; another kv head; other rows of K and V."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from assay.harness.attention.call import AttentionCall
from assay.harness.localize.reading import Numbers
from assay.harness.readout.features import Ints
from assay.harness.readout.mining import Condition, Value
from assay.harness.readout.operators import Effect
from assay.harness.readout.queries import Flags, Queries, softmax
from assay.harness.readout.sources import Source, shift

Rows = Callable[[AttentionCall], Ints]
"""(call) -> the packed row that each packed key is read from, int64 [total_k]; negative where it is not moved."""
Map = tuple[str, Rows]
"""The other row in words, as seen from key j, and the row."""


def _packed(call: AttentionCall) -> tuple[Ints, Ints, Ints]:
    """Where sequences start, and the sequence and index of each packed key."""
    starts = np.array(call.cu_seqlens_k.tolist())
    of = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    return starts, of, np.arange(starts[-1]) - starts[of]


def _key(to: Callable[[Ints], Ints], call: AttentionCall) -> Ints:
    """Another key of the sequence, as far as there is one."""
    starts, of, j = _packed(call)
    target = to(j)
    length = np.diff(starts)[of]
    return np.where((target >= 0) & (target < length), starts[of] + target, -1)


def _plus(by: int, j: Ints) -> Ints:
    return j + by


def _modulo(size: int, j: Ints) -> Ints:
    return j % size


def _first_of_block(size: int, j: Ints) -> Ints:
    return j // size * size


def _packed_row(by: int, call: AttentionCall) -> Ints:
    starts, _, _ = _packed(call)
    to = np.arange(starts[-1]) + by
    return np.where((to >= 0) & (to < starts[-1]), to, -1)


def _of_neighbour(by: int, call: AttentionCall) -> Ints:
    starts, of, j = _packed(call)
    to = of + by
    inside = (to >= 0) & (to < len(starts) - 1)
    safe = np.clip(to, 0, len(starts) - 2)
    return np.where(inside & (j < np.diff(starts)[safe]), starts[safe] + j, -1)


def _of_first(call: AttentionCall) -> Ints:
    starts, _, j = _packed(call)
    return np.where(j < starts[1], j, -1)


def _last(call: AttentionCall) -> Ints:
    starts, of, _ = _packed(call)
    return starts[of + 1] - 1


def unmoved(call: AttentionCall) -> Ints:
    """Each packed key's own row."""
    return np.arange(call.k.shape[0])


def shifted(by: int) -> Map:
    """The key that is `by` further, as far as there is one."""
    return f"key {shift('j', by)}", partial(_key, partial(_plus, by))


SHIFTS = (1, -1, 2, -2, 3, -3, 4, -4, 8, -8, 16, -16, 32, -32, 64, -64, 128, -128)
"""Shifts that are always tried: small slips, and vectors, pages and tiles. Others are tried where a reading shows them."""
MAPS: tuple[Map, ...] = (
    *(shifted(by) for by in SHIFTS),
    *((f"key j mod {n}", partial(_key, partial(_modulo, n))) for n in (8, 16, 32, 64, 128)),
    *((f"the first key of its block of {n}", partial(_key, partial(_first_of_block, n))) for n in (4, 8, 16, 32, 64)),
    ("the first key of its sequence", partial(_key, partial(_modulo, 1))),
    ("the last key of its sequence", _last),
    ("the next packed row", partial(_packed_row, 1)),
    ("the previous packed row", partial(_packed_row, -1)),
    ("key j of the previous sequence", partial(_of_neighbour, -1)),
    ("key j of the next sequence", partial(_of_neighbour, 1)),
    ("key j of the first sequence", _of_first),
)  # fmt: skip
"""Rows that a kernel confuses: an index that slips; a page or tile that is read for another one; a row beside the sequence; another
sequence's cache. What other arithmetic gives is sought as an address."""


@dataclass(frozen=True)
class FromElsewhere(Effect):
    """Another query's output, or its q, in place of this one's.

    Attributes:
        source: of the other query.
        what: "output"; or "query", q alone, behind this query's own mask.
    """

    source: Source
    what: str = "output"
    cost: float = 1.0

    def outputs(self, queries: Queries) -> Numbers:
        shape = queries.shape
        rows, heads = self.source.row(queries), self.source.head(queries)
        there = (rows >= 0).reshape(*shape, 1)
        needed, place = np.unique(np.maximum(rows, 0), return_inverse=True)
        others = Queries(queries.call, needed)
        at, head = place.reshape(shape), np.clip(heads, 0, queries.heads - 1).reshape(shape)
        if self.what == "query":
            found = queries.attended(others.scores[at, head, np.broadcast_to(queries.own, shape)])
        else:
            found = others.right[at, head]
        return np.where(there, found, queries.right)


@dataclass(frozen=True)
class OtherKvHead(Effect):
    """Another kv head is read.

    Attributes:
        kv: the kv head, modulo their number.
        what: "kv", "k" alone, or "v" alone.
    """

    kv: Value
    what: str = "kv"
    cost: float = 1.0

    def outputs(self, queries: Queries) -> Numbers:
        kv = (self.kv.of(queries.table) % queries.kv_heads).reshape(*queries.shape, 1, 1)
        own = np.broadcast_to(queries.own[:, None, None], kv.shape)
        scores = np.take_along_axis(queries.scores, kv if "k" in self.what else own, 2)
        weights = np.zeros_like(queries.scores)
        np.put_along_axis(weights, kv if "v" in self.what else own, softmax(scores, queries.visible[:, None, None]), 2)
        return queries.of(weights)


@dataclass(frozen=True)
class Moved(Effect):
    """Rows of K, V or both are read from elsewhere.

    Attributes:
        what: "k", "v" or "kv".
        condition: on the pairs of a query and a key that should be seen.
        words: the other row in words, as seen from key j: "key j + 1"; empty for the same row.
        row: (call) -> packed row of each packed key; negative where it does not move, total_k for a row of zeros.
        kv: by how many kv heads further.
    """

    what: str
    condition: Condition
    words: str
    row: Rows = field(compare=False)
    kv: int = 0
    cost: float = 1.0

    def outputs(self, queries: Queries) -> Numbers:
        to = self.row(queries.call)
        if not ((moves := self.moves(queries, to)) & queries.visible[:, None]).any():
            return queries.right
        index, kv = np.maximum(to, 0), (np.arange(queries.kv_heads) + self.kv) % queries.kv_heads
        scores = queries.own_scores
        if "k" in self.what:
            moved = _padded(_own(queries, kv), -1)[..., index]
            scores = np.where(moves, moved, scores)
        weights = softmax(scores, queries.visible[:, None])
        if "v" not in self.what:
            return queries.of_own(weights)
        v = _padded(queries.values, 0)
        away = np.where(moves, weights, 0.0)
        return queries.of_own(weights - away) + queries.of_own(away, v[index][:, kv])

    def moves(self, queries: Queries, to: Ints) -> Flags:
        """Which keys move for which queries, bool [rows, heads, total_k]."""
        found: Flags = np.broadcast_to(to >= 0, queries.own_scores.shape)
        if not self.condition.always:
            found = found & self.condition.holds(queries.pairs).reshape(found.shape)
        return found


def _padded(x: Numbers, axis: int) -> Numbers:
    """With zeros for the row behind the last one."""
    return np.concatenate([x, np.zeros_like(x.take([0], axis))], axis)


def _own(queries: Queries, kv: Ints) -> Numbers:
    """Scores with the kv head that takes the place of the own one, int64 [kv heads] -> [rows, heads, total_k]."""
    if (kv == np.arange(queries.kv_heads)).all():
        return queries.own_scores
    found: Numbers = queries.scores[:, np.arange(queries.heads), kv[queries.own]]
    return found
