"""Data from elsewhere: another query's output or q."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from assay.harness.localize.reading import Numbers
from assay.harness.readout.features import Ints
from assay.harness.readout.operators import Told
from assay.harness.readout.queries import Queries

# (queries) -> a packed row of q, or a q head, for each row and head, int64 [rows * heads].
_Of = Callable[[Queries], Ints]
# The description of a place, the place, and its cost.
_Option = tuple[str, _Of, float]


@dataclass(frozen=True)
class RowSource:
    """The place that a query takes data from: descriptions (empty for its own row or head), and functions of the query.

    The row is negative if there is none.
    """

    query: str
    in_head: str
    row: _Of = field(compare=False)
    head: _Of = field(compare=False)
    cost: float = 1.0

    def __reduce__(self) -> tuple[object, ...]:
        return _source, (self.query, self.in_head)  # lambdas cannot be pickled

    @property
    def words(self) -> str:
        """Describe the source, such as "query i - 1 of the next q head"."""
        return " of ".join(filter(None, (self.query, self.in_head)))


def _source(query: str, in_head: str) -> RowSource:
    return next(source for source in SOURCES if (source.query, source.in_head) == (query, in_head))


def _in_sequence(queries: Queries, seq: Ints, i: Ints) -> Ints:
    """Return the packed row of query i of a sequence, or -1 if there is none."""
    edges = np.array(queries.call.cu_seqlens_q.tolist())
    starts, stops = edges[:-1], edges[1:]
    inside = (seq >= 0) & (seq < len(starts))
    safe = np.clip(seq, 0, len(starts) - 1)
    row = starts[safe] + i
    return np.where(inside & (i >= 0) & (row < stops[safe]), row, -1)


def _query(of: Callable[[dict[str, Ints]], Ints]) -> _Of:
    """Make a source for another query of the sequence, by its index."""
    return lambda queries: _in_sequence(queries, queries.table["seq"], of(queries.table))


def _sequence(of: Callable[[dict[str, Ints]], Ints]) -> _Of:
    """Make a source for the same query of another sequence, by its index."""
    return lambda queries: _in_sequence(queries, of(queries.table), queries.table["i"])


def _from_start_of_keys(queries: Queries) -> Ints:
    starts = np.array(queries.call.cu_seqlens_k.tolist())
    return np.minimum(starts[queries.table["seq"]] + queries.table["i"], queries.call.q.shape[0] - 1)


def _strided(name: str, queries: Queries) -> Ints:
    """Return the row of query i if its sequence began at a stride times its index, or without a name at its index."""
    table = queries.table
    row = table["i"] + table["seq"] * (table[name] if name else 1)
    return np.where(row < queries.call.q.shape[0], row, -1)


# Rows that a kernel may confuse: neighbours, and rows one vector width away; a wrong sequence index; an offset into q that stays
# at the start of a sequence or a tile.
_QUERIES: tuple[_Option, ...] = (
    ("", lambda q: q.table["row"], 0.0),
    *((f"query i {'+' if by > 0 else '-'} {abs(by)}", _query(lambda t, by=by: t["i"] + by), 0.2 + 0.1 * abs(by))  # type: ignore[misc]
      for by in (-1, 1, -2, 2, -4, 4, -8, 8, -16, 16)),
    ("the first query of its sequence", _query(lambda t: 0 * t["i"]), 0.4),
    ("the last query of its sequence", _query(lambda t: t["new"] - 1), 0.4),
    *((f"query i of the {whose} sequence", _sequence(of), cost) for whose, of, cost in (
        ("first", lambda t: 0 * t["seq"], 0.6), ("previous", lambda t: t["seq"] - 1, 0.5),
        ("next", lambda t: t["seq"] + 1, 0.5), ("last", lambda t: t["seqs"] - 1, 0.7))),
    ("the first query of the batch", lambda q: 0 * q.table["row"], 0.6),
    ("the last query of the batch", lambda q: 0 * q.table["row"] + q.call.q.shape[0] - 1, 0.6),
    ("the query in packed row cu_seqlens_k[b] + i, or the last one", _from_start_of_keys, 0.7),
    *((f"the first query of its block of {n}", _query(lambda t, n=n: t["i"] // n * n), 0.7) for n in (16, 32, 64, 128)),  # type: ignore[misc]
    *((f"query i mod {n}", _query(lambda t, n=n: t["i"] % n), 0.8) for n in (16, 32, 64, 128)),  # type: ignore[misc]
)  # fmt: skip
# Heads that a kernel may confuse: neighbours, a fixed one, heads in pairs, and heads of a group.
_HEADS: tuple[_Option, ...] = (
    ("", lambda q: q.table["head"], 0.0),
    ("the next q head", lambda q: (q.table["head"] + 1) % q.heads, 0.3),
    ("the previous q head", lambda q: (q.table["head"] - 1) % q.heads, 0.3),
    ("q head 0", lambda q: 0 * q.table["head"], 0.4),
    ("the last q head", lambda q: 0 * q.table["head"] + q.heads - 1, 0.5),
    ("the other q head of its pair", lambda q: q.table["head"] ^ 1, 0.5),
    ("the first q head of its group", lambda q: q.table["head"] - q.table["member"], 0.5),
    ("q head h + num_q_heads / num_kv_heads", lambda q: (q.table["head"] + q.table["group"]) % q.heads, 0.6),
)


def _flat(of_rows: bool, part: bool, queries: Queries) -> Ints:
    """Return the row, or the head, of the element that is read for a row and head if [rows, heads] is confused with [heads,
    rows].

    `of_rows` means that the tensor is stored as [rows, heads] (and read as [heads, rows]); `part` selects the second index.
    """
    rows, (row, head) = queries.call.q.shape[0], (queries.table["row"], queries.table["head"])
    place, width = (head * rows + row, queries.heads) if of_rows else (row * queries.heads + head, rows)
    return np.divmod(place, width)[int(part)]


# Tensors that are stored with one stride or layout and read with another.
_LAYOUTS = (
    *(RowSource(f"the query in packed row {words} + i", "", partial(_strided, name), _HEADS[0][1], 1.0) for name, words in (
        ("", "b"), ("new", "b x (new)"), ("first_new", "b x (new of the first sequence)"), ("most_new", "b x (the largest new)"))),
    *(RowSource(f"the query and q head at the same offset of a {layout} tensor", "", partial(_flat, of_rows, not of_rows),
             partial(_flat, of_rows, of_rows))
      for layout, of_rows in (("[heads, tokens]", False), ("[tokens, heads]", True))),
)  # fmt: skip
SOURCES = (
    tuple(
        RowSource(query, in_head, row, head, row_cost + head_cost + 0.5 * bool(query and in_head))
        for query, row, row_cost in _QUERIES
        for in_head, head, head_cost in _HEADS
        if query or in_head
    )
    + _LAYOUTS
)
"""Places that a query may be confused with: every row with every head, except its own."""


def from_elsewhere(source: RowSource, what: str = "output", cost: float = 1.0) -> Told:
    """Return the effect of using another query's output, or only its q (under this query's own mask)."""
    taker = " of ".join(filter(None, ("query i" * bool(source.query), "q head h" * bool(source.in_head))))
    does = "is scored with the q of" if what == "query" else "gets the output of"
    return Told(f"{taker} {does} {source.words}", _from_elsewhere, (source, what), cost)


def _from_elsewhere(queries: Queries, source: RowSource, what: str) -> Numbers:
    shape = queries.shape
    rows, heads = source.row(queries), source.head(queries)
    there = (rows >= 0).reshape(*shape, 1)
    needed, place = np.unique(np.maximum(rows, 0), return_inverse=True)
    others = Queries(queries.call, needed)
    at, head = place.reshape(shape), np.clip(heads, 0, queries.heads - 1).reshape(shape)
    if what == "query":
        out = queries.attended(others.scores[at, head, np.broadcast_to(queries.own, shape)])
    else:
        out = others.right[at, head]
    return np.where(there, out, queries.right)
