"""Masks and weights: the keys that a query sees, and their factors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from assay.harness.localize.reading import Flags, Numbers
from assay.harness.readout.conditions import Condition
from assay.harness.readout.edges import Sum
from assay.harness.readout.forms import BLANK
from assay.harness.readout.operators import Effect
from assay.harness.readout.queries import Queries, weighted_softmax


@dataclass(frozen=True)
class KeyFactor:
    """Pairs of a query and a key that get a factor.

    Attributes:
        universe: "seen", keys that should be seen; "hidden", later keys of the sequence; "outside", its keys before the window;
            "foreign", keys of other sequences.
        condition: the condition on the pairs.
        factor: the factor of the weight; 0 for a key that is not seen, `BLANK` for one that the kernel takes as zero.
    """

    universe: str
    condition: Condition
    factor: float

    def _holds(self, queries: Queries) -> Flags:
        """Return flags of the keys for which it holds, bool [rows, heads, total_k]."""
        inside = queries.universes[self.universe]
        return self.condition.holds(queries.pairs).reshape(*queries.shape, inside.shape[-1]) & inside[:, None]


@dataclass(frozen=True)
class KeyFactors(Effect):
    """Multiplies the weights of some keys, or shows keys that should not be seen.

    Attributes:
        parts: the pairs and their factors.
        phantom: the number of additional keys with a score and a value of zero.
    """

    parts: tuple[KeyFactor, ...]
    phantom: Sum | None = None
    cost: float = 1.0

    def outputs(self, queries: Queries) -> Numbers:
        factors = np.repeat(queries.visible[:, None].astype(float), queries.heads, 1)
        for part in self.parts:
            factors[part._holds(queries)] = part.factor
        phantom: Numbers | None = None
        if self.phantom is not None:
            phantom = np.maximum(self.phantom.of(queries.table), 0).reshape(*queries.shape, 1).astype(float)
        if any(part.factor == BLANK for part in self.parts):
            blank = factors == BLANK
            factors[blank] = 0.0
            zeros = blank.sum(-1, keepdims=True).astype(float)
            phantom = zeros if phantom is None else phantom + zeros
        return queries.of_own(weighted_softmax(factors, queries.own_scores, queries.sinks, phantom=phantom))
