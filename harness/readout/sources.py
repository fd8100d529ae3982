"""Queries and heads that another one may be confused with: where a kernel may take a query's q, weights or output from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from assay.harness.readout.features import Ints
from assay.harness.readout.queries import Queries

Of = Callable[[Queries], Ints]
"""(queries) -> a packed row of q, or a q head, for each row and head, int64 [rows * heads]."""
_Option = tuple[str, Of, float]
"""A place in words, the place, and its cost."""


@dataclass(frozen=True)
class Source:
    """Where a query takes something from: (packed row, q head) as functions of the query.

    Attributes:
        query: the other query in words, such as "query i - 1"; empty for the same one.
        in_head: its q head in words, such as "the next q head"; empty for the same one.
        row: (queries) -> packed row of q for each row and head; negative where there is none.
        head: (queries) -> q head, likewise.
        cost: how far-fetched it is.
    """

    query: str
    in_head: str
    row: Of = field(compare=False)
    head: Of = field(compare=False)
    cost: float = 1.0

    @property
    def words(self) -> str:
        """The source in words, such as "query i - 1 of the next q head"."""
        return " of ".join(filter(None, (self.query, self.in_head)))

    @property
    def taker(self) -> str:
        """Who takes from it: "query i", "q head h", or "query i of q head h"."""
        return " of ".join(filter(None, ("query i" * bool(self.query), "q head h" * bool(self.in_head))))


def _in_sequence(queries: Queries, seq: Ints, i: Ints) -> Ints:
    """Packed row of query i of a sequence; -1 where there is none."""
    edges = np.array(queries.call.cu_seqlens_q.tolist())
    starts, stops = edges[:-1], edges[1:]
    inside = (seq >= 0) & (seq < len(starts))
    safe = np.clip(seq, 0, len(starts) - 1)
    row = starts[safe] + i
    return np.where(inside & (i >= 0) & (row < stops[safe]), row, -1)


def _same_row(queries: Queries) -> Ints:
    return queries.table["row"]


def _shifted(by: int, queries: Queries) -> Ints:
    return _in_sequence(queries, queries.table["seq"], queries.table["i"] + by)


def _shifted_in_batch(by: int, queries: Queries) -> Ints:
    return (queries.table["row"] + by) % queries.call.q.shape[0]


def _query(number: int, queries: Queries) -> Ints:
    """Query `number` of the sequence; counted from its end if it is negative."""
    i = queries.table["new"] + number if number < 0 else np.full_like(queries.table["i"], number)
    return _in_sequence(queries, queries.table["seq"], i)


def _of_sequence(number: int, queries: Queries) -> Ints:
    """The same query of sequence `number` of the batch; counted from its end if it is negative."""
    seqs = queries.table["seqs"]
    return _in_sequence(queries, seqs + number if number < 0 else np.full_like(seqs, number), queries.table["i"])


def _of_neighbour(by: int, queries: Queries) -> Ints:
    return _in_sequence(queries, queries.table["seq"] + by, queries.table["i"])


def _first_of_batch(queries: Queries) -> Ints:
    return np.zeros_like(queries.table["row"])


def _last_of_batch(queries: Queries) -> Ints:
    return np.full_like(queries.table["row"], queries.call.q.shape[0] - 1)


def _last_of_previous(queries: Queries) -> Ints:
    table = queries.table
    return np.where(table["seq"] > 0, table["row"] - table["i"] - 1, -1)


def _from_start_of_keys(queries: Queries) -> Ints:
    starts = np.array(queries.call.cu_seqlens_k.tolist())
    found: Ints = np.minimum(starts[queries.table["seq"]] + queries.table["i"], queries.call.q.shape[0] - 1)
    return found


def _first_of_block(size: int, queries: Queries) -> Ints:
    return _in_sequence(queries, queries.table["seq"], queries.table["i"] // size * size)


def _remainder(size: int, queries: Queries) -> Ints:
    return _in_sequence(queries, queries.table["seq"], queries.table["i"] % size)


def shift(name: str, by: int) -> str:
    """An index and a shift in words: "i - 1"."""
    return f"{name} {'+' if by > 0 else '-'} {abs(by)}"


_NEIGHBOURS = (-1, 1, -2, 2, -3, 3, -4, 4, -8, 8, -16, 16)
_TILES = (16, 32, 64, 128)
_QUERIES: tuple[_Option, ...] = (
    ("", _same_row, 0.0),
    *((f"query {shift('i', by)}", partial(_shifted, by), 0.2 + 0.1 * abs(by)) for by in _NEIGHBOURS),
    *((f"the query in packed row {shift('r', by)}", partial(_shifted_in_batch, by), 0.7 + 0.1 * abs(by)) for by in (-1, 1, -2, 2)),
    ("the first query of its sequence", partial(_query, 0), 0.4),
    ("the last query of its sequence", partial(_query, -1), 0.4),
    ("query i of the first sequence", partial(_of_sequence, 0), 0.6),
    ("query i of the previous sequence", partial(_of_neighbour, -1), 0.5),
    ("query i of the next sequence", partial(_of_neighbour, 1), 0.5),
    ("query i of the last sequence", partial(_of_sequence, -1), 0.7),
    ("the first query of the batch", _first_of_batch, 0.6),
    ("the last query of the batch", _last_of_batch, 0.6),
    ("the last query of the previous sequence", _last_of_previous, 0.7),
    ("the query in packed row cu_seqlens_k[b] + i, or the last one", _from_start_of_keys, 0.7),
    *((f"the first query of its block of {n}", partial(_first_of_block, n), 0.7) for n in _TILES),
    *((f"query i mod {n}", partial(_remainder, n), 0.8) for n in _TILES),
)  # fmt: skip
"""Rows that a kernel confuses: neighbours and what is a few rows or one vector of rows away, with and without regard to where a
sequence ends; a sequence index that is off; an offset into q that stays at the start of a sequence or of a tile."""


def _same_head(queries: Queries) -> Ints:
    return queries.table["head"]


def _further_head(by: int, queries: Queries) -> Ints:
    return (queries.table["head"] + by) % queries.heads


def _head(number: int, queries: Queries) -> Ints:
    """A fixed q head; counted from the end if it is negative."""
    return np.full_like(queries.table["head"], queries.heads + number if number < 0 else number)


def _paired_head(queries: Queries) -> Ints:
    return queries.table["head"] ^ 1


def _first_of_group(queries: Queries) -> Ints:
    return queries.table["head"] - queries.table["member"]


def _mirrored_head(queries: Queries) -> Ints:
    return queries.heads - 1 - queries.table["head"]


def _next_group(queries: Queries) -> Ints:
    return (queries.table["head"] + queries.table["group"]) % queries.heads


_HEADS: tuple[_Option, ...] = (
    ("", _same_head, 0.0),
    ("the next q head", partial(_further_head, 1), 0.3),
    ("the previous q head", partial(_further_head, -1), 0.3),
    ("q head h + 2", partial(_further_head, 2), 0.5),
    ("q head h - 2", partial(_further_head, -2), 0.5),
    ("q head 0", partial(_head, 0), 0.4),
    ("the last q head", partial(_head, -1), 0.5),
    ("the other q head of its pair", _paired_head, 0.5),
    ("the first q head of its group", _first_of_group, 0.5),
    ("q head num_q_heads - 1 - h", _mirrored_head, 0.6),
    *((f"q head {n}", partial(_head, n), 0.7) for n in (1, 2, 3)),
    ("q head h + num_q_heads / num_kv_heads", _next_group, 0.6),
)
"""Heads that a kernel confuses: neighbours, one that is fixed, heads in pairs or in reverse, and those of a group. Heads that are
so many further are counted modulo their number."""


def _sources() -> tuple[Source, ...]:
    found = []
    for query, row, row_cost in _QUERIES:
        for in_head, head, head_cost in _HEADS:
            if query or in_head:
                both = 0.5 * bool(query and in_head)
                found.append(Source(query, in_head, row, head, row_cost + head_cost + both))
    return tuple(found)


def _flat(queries: Queries) -> tuple[Ints, Ints, int]:
    """Where each row and head lies in an output stored by rows, and in one stored by heads; and the number of rows."""
    rows = queries.call.q.shape[0]
    row, head = queries.table["row"], queries.table["head"]
    return row * queries.heads + head, head * rows + row, rows


def _by_heads(part: int, queries: Queries) -> Ints:
    """The head (0) or row (1) of what lies there in an output that is stored as [heads, rows]."""
    place, _, rows = _flat(queries)
    return np.divmod(place, rows)[part]


def _by_rows(part: int, queries: Queries) -> Ints:
    """The row (0) or head (1) of what lies there in an output that is stored as [rows, heads]."""
    _, place, _ = _flat(queries)
    return np.divmod(place, queries.heads)[part]


def _strided(name: str, queries: Queries) -> Ints:
    """Query i of a sequence that is thought to begin at a stride times its number; without a name, at its number."""
    table = queries.table
    row = table["i"] + table["seq"] * (table[name] if name else 1)
    return np.where(row < queries.call.q.shape[0], row, -1)


_LAYOUTS = (
    *(
        Source(
            f"the query in packed row b x ({words}) + i" if words else "the query in packed row b + i",
            "",
            partial(_strided, name),
            _same_head,
            1.0,
        )
        for name, words in (
            ("", ""),
            ("new", "new"),
            ("first_new", "new of the first sequence"),
            ("most_new", "the largest new"),
        )
    ),
    Source(
        "the query and q head that lie there in memory as [heads, tokens]",
        "",
        partial(_by_heads, 1),
        partial(_by_heads, 0),
        1.0,
    ),
    Source(
        "the query and q head that lie there in memory as [tokens, heads]",
        "",
        partial(_by_rows, 0),
        partial(_by_rows, 1),
        1.0,
    ),
)
"""Tensors that are stored in one layout and read in another."""
SOURCES = (*_sources(), *_LAYOUTS)
"""Places that a query may be confused with: every row with every head, but its own."""
