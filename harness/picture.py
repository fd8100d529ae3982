"""The picture of an operator: the keys that the queries of one call should attend to, and those that a kernel attends to."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from assay.harness.schema import Part

MAX_QUERIES, MAX_KEYS = 32, 64
"""Most queries and keys in a picture: a page can show them side by side in legible cells, and a report can hold them."""

SAME, NONE, UNSEEN, WRONGLY_SEEN, WRONG_WEIGHT, ELSEWHERE = "#", ".", "o", "!", "~", "x"
"""The sign of a query and a key in a picture; see `Picture.cells`."""
WRONG = (UNSEEN, WRONGLY_SEEN, WRONG_WEIGHT, ELSEWHERE)
"""The cells that differ from correct attention."""
CELLS = "".join((SAME, NONE, *WRONG))

RowKind = Literal["read", "shifted", "nonlinear", "right", "wrong", "nan", "infinite", "zero", "constant"]
"""The kind of a query's row in a picture; see `Picture.rows`."""
WITH_WEIGHTS: tuple[RowKind, ...] = ("read", "shifted")
"""Rows with weights: together with a shift, if any, they give the whole output."""


class Picture(Part):
    """The weights of one q head of one call: expected, read, and their differences, for at most 32 queries and 64 keys."""

    call: str = Field(description='description of the call, such as "layer 0 extend, new+prefix 7+3"')
    shown: str = Field(description="the queries and keys of the call that are shown, or an empty string if all are")
    head: int = Field(description="index of the q head shown", ge=0)
    heads: int = Field(description="q heads of the call", ge=1)
    wrong_heads: tuple[int, ...] = Field(description="q heads with a wrong query")
    foreign_kv_heads: tuple[int, ...] = Field((), description="kv heads that this q head reads but should not")
    query_sequences: tuple[int, ...] = Field(description="the sequence of each query", max_length=MAX_QUERIES)
    query_positions: tuple[int, ...] = Field(description="the position of each query in it, cached prefix included")
    key_sequences: tuple[int, ...] = Field(description="the sequence of each key", max_length=MAX_KEYS)
    key_indices: tuple[int, ...] = Field(description="the index of each key in it")
    expected: tuple[tuple[float, ...], ...] = Field(
        description="queries x keys: the correct weights, to four significant digits"
    )
    read: tuple[tuple[float, ...], ...] = Field(
        description="queries x keys: the weights that were read, over all kv heads; empty for a query without weights"
    )
    cells: tuple[str, ...] = Field(
        description="queries x keys, one character each: # as expected, up to the factor by which wrong weights of other keys "
        "change the denominator; . correctly masked; o missing: it should have weight but has none; ! wrongly seen: it "
        "has weight but should have none; ~ wrong weight; x weight of a key of another sequence or of another kv head"
    )
    rows: tuple[RowKind, ...] = Field(
        description="the kind of each query. With weights: read, whose weights give the output; shifted, whose output also has an "
        "added constant. Without: nonlinear, whose weights do not add up to the output; right and wrong, which were not read; "
        "nan; infinite; zero; and constant, which does not depend on V"
    )

    @model_validator(mode="after")
    def _in_shape(self) -> Self:
        """Refuse rows and cells that do not fit the labels."""
        queries, keys = len(self.query_sequences), len(self.key_sequences)
        columns = (self.query_positions, self.expected, self.read, self.cells, self.rows)
        if any(len(column) != queries for column in columns) or len(self.key_indices) != keys:
            raise ValueError(f"not every part of the picture has {queries} queries and {keys} keys")
        for expected, read, cells, kind in zip(self.expected, self.read, self.cells, self.rows, strict=True):
            wanted = (
                keys if kind in WITH_WEIGHTS else len(cells) if kind == "nonlinear" else 0
            )  # older pictures had some
            if len(expected) != keys or {len(read), len(cells)} != {wanted} or set(cells) - set(CELLS):
                raise ValueError(
                    f"a query that is {kind} has {keys} expected weights, {wanted} weights and cells of {CELLS}"
                )
        return self

    def around(self, most: int) -> Self:
        """Return at most `most` queries of one sequence, around the first wrong one, with the keys of the sequence.

        Keys of other sequences stay where one of these queries is wrong.
        """
        differs = [
            kind not in ("read", "right") or any(cell in WRONG for cell in row)
            for kind, row in zip(self.rows, self.cells, strict=True)
        ]
        first = differs.index(True) if True in differs else 0
        mine = [n for n, sequence in enumerate(self.query_sequences) if sequence == self.query_sequences[first]]
        start = max(0, min(mine.index(first) - 1, len(mine) - most))
        queries = mine[start : start + most]
        keys = [
            k
            for k, sequence in enumerate(self.key_sequences)
            if sequence == self.query_sequences[first] or any(self.cells[n][k : k + 1] in WRONG for n in queries)
        ]

        def part(rows: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
            return tuple(tuple(rows[n][k] for k in keys if rows[n]) for n in queries)

        return self.model_copy(
            update={
                **{
                    name: tuple(getattr(self, name)[n] for n in queries)
                    for name in ("query_sequences", "query_positions", "rows")
                },
                **{name: tuple(getattr(self, name)[k] for k in keys) for name in ("key_sequences", "key_indices")},
                **{name: part(getattr(self, name)) for name in ("expected", "read")},
                "cells": tuple(map("".join, part(self.cells))),
            }
        )

    @property
    def query_breaks(self) -> tuple[int, ...]:
        """Indices of queries that do not directly follow the previous query in its sequence."""
        return _breaks(self.query_sequences, self.query_positions)

    @property
    def key_breaks(self) -> tuple[int, ...]:
        """Indices of keys that do not directly follow the previous key in its sequence."""
        return _breaks(self.key_sequences, self.key_indices)


def _breaks(sequences: Sequence[int], places: Sequence[int]) -> tuple[int, ...]:
    both = list(pairwise(zip(sequences, places, strict=True)))
    return tuple(n for n, ((a, i), (b, j)) in enumerate(both, start=1) if a != b or j != i + 1)
