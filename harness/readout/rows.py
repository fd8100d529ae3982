"""One query and head as it was read, and what a form that fits it says.

`assay.harness.readout.forms` seeks the forms; this is what they work on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

from assay.harness.localize.reading import Flags, Numbers, Reading, own_keys, right_weights, scores_of, visible
from assay.harness.readout.exponentials import Law
from assay.harness.readout.features import Ints

Form = Literal[
    "right", "zero", "constant", "keys", "keys-of-all", "keys-and-mass", "kv", "scale", "slopes", "capped", "bent", "biased",
    "pieces",
    "output", "query", "query-mixture", "values", "scored", "mixture",
]  # fmt: skip
"""What the weights of a query are. In terms of the right weights, in proportion to exp(score):

- "right"; "zero": the weights and the output are zero; "constant": the weights are zero, and the output is one number;
- "keys": times a factor for each key, mostly 0 (not seen), 1 or 2 (seen twice), and normalised; "keys-of-all": but normalised by
  the sum over the keys that should be seen; "keys-and-mass": but normalised by something else;
- "kv": right, of another kv head;
- "bent": in proportion to another function than exp(score);
- "scale": scores times a factor; "slopes": scores of some keys times a factor; "capped": c tanh(score / c); "biased": scores plus a
  number per token of distance; "pieces": a factor that is constant over runs of keys;
- "output": the right weights of another query or head; "query": the weights that the q of another query or head gives here;
  "query-mixture": those that a mixture of the right q and another's gives;
- "values": right, but on the V of other keys; "scored": by the K of other keys, on the right V;
- "mixture": a sum of the right weights and of those of another query or head.
"""

BLANK = -1.0
"""Stands in place of a factor, which is never negative, for a key whose K and V are zero to the kernel: it adds nothing to the
output, and exp(0) = 1 to the denominator."""


@dataclass(frozen=True)
class Tolerance:
    """How exact a reading is. The defaults are for float32.

    Read off right float32 kernels (PyTorch's, and blockwise and split ones) on all of `fixed_plans`, weights miss the right ones by
    at most 5e-7 of their sum, and log weights by at most 2e-6: float32 rounds by 6e-8, and scores are of size 1 to 10. The defaults
    leave a hundred times that, for kernels that round more; the smallest fault that is sought shifts 1e-4 of the weight.

    Attributes:
        weight: total weight of a query that may be misplaced.
        log: error of a log weight.
        least: weights below this are not told from zero: beside a weight of 1, float32 loses them.
    """

    weight: float = 5e-5
    log: float = 2e-4
    least: float = 1e-7


@dataclass(frozen=True)
class Fit:
    """A form that fits the weights of one query.

    Attributes:
        form: which one.
        keys: for a form that speaks of keys, a number for each packed key, float64 [total_k]. "keys…", "kv" and "slopes": its
            factor, or `BLANK`, or NaN if it cannot be told; "pieces": the log of its factor, NaN if it is not seen; "values" and
            "scored": the packed row of V or K in its place, counted through all kv heads (kv head * total_k + row), or -1.
        number: for a form with a parameter, its value.
        law: "bent": the function.
        source: for a form in which the query takes another's place: (packed row of q, q head).
        share: for a mixture, the share of the right weights and that of the source's.
        kv: kv head that is read.
        mass: what the weights add up to, where the denominator is not that of the keys that were counted.
        phantom: keys with a score of zero that the denominator counts too.
    """

    form: Form
    keys: Numbers | None = field(default=None, compare=False)
    number: float = 0.0
    law: Law | None = None
    source: tuple[int, int] = (0, 0)
    share: tuple[float, float] = (0.0, 0.0)
    kv: int = 0
    mass: float = 1.0
    phantom: float = 0.0


class CallContext:
    """What all rows of a call have in common: the scores and right weights of every query, read or not.

    Args:
        reading: of some queries of the call.
    """

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.call = reading.call
        self.rows: Ints = np.arange(self.call.q.shape[0])

    @cached_property
    def scores(self) -> Numbers:
        """As `Reading.scores`, of all queries."""
        return scores_of(self.call, self.rows)

    @cached_property
    def right(self) -> Numbers:
        """As `Reading.expected`, of all queries."""
        return right_weights(self.call, self.rows, self.scores)

    @cached_property
    def flat(self) -> Numbers:
        """The right weights of all queries and heads, [total_q * num_q_heads, num_kv_heads * total_k]."""
        return self.right.reshape(len(self.rows) * self.call.q.shape[1], -1)

    @cached_property
    def visible(self) -> Flags:
        """As `Reading.visible`, of all queries."""
        return visible(self.call, self.rows)

    @cached_property
    def own_keys(self) -> list[tuple[slice, slice]]:
        """See `features.own_keys`."""
        return own_keys(self.call)


@dataclass(frozen=True)
class Row:
    """The reading of one query and head.

    Attributes:
        context: of the call.
        place: of the query among those that were read.
        head: q head.
        tolerance: of the reading.
    """

    context: CallContext
    place: int
    head: int
    tolerance: Tolerance

    @property
    def row(self) -> int:
        """The packed row of q."""
        return int(self.context.reading.rows[self.place])

    @cached_property
    def weights(self) -> Numbers:
        """What was read, [num_kv_heads, total_k]."""
        found: Numbers = self.context.reading.weights[self.place, self.head]
        return found

    @cached_property
    def expected(self) -> Numbers:
        """The right weights, [num_kv_heads, total_k]."""
        found: Numbers = self.context.reading.expected[self.place, self.head]
        return found

    @cached_property
    def scores(self) -> Numbers:
        """scale * q k^T, [num_kv_heads, total_k]."""
        found: Numbers = self.context.reading.scores[self.place, self.head]
        return found

    @property
    def visible(self) -> Flags:
        """The keys that it should see, bool [total_k]."""
        found: Flags = self.context.reading.visible[self.place]
        return found

    @property
    def constant(self) -> Numbers:
        """What does not come from V, [head_dim_v]."""
        found: Numbers = self.context.reading.constant[self.place, self.head]
        return found

    @property
    def off(self) -> float:
        """See `Reading.off`."""
        return float(self.context.reading.off[self.place, self.head])

    @property
    def own(self) -> int:
        """The kv head that it should read."""
        call = self.context.call
        return call.heads.kv_head(self.head)

    @property
    def itself(self) -> tuple[int, int]:
        """(packed row of q, q head), as in `Fit.source`."""
        return self.row, self.head

    @cached_property
    def keys(self) -> slice:
        """The keys of its sequence."""
        return next(k for q, k in self.context.own_keys if q.start <= self.row < q.stop)

    def near(self, weights: Numbers) -> bool:
        """Whether these are the weights that were read, up to the tolerance."""
        return bool(np.abs(self.weights - weights).sum() <= self.tolerance.weight * max(1.0, np.abs(weights).sum()))

    def reads_also(self, kv: int) -> bool:
        """Whether kv heads besides this one have weight."""
        return float(np.abs(self.weights).sum() - np.abs(self.weights[kv]).sum()) > self.tolerance.weight

    def own_logs(self, least: int) -> tuple[Flags, Numbers] | None:
        """The keys of the own kv head with weight, bool [total_k], and the logs of these weights.

        None if there are fewer than `least`, if one of them should not be seen, or if other kv heads have weight too.
        """
        if self.reads_also(self.own):
            return None
        weights = self.weights[self.own]
        seen = weights > self.tolerance.least
        if seen.sum() < least or (seen & ~self.visible).any():
            return None
        return seen, np.log(weights[seen])
