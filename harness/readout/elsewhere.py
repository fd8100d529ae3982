"""Data from elsewhere: another query's output, weights or q; another kv head; other rows of K and V."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from assay.harness.readout.features import Ints
from assay.harness.readout.maps import Rows
from assay.harness.readout.mining import Condition, Value
from assay.harness.readout.operators import Effect
from assay.harness.readout.queries import Queries, einsum, softmax
from assay.harness.readout.reading import Numbers
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
    """

    kv: Value
    cost: float = 1.0

    def outputs(self, queries: Queries) -> Numbers:
        kv = (self.kv.of(queries.table) % queries.kv_heads).reshape(*queries.shape, 1, 1)
        scores = np.take_along_axis(queries.scores, kv, 2)
        weights = np.zeros_like(queries.scores)
        np.put_along_axis(weights, kv, softmax(scores, queries.visible[:, None, None]), 2)
        return queries.of(weights)


@dataclass(frozen=True)
class Moved(Effect):
    """Rows of K, V or both are read from elsewhere, or are blended with rows from elsewhere.

    Attributes:
        what: "k", "v" or "kv".
        condition: on the pairs of a query and a key that should be seen.
        words: the other row in words, as seen from key j: "key j + 1"; empty for the same row.
        row: (call) -> packed row of each packed key; negative where it does not move.
        kv: by how many kv heads further.
        share: shares of the right row and of the other.
        stale: whether the other rows are those of the call before.
    """

    what: str
    condition: Condition
    words: str
    row: Rows = field(compare=False)
    kv: int = 0
    share: tuple[float, float] = (0.0, 1.0)
    stale: bool = False
    cost: float = 1.0

    def outputs(self, queries: Queries) -> Numbers:
        there = self._rows(queries)
        if there is None:
            return queries.right
        k, v, to = there
        moves = np.broadcast_to(to >= 0, queries.own_scores.shape)
        if not self.condition.always:
            moves = moves & self.condition.holds(queries.pairs).reshape(moves.shape)
        if not (moves & queries.visible[:, None]).any():
            return queries.right
        index, kv = np.maximum(to, 0), (np.arange(queries.kv_heads) + self.kv) % queries.kv_heads
        right, other = self.share
        scores = queries.own_scores
        if "k" in self.what:
            moved = self._scores(queries, k[index][:, kv]) if self.stale else _own(queries, kv)[..., index]
            scores = np.where(moves, moved if self.share == (0.0, 1.0) else right * scores + other * moved, scores)
        weights = softmax(scores, queries.visible[:, None])
        if "v" not in self.what:
            return queries.of_own(weights)
        away = np.where(moves, weights, 0.0)
        stays = weights - away if not right else weights - away + right * away
        return queries.of_own(stays) + queries.of_own(away if other == 1 else other * away, v[index][:, kv])

    def _rows(self, queries: Queries) -> tuple[Numbers, Numbers, Ints] | None:
        """K and V that rows are read from, and the row of each packed key; None if there are none of this shape."""
        to = self.row(queries.call)
        if not self.stale:
            return queries.k, queries.values, to
        k, v = queries.history.k, queries.history.v
        if k is None or v is None or k.shape[1:] != queries.k.shape[1:] or v.shape[1:] != queries.values.shape[1:]:
            return None
        return k.double().cpu().numpy(), v.double().cpu().numpy(), np.where(to < len(k), to, -1)

    @staticmethod
    def _scores(queries: Queries, k: Numbers) -> Numbers:
        """Scores with other keys of the own kv head, [total_k, kv heads, head_dim] -> [rows, heads, total_k]."""
        rows, heads = queries.shape
        by_group = queries.q.reshape(rows, queries.kv_heads, heads // queries.kv_heads, -1)
        return queries.call.scale * einsum("tcgd,kcd->tcgk", by_group, k).reshape(rows, heads, -1)


def _own(queries: Queries, kv: Ints) -> Numbers:
    """Scores with the kv head that takes the place of the own one, int64 [kv heads] -> [rows, heads, total_k]."""
    if (kv == np.arange(queries.kv_heads)).all():
        return queries.own_scores
    found: Numbers = queries.scores[:, np.arange(queries.heads), kv[queries.own]]
    return found
