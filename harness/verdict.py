"""The words of a verdict: what a check, a finding and a verdict are.

An `id` is kebab-case and stable; a title is prose and may change, so nothing compares one.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from assay.harness.schema import Part

__all__ = ["Check", "CheckStatus", "Finding", "Part", "Severity", "Verdict"]

Verdict = Literal["pass", "regression", "inconclusive", "error"]
CheckStatus = Literal["ok", "failed", "missing", "not checked"]
Severity = Literal["info", "warning", "serious"]


class Check(Part):
    """One condition of a pass, and whether it was met. `missing` and `failed` forbid a pass; `not checked` does not."""

    id: str = Field(description='stable, such as "kernel-ran-extend"')
    title: str
    status: CheckStatus
    found: str
    settles: str = Field("", description="what would resolve it, where it is not ok")


class Finding(Part):
    """One thing that is wrong: where, why, on what evidence, and a command that shows it again."""

    id: str = Field(
        description='stable: the name of the bug, or of the comparison that failed, such as "mask-top-left"'
    )
    title: str
    severity: Severity
    where: str
    diagnosis: str
    evidence: tuple[str, ...]
    reproduce: str
