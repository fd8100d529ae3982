"""The document that ``assay check --json`` prints."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import ConfigDict, Field

from assay.harness.offline.check import CheckResult
from assay.harness.offline.coverage import Coverage
from assay.harness.schema import RULE, Part
from assay.harness.verdict import Decided, Finding

SCHEMA: Literal["assay.check/1"] = "assay.check/1"


class CaseWhy(Part):
    """A case that was not computed, or broke the contract, and why."""

    case: str
    why: str


class LengthsCovered(Part):
    """Lengths of the computed calls of one phase: fewest and most tokens of a sequence, most sequences and keys of a call."""

    phase: str
    calls: int
    new: tuple[int, int]
    cached: tuple[int, int]
    sequences: int
    keys: int


class ReachFound(Part):
    """How far calls of one phase reach, each by itself: most new tokens of a sequence, and of one with a cached prefix; most cached
    tokens and most keys of a sequence; most sequences of a call."""

    phase: str
    new: int
    behind: int
    cached: int
    keys: int
    sequences: int


class CoreFound(Part):
    """A product of which every combination was computed, in each phase, and how far all of them reach."""

    dtypes: tuple[str, ...]
    head_dims: tuple[int, ...]
    heads: tuple[tuple[int, int], ...] = Field(description="(q heads, kv heads)")
    reach: tuple[ReachFound, ...]


class GapFound(Part):
    """Calls that were not computed, and why: "by declaration", or what the kernel or its environment said."""

    what: str
    why: str
    calls: int = Field(description="0 if the matrix has no such call")
    example: str


class CoverageFound(Part):
    """The coverage of the computed calls."""

    dtypes: tuple[str, ...]
    head_dims: tuple[int, ...]
    head_dims_v: tuple[int, ...] = Field(description="those that are not that of q and k")
    ratios: tuple[int, ...] = Field(description="q heads on each kv head")
    kv_heads: tuple[int, ...]
    layers: tuple[int, ...] = Field(description="that called")
    device: str = Field(description="type of device of the calls")
    lengths: tuple[LengthsCovered, ...]
    gaps: tuple[GapFound, ...]
    runs: int = Field(description="how many times the kernel ran")
    core: CoreFound
    beyond: tuple[str, ...] = Field(description="what single calls reach beyond the core, in words")


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
    coverage: CoverageFound
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
        coverage=_coverage(result.coverage),
        findings=result.findings,
        smallest=result.smallest,
        test=result.test,
        again=result.again,
        seconds=result.seconds,
    )


def _coverage(found: Coverage) -> CoverageFound:
    return CoverageFound(
        dtypes=found.dtypes, head_dims=found.head_dims, head_dims_v=found.head_dims_v, ratios=found.ratios,
        kv_heads=found.kv_heads, layers=found.layers, device=found.device,
        lengths=tuple(LengthsCovered(phase=phase, **vars(one)) for phase, one in (found.lengths or {}).items()),
        gaps=tuple(GapFound(**vars(gap)) for gap in found.gaps), runs=found.runs,
        core=CoreFound(
            dtypes=found.core.dtypes, head_dims=found.core.head_dims, heads=found.core.heads,
            reach=tuple(ReachFound(phase=phase, **vars(one)) for phase, one in found.core.reach.items()),
        ),
        beyond=found.beyond,
    )  # fmt: skip
