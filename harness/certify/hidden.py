"""Faults hidden by the noise that the certified kernel declares: measured apart from everything that is to find them.

The bounds of a check are left out on purpose: if they were far too wide, they would hide every fault.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from assay.harness.bugs.seeded import SeededFault
from assay.harness.certify.footprint import WideCall
from assay.harness.evidence.certificate import HIDDEN
from assay.harness.localize.bounds import noise_on
from assay.harness.localize.cells import cells_of, deviation


def largest_effect(fault: SeededFault, calls: Sequence[WideCall], noise: str) -> float | None:
    """Compute what a fault alone changes, in multiples of a noise family's cost: the largest over all calls' cells and heads.

    The change is the relative L1 between the outputs with and without the fault in float64; what the family costs is the root mean
    square of the relative L1 of its honest implementations.

    Args:
        fault: the fault.
        calls: the calls, in their order.
        noise: the noise family; empty for rounding alone, which is to hide nothing.

    Returns:
        At least 0, and infinite where the fault changes what costs nothing; None without a noise family, or if the fault changes no
        output of these calls.
    """
    if not noise:
        return None
    fault.restart()
    largest = 0.0
    for call in calls:
        limits = noise_on(call.narrow, noise, cells_of(call.narrow))
        changed = deviation(fault.apply(call.call, call.out), call.out, limits.cells).relative_l1
        if bool(changed.any()):
            ratio = torch.where(changed > 0, changed / limits.ensemble.noise, 0.0)
            largest = max(largest, float(ratio.max()))
    return largest or None


def hidden_words(effect: float | None, noise: str) -> str:
    """Describe an effect; empty for None."""
    if effect is None:
        return ""
    hides = "hidden by it" if effect <= HIDDEN else f"it hides up to {HIDDEN:g} times"
    return f"; changes a cell by at most {effect:.2g} times what the noise of {noise} costs there ({hides})"
