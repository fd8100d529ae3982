"""Scales of blocks: K or V dequantised with the scale of a neighbouring block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

from assay.harness.readout.features import own_keys
from assay.harness.readout.mining import ALWAYS, Condition, Literal, Term
from assay.harness.readout.operators import Effect
from assay.harness.readout.queries import Queries, softmax
from assay.harness.readout.reading import Numbers


@dataclass(frozen=True)
class BlockScale(Effect):
    """K or V of a block of keys are dequantised with the scale of the block beside it, as far as there is one.

    A scale is the largest size of a number in a block of one kv head, as symmetric quantisation takes it. The effect is data of the
    call: it can be computed, but not read from weights, since values that say who they are change the scale.

    Attributes:
        what: "k" or "v".
        size: keys of a block.
        by: 1 for the next block, -1 for the previous one.
        condition: on the keys.
    """

    what: str
    size: int
    by: int
    condition: Condition = ALWAYS
    cost: float = 2.0

    def outputs(self, queries: Queries) -> Numbers:
        factors = self._factors(queries)[:, queries.own].T[None]
        if not self.condition.always:
            holds = self.condition.holds(queries.pairs).reshape(queries.own_scores.shape)
            factors = np.where(holds, factors, 1.0)
        if self.what == "k":
            return queries.attended(queries.own_scores * factors)
        weights: Numbers = softmax(queries.own_scores, queries.visible[:, None]) * factors
        return queries.of_own(weights)

    def _factors(self, queries: Queries) -> Numbers:
        """The wrong scale over the right one of each key, [total_k, kv heads]."""
        x = np.abs(queries.k if self.what == "k" else queries.values).max(-1)
        found: Numbers = np.ones_like(x)
        for _, keys in own_keys(queries.call):
            size = np.maximum.reduceat(x[keys], np.arange(0, keys.stop - keys.start, self.size), axis=0)
            block = np.arange(keys.stop - keys.start) // self.size
            wrong = np.clip(block + self.by, 0, len(size) - 1)
            found[keys] = size[wrong] / np.maximum(size[block], 1e-30)
        return found


SIZES = (4, 8, 16, 32, 64, 128)
"""Keys of a block that quantisations and pages have."""


def block_scales() -> Iterator[BlockScale]:
    """Every block, and each of the first blocks alone."""
    for what, size, by in product("kv", SIZES, (1, -1)):
        yield BlockScale(what, size, by)
        block = Term("j", block=size, cost=0.6, words=True)
        for number in range(4):
            condition = Condition((Literal(block, "==", number),))
            yield BlockScale(what, size, by, condition, cost=2.0 + condition.cost)
