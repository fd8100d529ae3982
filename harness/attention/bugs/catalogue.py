"""The catalogue of seeded faults: bugs that were reported in public, and what has no report yet, each where such bugs sit.

A link is a report of a bug of the same kind; the fault is a model of it in PyTorch. For faults without a link none is known.
Equivalent faults change nothing that matters: to flag one is a false alarm.
"""

from __future__ import annotations

from assay.harness.attention.bugs import (
    blocks,
    heads,
    leaks,
    masks,
    merges,
    outputs,
    precision,
    prefixes,
    quantisation,
    scales,
)
from assay.harness.attention.bugs.seeded import SeededFault

_GROUPS = (
    masks.FAULTS, prefixes.FAULTS, masks.WINDOWS, scales.FAULTS, heads.FAULTS, merges.FAULTS, blocks.FAULTS, leaks.FAULTS,
    prefixes.NEWEST, quantisation.FAULTS, precision.FAULTS, outputs.FAULTS, outputs.EQUIVALENT,
)  # fmt: skip
CATALOGUE: dict[str, SeededFault] = {fault.id: fault for group in _GROUPS for fault in group}
"""Every seeded fault, by id."""


def public_reports(hypothesis: str) -> tuple[str, ...]:
    """Give the addresses of public reports of bugs that a hypothesis names; empty if none is known."""
    faults = (fault for fault in CATALOGUE.values() if fault.hypothesis == hypothesis)
    return tuple(dict.fromkeys(link for fault in faults for link in fault.links))
