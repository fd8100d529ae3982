"""The result of a check, and the document that ``assay check --json`` prints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import ConfigDict, Field

from assay.harness.attention.matrix import Case
from assay.harness.errors import ExitCode
from assay.harness.evidence.op_matrix import CaseWhy, MatrixResult
from assay.harness.localize import axes
from assay.harness.offline.coverage import NOTHING, Coverage
from assay.harness.schema import RULE
from assay.harness.text import percent, two_digits
from assay.harness.verdict import Decided, Finding, KernelResult, cause_of

if TYPE_CHECKING:  # what reads a wrong kernel is loaded for one
    from assay.harness.offline.observed import ReadOut

LEAST_COVERED = 0.9
"""Share of the calls of each phase that a kernel must compute, rather than refuse, to pass. What it does not support belongs in
its declaration: there it is a statement, and not a matter of what happened to be refused."""


SCHEMA: Literal["assay.check/1"] = "assay.check/1"


class CheckDocument(MatrixResult, Decided):
    __doc__ = f"A kernel's result on the op-level matrix, and what its calls cover. {RULE}"

    schema_id: Literal["assay.check/1"] = Field(SCHEMA, alias="schema")
    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True, ser_json_inf_nan="null")

    headline: str
    coverage: Coverage


@dataclass(frozen=True)
class WorstOfMatrix:
    """The case with the largest own error relative to its bound.

    Attributes:
        case: the case.
        own: own error of the cell and head that is worst relative to its bound, relative L1.
        bound: the bound of that cell and head, relative L1.
    """

    case: Case
    own: float
    bound: float

    @property
    def ratio(self) -> float:
        """The own error as a multiple of the bound; above 1 it is out of bounds."""
        return self.own / self.bound


@dataclass(frozen=True, repr=False)
class CheckResult(KernelResult):
    """A kernel's result on a matrix.

    Attributes:
        kernel: its name, as given.
        computed: cases that it computed.
        wrong: those of them whose own error is out of bounds.
        worst: the case with the largest own error relative to its bound; None if none was computed.
        refused: cases that it refused, with its reasons: not covered. A pass needs `LEAST_COVERED` of the calls of each phase, and
            every value of every axis, of those that it claims. Where it raised on every call with a value that it does not claim
            (`Case.beyond`), that is no more than a refusal.
        excluded: cases that its declaration excludes, and by what, for example "head_dim 80": not run, and not covered.
        broken: cases in which it raised, or returned a shape or dtype that breaks the contract.
        missing: conditions of a pass that were not tested.
        findings: what is wrong, named where a hypothesis fits.
        smallest: the smallest failing call found, in words; empty if none is out of bounds.
        test: the source of a pytest file that shows it; empty if there is none.
        again: a command that repeats the check; empty for a kernel that no command can name.
        seconds: time taken.
        read_out: what was read off the kernel, in how many calls and seconds; None where nothing is serious, or it was not to be
            read. The first serious finding states it.
        coverage: what the computed cases cover, and the gaps.
        traceback: of the first exception that the kernel raised, from its own first frame on; empty if it raised none.
        left_out: cases of the small matrix that were not run, as the kernel was clearly wrong before.
    """

    kernel: str
    computed: tuple[Case, ...]
    wrong: tuple[Case, ...]
    worst: WorstOfMatrix | None
    refused: tuple[tuple[Case, str], ...]
    excluded: tuple[tuple[Case, str], ...]
    broken: tuple[tuple[Case, str], ...]
    missing: tuple[str, ...]
    findings: tuple[Finding, ...]
    smallest: str
    test: str
    again: str
    seconds: float
    read_out: ReadOut | None = None
    coverage: Coverage = NOTHING
    traceback: str = ""
    left_out: tuple[Case, ...] = ()

    def summary(self) -> str:
        """Summarise in a sentence: what the kernel does wrong if known, how many calls are wrong, and the worst own error."""
        cause = cause_of(self.findings)
        return self.extent(cause.does if cause else "")

    def extent(self, does: str = "") -> str:
        """Write `summary` with other words for what the kernel does wrong; empty to leave them out."""
        tried = len(self.computed) + len(self.broken)
        if self.exit_code == ExitCode.NO_VERDICT:
            verdict = f"No verdict on {self.kernel}: requirements of a pass were not tested"
        elif self.exit_code == ExitCode.PASS:
            verdict = f"{self.kernel} is correct on all {tried} calls"
        elif self.failing:
            of = f"the first {tried} of {tried + len(self.left_out)}" if self.left_out else f"{tried}"
            wrong = f"wrong on {len(self.failing)} of {of} calls"
            verdict = f"{self.kernel} {does}; {wrong}" if does else f"{self.kernel} is {wrong}"
        else:
            verdict = f"{self.kernel} is within its bounds on all {tried} calls, but has serious findings"
        worst = self.worst
        if worst is None:
            return verdict
        if not math.isfinite(worst.own):
            return f"{verdict}; an output is not finite"
        times = f"{two_digits(worst.ratio)} times its bound of {percent(worst.bound)}"
        return f"{verdict}; worst own error {percent(worst.own)}, {times}"

    def record(self) -> MatrixResult:
        """Return what is written of it."""
        worst = self.worst
        return MatrixResult(
            kernel=self.kernel, calls=len(self.computed) + len(self.broken), failing=tuple(case.name for case in self.failing),
            where=self.where, worst_own=worst.own if worst else None, worst_bound=worst.bound if worst else None,
            broken=_why(self.broken), refused=_why(self.refused), excluded=_why(self.excluded), missing=self.missing,
            findings=self.findings, smallest=self.smallest, test=self.test, again=self.again, seconds=self.seconds,
        )  # fmt: skip

    def document(self, headline: str) -> CheckDocument:
        """Return the document, with the sentence that a report puts over it."""
        return CheckDocument(**dict(self.record()), verdict=self.verdict, headline=headline, coverage=self.coverage)

    @property
    def failing(self) -> list[Case]:
        """Cases that are out of bounds or broken."""
        return [*self.wrong, *(case for case, _ in self.broken)]

    @property
    def right(self) -> list[Case]:
        """Cases within their bounds."""
        wrong = {case.name for case in self.wrong}
        return [case for case in self.computed if case.name not in wrong]

    @property
    def axes(self) -> list[axes.Axis]:
        """Results by each axis of the matrix."""
        return axes.by_axis(conditions_of(self.failing), conditions_of(self.right), conditions_of(self.left_out))

    @property
    def where(self) -> str:
        """Values of at most two axes that cover all failing cases and no correct one; empty if there are none, or if what was read
        off the kernel tells which cases fail.
        """
        if self.read_out is not None and self.read_out.whole:
            return ""
        return axes.words(
            axes.confining(conditions_of(self.failing), conditions_of(self.right), conditions_of(self.left_out))
        )


def _why(cases: Sequence[tuple[Case, str]]) -> tuple[CaseWhy, ...]:
    return tuple(CaseWhy(case=case.name, why=why) for case, why in cases)


def conditions_of(cases: Sequence[Case]) -> list[axes.Conditions]:
    """List the conditions of cases."""
    return [case.condition for case in cases]
