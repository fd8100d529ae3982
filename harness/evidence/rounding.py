"""What the rounding that a candidate declares costs in an implementation that shares no code with the engine."""

from __future__ import annotations

from assay.harness.evidence.run_file import RunFile, RunRecord


class RoundingCost(RunRecord):
    """The cost of a declared rounding, measured on the reference's own weights.

    Attributes:
        declared: what is rounded, such as "activations in bfloat16".
        mean: mean KL divergence from float64, in nats, or None if it was not measured.
        worst: the largest divergence of a position, in nats.
        positions: number of positions.
        not_measured: why it was not measured, or an empty string.
    """

    declared: str = ""
    mean: float | None = None
    worst: float | None = None
    positions: int = 0
    not_measured: str = ""


ROUNDING = RunFile("rounding.json", RoundingCost)
