"""The document that ``assay check --json`` prints."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import ConfigDict, Field

from assay.harness.offline.check_result import CheckResult
from assay.harness.offline.coverage import Coverage
from assay.harness.schema import RULE, Part
from assay.harness.verdict import Decided, Finding

SCHEMA: Literal["assay.check/1"] = "assay.check/1"


class CaseWhy(Part):
    """A case that was not computed, or broke the contract, and why."""

    case: str
    why: str


class CheckDocument(Decided):
    __doc__ = f"A kernel's result on the op-level matrix. {RULE}"

    schema_id: Literal["assay.check/1"] = Field(SCHEMA, alias="schema")
    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    kernel: str
    headline: str
    calls: int = Field(description="cases that it computed or broke")
    failing: tuple[str, ...] = Field(description="names of the cases that are out of bounds or broken")
    where: str = Field(
        description="values of at most two axes that cover all failing cases and no correct one; empty if there are none, or if "
        "what was read off the kernel tells which cases fail"
    )
    worst_own: float | None = Field(
        description="relative L1 of the worst case; null if none was computed or it is not finite"
    )
    worst_bound: float | None
    broken: tuple[CaseWhy, ...]
    refused: tuple[CaseWhy, ...]
    excluded: tuple[CaseWhy, ...]
    missing: tuple[str, ...] = Field(description="requirements of a pass that were not tested")
    coverage: Coverage
    findings: tuple[Finding, ...]
    smallest: str
    test: str = Field(description="source of a pytest file that shows the smallest failing call; may be empty")
    again: str
    seconds: float


def document_of(result: CheckResult, headline: str) -> CheckDocument:
    """Make the document of a result, with the sentence that a report puts over it."""
    worst = result.worst

    def why(pairs: tuple[tuple[object, str], ...]) -> tuple[CaseWhy, ...]:
        return tuple(CaseWhy(case=str(getattr(case, "name", case)), why=text) for case, text in pairs)

    return CheckDocument(
        verdict=result.verdict,
        kernel=result.kernel,
        headline=headline,
        calls=len(result.computed) + len(result.broken),
        failing=tuple(case.name for case in result.failing),
        where=result.where,
        worst_own=worst.own if worst and math.isfinite(worst.own) else None,
        worst_bound=worst.bound if worst else None,
        broken=why(result.broken),
        refused=why(result.refused),
        excluded=why(result.excluded),
        missing=result.missing,
        coverage=result.coverage,
        findings=result.findings,
        smallest=result.smallest,
        test=result.test,
        again=result.again,
        seconds=result.seconds,
    )
