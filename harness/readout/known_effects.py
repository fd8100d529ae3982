"""Known bugs as effects: every hypothesis, and numbers that are rounded though nobody declared it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch

from assay.harness.attention.bugs import Change
from assay.harness.attention.fault_effects import denominator_rounded, keys_rounded, scores_rounded, weights_rounded
from assay.harness.attention.hypotheses import FAMILY, Compute, changed_output
from assay.harness.localize.reading import Numbers
from assay.harness.readout.operators import Effect
from assay.harness.readout.queries import Queries


@dataclass(frozen=True)
class Known(Effect):
    """The effect of a known bug.

    Attributes:
        id: of the hypothesis, or of a rounding.
        about: what goes wrong, as a sentence without its full stop.
        compute: (call, rows) -> output.
    """

    id: str
    about: str
    compute: Compute = field(compare=False)
    cost: float = 3.0

    def outputs(self, queries: Queries) -> Numbers:
        out = self.compute(queries.call, torch.from_numpy(queries.rows).to(queries.call.q.device))
        if out is None:
            return queries.right
        found: Numbers = out.double().cpu().numpy()
        return found


_FORMATS = (
    (torch.float8_e4m3fn, "FP8 E4M3"),
    (torch.float8_e5m2, "FP8 E5M2"),
    (torch.bfloat16, "bfloat16"),
    (torch.float16, "float16"),
)
"""The formats in which kernels keep Q, K, V, scores and weights."""
_INPUTS = (
    ("q", "Q is"), ("k", "K is"), ("v", "V is"), ("kv", "K and V are"), ("qk", "Q and K are"), ("qkv", "Q, K and V are")
)  # fmt: skip
"""What is rounded together: one input, the KV cache, what is multiplied first, or all."""
_ROUNDING_COST = 3.5
"""More than that of a hypothesis: on calls without much cancellation, one rounding is much like another."""


def known_effects() -> list[Known]:
    """The effects of all hypotheses, and of roundings that nobody declared."""
    found = [Known(one.id, one.about, one.compute) for one in FAMILY]
    for dtype, name in _FORMATS:
        for what, words in _INPUTS:
            found.append(
                _rounding(f"rounded-{what}-{name}", f"{words} rounded to {name}", partial(keys_rounded, dtype, what))
            )
        found += [
            _rounding(f"rounded-p-{name}", f"softmax weights are rounded to {name}", partial(weights_rounded, dtype)),
            _rounding(
                f"rounded-s-{name}", f"scores are rounded to {name} before the softmax", partial(scores_rounded, dtype)
            ),
        ]
    found.append(
        _rounding("rounded-sum-bfloat16", "the softmax denominator is accumulated in bfloat16", denominator_rounded)
    )
    return found


def _rounding(id: str, about: str, change: Change) -> Known:
    return Known(id, about, partial(changed_output, change), cost=_ROUNDING_COST)
