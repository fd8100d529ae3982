"""Operators: what a kernel computes on any call, so that it can be tried on calls that were not seen.

An `Effect` is what becomes of a query. With the condition under which it shows it is a `Clause`; clauses make an `Operator`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from assay.harness.localize.reading import Numbers
from assay.harness.readout.mining import ALWAYS, Condition
from assay.harness.readout.queries import Flags, Queries


class Effect(ABC):
    """What becomes of the output of a query. Whether it shows on a query is the clause's business.

    Attributes:
        cost: how far-fetched it is. Costs only rank effects that explain the same: 1 is a plain bug, 3 is one of a kind.
    """

    cost: float = 1.0

    @abstractmethod
    def outputs(self, queries: Queries) -> Numbers:
        """The output of each query, float64 [rows, heads, head_dim_v]; NaN where it is undefined."""

    def dims(self, count: int) -> Flags:
        """Which of so many output dims it speaks of, bool [count]: all, unless the effect is of a block of them."""
        return np.ones(count, bool)


@dataclass(frozen=True)
class Clause:
    """An effect, and the queries on which it shows.

    Attributes:
        effect: the effect.
        condition: on the queries.
        sometimes: share of the calls that meet the condition in which it shows; below 1, nothing that was looked at says in which.
    """

    effect: Effect
    condition: Condition = ALWAYS
    sometimes: float = 1.0

    @property
    def cost(self) -> float:
        """How far-fetched it is."""
        return self.effect.cost + self.condition.cost + 2.0 * (self.sometimes < 1)


@dataclass(frozen=True)
class Operator:
    """What a kernel computes: attention, changed by each clause where it shows; the first one that shows counts, in each dim."""

    clauses: tuple[Clause, ...] = ()

    def uncertain(self, queries: Queries) -> Flags:
        """Queries on which a clause shows only sometimes, so that the right output is as good, bool [rows * heads]."""
        rows, heads = queries.shape
        found = np.zeros(rows * heads, bool)
        for clause in self.clauses:
            if clause.sometimes < 1:
                found |= clause.condition.holds(queries.table)
        return found

    def outputs(self, queries: Queries) -> Numbers:
        """The output of each query, float64 [rows, heads, head_dim_v]."""
        found = queries.right.copy()
        left = np.ones(found.shape, bool)
        for clause in self.clauses:
            holds = clause.condition.holds(queries.table).reshape(*queries.shape, 1)
            shows = left & holds & clause.effect.dims(found.shape[-1])
            if shows.any():
                found = np.where(shows, clause.effect.outputs(queries), found)
                left &= ~shows
        return found
