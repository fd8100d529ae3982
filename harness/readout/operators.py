"""Operators: what a kernel computes on any call, so that it can be tried on calls that were not seen.

An `Effect` is what becomes of a query. With the condition under which it shows it is an `Operator`.
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
        cost: how far-fetched it is. Costs only rank effects that explain the same: 1 is a plain bug, 3 is one of a kind.
        id: of the hypothesis, or of the rounding, whose effect it is; empty for others.
    """

    cost: float = 1.0
    id: str = ""

    @abstractmethod
    def outputs(self, queries: Queries) -> Numbers:
        """The output of each query, float64 [rows, heads, head_dim_v]; NaN where it is undefined."""


@dataclass(frozen=True)
class Told(Effect):
    """A function (queries, *args) -> outputs that has its words by itself, and can be sent to another process."""

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
        effect: the change; None for attention.
        condition: of the queries on which it shows.
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
