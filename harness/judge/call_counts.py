"""Counted attention calls -> their summary in a report."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from assay.harness.evidence.counters import CallCount
from assay.harness.schema import Part


class CallSummary(Part):
    """Attention calls that were counted in a server, by kernel and phase."""

    phase: str
    kernel: str
    backend: str
    delegated_by: str = Field(
        "", description="the backend that handed these calls on, or empty if the engine called it"
    )
    calls: int
    calls_with_cached_prefix: int
    calls_in_graphs: int = Field(0, description="calls inside CUDA graphs, counted at each replay on the device")
    calls_compiled: int = Field(0, description="calls from code of torch.compile")
    layers: int = Field(description="number of layers in which it was called")


def call_summaries(counts: Sequence[CallCount]) -> tuple[CallSummary, ...]:
    """Sum the counts with and without a cached prefix, by phase and kernel."""
    groups: dict[tuple[str, str, str, str], list[CallCount]] = {}
    for count in counts:
        groups.setdefault((count.phase, count.kernel, count.backend, count.delegated_by), []).append(count)
    return tuple(
        CallSummary(
            phase=phase,
            kernel=kernel,
            backend=backend,
            delegated_by=delegated_by,
            calls=sum(c.calls for c in group),
            calls_with_cached_prefix=sum(c.calls for c in group if c.cached_prefix),
            calls_in_graphs=sum(c.calls for c in group if c.captured),
            calls_compiled=sum(c.calls for c in group if c.compiled),
            layers=len({layer for c in group for layer in c.calls_by_layer}),
        )
        for (phase, kernel, backend, delegated_by), group in sorted(groups.items(), reverse=True)
    )
