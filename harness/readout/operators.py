"""Operators: functions that a kernel computes on any call, so that they can be tested on new calls.

An `Effect` changes the output of queries. An `Operator` is an effect with the condition under which it shows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from assay.harness.localize.reading import Numbers
from assay.harness.readout.conditions import ALWAYS, Condition
from assay.harness.readout.queries import Queries


class Effect(ABC):
    """A change of the output of a query. The operator says on which queries it shows.

    Attributes:
        cost: how far-fetched the effect is. Costs only rank effects that explain the same: 1 is a plain bug, 3 a singular one.
        id: the id of the hypothesis or the rounding, or an empty string for other effects.
    """

    cost: float = 1.0
    id: str = ""

    @abstractmethod
    def outputs(self, queries: Queries) -> Numbers:
        """Return the output of each query, float64 [rows, heads, head_dim_v]; NaN where it is undefined."""


@dataclass(frozen=True)
class Told(Effect):
    """A picklable function (queries, *args) -> outputs with its own description."""

    words: str
    compute: Callable[..., Numbers]
    args: tuple[object, ...]
    cost: float = 1.0
    id: str = ""

    def outputs(self, queries: Queries) -> Numbers:
        return self.compute(queries, *self.args)


@dataclass(frozen=True)
class Operator:
    """The function that a kernel computes: attention, changed by an effect on the queries that meet a condition.

    Attributes:
        effect: the change, or None for attention.
        condition: the condition of the queries on which it shows.
    """

    effect: Effect | None = None
    condition: Condition = ALWAYS

    @property
    def cost(self) -> float:
        """Strangeness: how far-fetched it is."""
        return (self.effect.cost if self.effect else 0.0) + self.condition.cost

    def outputs(self, queries: Queries) -> Numbers:
        """The output of each query, float64 [rows, heads, head_dim_v]; NaN where it is undefined."""
        shows = self.condition.holds(queries.table)
        if self.effect is None or not shows.any():
            return queries.right
        return np.where(shows.reshape(*queries.shape, 1), self.effect.outputs(queries), queries.right)
