"""Data from elsewhere: another query's output, weights or q; another kv head; other rows of K and V."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from assay.harness.localize.reading import Numbers
from assay.harness.readout.features import Ints
from assay.harness.readout.maps import Rows
from assay.harness.readout.mining import Condition, Value
from assay.harness.readout.operators import Effect
from assay.harness.readout.queries import Flags, Queries, einsum, softmax
from assay.harness.readout.sources import Source


@dataclass(frozen=True)
class FromElsewhere(Effect):
    """Another query's output, or its q, in place of this one's; or a mixture of the right output and another's.

    Attributes:
        source: of the other query.
        what: "output"; "query": q alone, behind this query's own mask; "weights": q and the keys of its kv head, for its own
            values.
        share: shares of the right one and of the other: of the output, of q, or of the weights.
    """

    source: Source
    what: str = "output"
    share: tuple[float, float] = (0.0, 1.0)
    cost: float = 1.0

    def outputs(self, queries: Queries) -> Numbers:
        shape = queries.shape
        rows, heads = self.source.row(queries), self.source.head(queries)
        there = (rows >= 0).reshape(*shape, 1)
        needed, place = np.unique(np.maximum(rows, 0), return_inverse=True)
        others = Queries(queries.call, needed)
        at, head = place.reshape(shape), np.clip(heads, 0, queries.heads - 1).reshape(shape)
        right, other = self.share
        if self.what == "query":
            scores = right * queries.own_scores + other * others.scores[at, head, np.broadcast_to(queries.own, shape)]
            mixed = queries.attended(scores)
        elif self.what == "weights":
            scores = others.scores[at, head, queries.own[head]]
            mixed = right * queries.right + other * queries.attended(scores)
        else:
            mixed = right * queries.right + other * others.right[at, head]
        return np.where(there, mixed, queries.right)


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
    """Rows of K, V or both are read from elsewhere, or are blended with rows from elsewhere.

    Attributes:
        what: "k", "v" or "kv".
        condition: on the pairs of a query and a key that should be seen.
        words: the other row in words, as seen from key j: "key j + 1"; empty for the same row.
        row: (call) -> packed row of each packed key; negative where it does not move, total_k for a row of zeros.
        kv: by how many kv heads further.
        share: shares of the right row and of the other.
        stale: whether the other rows are those of the call before.
        of: what is read from there, in words, where it is not key j: "page p".
    """

    what: str
    condition: Condition
    words: str
    row: Rows = field(compare=False)
    kv: int = 0
    share: tuple[float, float] = (0.0, 1.0)
    stale: bool = False
    of: str = "key j"
    cost: float = 1.0

    def outputs(self, queries: Queries) -> Numbers:
        return _moved(queries, (self,))

    def moves(self, queries: Queries, to: Ints) -> Flags:
        """Which keys move for which queries, bool [rows, heads, total_k]."""
        found: Flags = np.broadcast_to(to >= 0, queries.own_scores.shape)
        if not self.condition.always:
            found = found & self.condition.holds(queries.pairs).reshape(found.shape)
        return found

    def rows(self, queries: Queries) -> Ints | None:
        """The row that each packed key is read from, negative where it does not move; None if there are no rows of this shape."""
        to = self.row(queries.call)
        if not self.stale:
            return to
        k, v = queries.history.k, queries.history.v
        if k is None or v is None or k.shape[1:] != queries.k.shape[1:] or v.shape[1:] != queries.values.shape[1:]:
            return None
        return np.where(to < len(k), to, -1)


@dataclass(frozen=True)
class MovedInParts(Effect):
    """Rows of K, V or both are read from elsewhere, some from here and some from there, as when two pages are swapped.

    Attributes:
        parts: what moves where; a key moves in one of them.
    """

    parts: tuple[Moved, ...]
    cost: float = 2.0

    def outputs(self, queries: Queries) -> Numbers:
        return _moved(queries, self.parts)


def _moved(queries: Queries, parts: Sequence[Moved]) -> Numbers:
    """The output with rows of K and V that moved."""
    found: list[tuple[Moved, Flags, Ints, Ints]] = []
    for part in parts:
        to = part.rows(queries)
        if to is not None and ((moves := part.moves(queries, to)) & queries.visible[:, None]).any():
            found.append((part, moves, np.maximum(to, 0), (np.arange(queries.kv_heads) + part.kv) % queries.kv_heads))
    if not found:
        return queries.right
    scores = queries.own_scores
    for part, moves, index, kv in found:
        if "k" in part.what:
            moved = _stale_scores(queries, index) if part.stale else _padded(_own(queries, kv), -1)[..., index]
            right, other = part.share
            scores = np.where(moves, moved if part.share == (0.0, 1.0) else right * scores + other * moved, scores)
    weights = softmax(scores, queries.visible[:, None])
    stays, gained = weights, np.zeros_like(queries.right)
    for part, moves, index, kv in found:
        if "v" in part.what:
            v = _wide(queries.history.v) if part.stale else _padded(queries.values, 0)
            right, other = part.share
            away = np.where(moves, weights, 0.0)
            stays = stays - away if not right else stays - (1 - right) * away
            gained = gained + queries.of_own(away if other == 1 else other * away, v[index][:, kv])
    return queries.of_own(stays) + gained


def _padded(x: Numbers, axis: int) -> Numbers:
    """With zeros for the row behind the last one."""
    return np.concatenate([x, np.zeros_like(x.take([0], axis))], axis)


def _own(queries: Queries, kv: Ints) -> Numbers:
    """Scores with the kv head that takes the place of the own one, int64 [kv heads] -> [rows, heads, total_k]."""
    if (kv == np.arange(queries.kv_heads)).all():
        return queries.own_scores
    found: Numbers = queries.scores[:, np.arange(queries.heads), kv[queries.own]]
    return found


def _stale_scores(queries: Queries, index: Ints) -> Numbers:
    """Scores with rows of the K of the call before, of the own kv head, [rows, heads, total_k]."""
    rows, heads = queries.shape
    by_group = queries.q.reshape(rows, queries.kv_heads, queries.call.heads.group, -1)
    k = _wide(queries.history.k)[index]
    return queries.call.scale * einsum("tcgd,kcd->tcgk", by_group, k).reshape(rows, heads, -1)


def _wide(x: Tensor | None) -> Numbers:
    assert x is not None  # a part with rows of the call before has a call before
    found: Numbers = x.double().cpu().numpy()
    return found
