"""Scales of blocks: K or V dequantised with the scale of another block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from assay.harness.localize.reading import Numbers, own_keys
from assay.harness.readout.features import Ints
from assay.harness.readout.mining import ALWAYS, Condition, Literal, Term
from assay.harness.readout.operators import Effect
from assay.harness.readout.queries import Queries, softmax


@dataclass(frozen=True)
class BlockScale(Effect):
    """K or V of a block of keys are dequantised with the scale of another block, as far as there is one.

    A scale is the largest size of a number in a block of one kv head, as symmetric quantisation takes it. The effect is data of the
    call: it can be computed, but not read from weights, since values that say who they are change the scale.

    Attributes:
        what: "k" or "v".
        size: keys of a block.
        whose: one of `WHOSE`.
        condition: on the keys.
    """

    what: str
    size: int
    whose: str
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
        keys = [k for _, k in own_keys(queries.call)]
        scales = [np.maximum.reduceat(x[k], np.arange(0, k.stop - k.start, self.size), axis=0) for k in keys]
        every = np.concatenate(scales)
        for seq, (k, own) in enumerate(zip(keys, scales, strict=True)):
            block = np.arange(k.stop - k.start) // self.size
            wrong = self._wrong(seq, k.start, block, scales, every)
            found[k] = wrong / np.maximum(own[block], 1e-30)
        return found

    def _wrong(self, seq: int, start: int, block: Ints, scales: Sequence[Numbers], every: Numbers) -> Numbers:
        """The scale that each key of a sequence gets, [keys, kv heads]."""
        own = scales[seq]
        if self.whose in ("next", "previous"):
            return own[np.clip(block + (1 if self.whose == "next" else -1), 0, len(own) - 1)]
        if self.whose == "packed":
            return every[np.minimum(start // self.size + block, len(every) - 1)]
        if self.whose == "first block":
            return own[0 * block]
        if self.whose == "next head":
            return np.roll(own, -1, 1)[block]
        other = scales[0 if self.whose == "first sequence" else max(seq - 1, 0)]
        return np.where((block < len(other))[:, None], other[np.minimum(block, len(other) - 1)], own[block])


WHOSE = {
    "next": "the next block of {size} keys", "previous": "the previous block of {size} keys",
    "packed": "block cu_seqlens_k[b] // {size} + j // {size} of all blocks of {size} keys of the batch",
    "first block": "the first block of {size} keys", "next head": "its block of {size} keys of the next kv head",
    "first sequence": "the same block of {size} keys of the first sequence",
    "previous sequence": "the same block of {size} keys of the previous sequence",
}  # fmt: skip
"""Whose scale a block may get: one beside it, or one that is found by a wrong index into the scales of the batch."""
SIZES = (4, 8, 16, 32, 64, 128)
"""Keys of a block that quantisations and pages have."""


def block_scales() -> Iterator[BlockScale]:
    """Every block; and of those beside it, each of the first blocks alone."""
    for what, size, whose in product("kv", SIZES, WHOSE):
        yield BlockScale(what, size, whose)
        if whose not in ("next", "previous"):
            continue
        block = Term("j", block=size, cost=0.6, words=True)
        for number in range(4):
            condition = Condition((Literal(block, "==", number),))
            yield BlockScale(what, size, whose, condition, cost=2.0 + condition.cost)
