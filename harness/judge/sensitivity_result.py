"""The part of a report on a seeded fault: which suites of the run saw it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from assay.harness.schema import Part

Suite = Literal["mmlu", "logits", "layers"]
SUITES: tuple[Suite, ...] = ("mmlu", "logits", "layers")
"""Suites that have to see the fault."""


class FaultSeen(Part):
    """A suite's answer to whether it saw a fault, with the numbers."""

    suite: Suite
    seen: bool
    found: str = Field(description='such as "7 of 8 questions lost, p = 0.01"')


class SensitivityResult(Part):
    """The suites' answers to whether they saw a fault that was seeded in the running servers."""

    fault: str = Field(description="id of the fault")
    parts: tuple[FaultSeen, ...]

    @property
    def sentence(self) -> str:
        """The suites that saw it, in words."""
        return f"{self.fault}: " + "; ".join(
            f"{'seen' if part.seen else 'not seen'} by {part.suite} ({part.found})" for part in self.parts
        )
