"""The vocabulary of a verdict: checks, findings and verdicts.

An `id` is kebab-case and stable; a title is prose and may change, so nothing compares one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from pydantic import Field, computed_field, model_validator

from assay.harness.errors import ExitCode
from assay.harness.picture import Picture
from assay.harness.schema import Part, page_in_notebook
from assay.harness.statement import Statement, Worded
from assay.harness.text import one_line

Verdict = Literal["pass", "regression", "inconclusive", "error"]
CheckStatus = Literal["ok", "failed", "missing", "not checked"]
Severity = Literal["info", "warning", "serious"]
OPERATOR_SHOWN = 160
"""Most characters of an operator in a headline or a title."""
WORST_FIRST: tuple[Verdict, ...] = ("regression", "error", "inconclusive", "pass")
"""Verdicts, worst first: the first one that occurs stands for all."""


UNEXPLAINED = "unexplained"
"""Id of the finding that an output is wrong in a way that no hypothesis explains."""
CONTRACT_BROKEN = "contract-broken"
"""Id of the finding that a kernel broke its contract."""
OPERATOR = "operator"
"""Id of the finding that a kernel computes an operator that was inferred but has no name."""


def exit_code_of(verdict: Verdict) -> ExitCode:
    """Return the exit code of a command that ends with a verdict."""
    return {"pass": ExitCode.PASS, "regression": ExitCode.REGRESSION}.get(verdict, ExitCode.NO_VERDICT)


def serious(findings: Iterable[Finding]) -> list[Finding]:
    """List the findings that forbid a pass: those more severe than "info"."""
    return [finding for finding in findings if finding.severity != "info"]


def with_evidence(findings: Sequence[Finding], *lines: str, **changes: object) -> list[Finding]:
    """Add lines to the evidence of the first serious finding, and change other fields of it; return all findings."""
    first = next(iter(serious(findings)), None)
    if first is None:
        return list(findings)
    changed = first.model_copy(update={"evidence": (*first.evidence, *lines)} | changes)
    return [changed if finding is first else finding for finding in findings]


def cause_of(findings: Sequence[Finding]) -> Finding | None:
    """Find the first serious finding, or None.

    Its `does` is complete: it includes the inferred operator if the bug has no name, and the only calls that show the bug.

    Args:
        findings: of a run or a check, in their order; the layer diff's come before the op-level matrix's.
    """
    wrong = serious(findings)
    if not wrong:
        return None
    cause = wrong[0]
    if not cause.does:
        return cause
    words = cause.does
    if cause.id in (UNEXPLAINED, OPERATOR) and cause.operator:
        words = f"{words}: {one_line(cause.operator, OPERATOR_SHOWN)}"
    return cause.model_copy(update={"does": f"{words}, only where {cause.only}" if cause.only else words})


def kernel_verdict(findings: Iterable[Finding], missing: Collection[str]) -> Verdict:
    """Decide the verdict on a kernel that was run without a server.

    Args:
        findings: what is wrong with it.
        missing: requirements of a pass that were not tested.
    """
    if serious(findings):
        return "regression"
    return "inconclusive" if missing else "pass"


class Decided(Part):
    """Base of every result that has a verdict."""

    verdict: Verdict

    @computed_field(description="0 pass, 1 regression, 3 no verdict")  # type: ignore[prop-decorator]
    @property
    def exit_code(self) -> int:
        """The exit code of the command, which follows from the verdict."""
        return int(exit_code_of(self.verdict))

    @model_validator(mode="before")
    @classmethod
    def _without_exit_code(cls, data: Any) -> Any:
        """Drop the exit code of a document that was read, since it is computed."""
        return {key: value for key, value in data.items() if key != "exit_code"} if isinstance(data, dict) else data

    _repr_html_ = page_in_notebook

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.verdict}{f': {self._about}' if self._about else ''}>"

    def __str__(self) -> str:
        return repr(self)

    @property
    def _about(self) -> str:
        """Say for `repr` what this is the result of."""
        return ""


class Check(Worded):
    """One requirement of a pass, and whether it was met. `missing` and `failed` forbid a pass; `not checked` does not."""

    words: ClassVar[tuple[str, ...]] = ("title", "found", "settles")

    id: str = Field(description='stable: the requirement and its part, such as "kernel-ran-extend"')
    requirement: str = Field(description='such as "kernel-ran"')
    part: str = Field("", description='its subject, such as "extend"; empty for a requirement without parts')
    sides: tuple[str, str] = Field(("the reference", "the candidate"), description="names of the two sides")
    status: CheckStatus
    outcome: Statement = Field(description="what was found")


@dataclass(frozen=True)
class Requirement:
    """A requirement of a pass, whose check states the outcome. `assay.reports.wording.requirements` has its titles.

    Attributes:
        id: id of its check.
        part: its subject, such as a phase; empty for a requirement without parts.
        shown: the part as it appears in titles.
        sides: names of the two sides.
    """

    id: str
    part: str = ""
    shown: str = ""
    sides: tuple[str, str] = ("the reference", "the candidate")

    def of(self, part: str, shown: str = "") -> Requirement:
        """Return the same requirement for a part, such as a phase; titles name it as `shown`, or by its id."""
        return replace(self, part=part, shown=shown or part)

    def check(self, status: CheckStatus, outcome: Statement) -> Check:
        """Make its check, with the outcome."""
        return Check(
            id=f"{self.id}-{self.part}" if self.part else self.id,
            requirement=self.id, part=self.shown, sides=self.sides, status=status, outcome=outcome,
        )  # fmt: skip

    def met(self, met: bool, outcome: Statement) -> Check:
        """Make its check, which is missing if it was not met."""
        return self.check("ok" if met else "missing", outcome)


class Finding(Part):
    """One defect: where, why, on what evidence, and a command that reproduces it."""

    explained: ClassVar[bool] = True
    """Whether ``assay explain`` has a page for the id."""

    id: str = Field(
        description='stable: the name of the bug, or of the comparison that failed, such as "mask-top-left"'
    )
    title: str
    severity: Severity
    where: str
    only: str = Field("", description='the only condition under which tests showed it, such as "head_dim is 128"')
    diagnosis: str = Field("", description="the diagnosis, or empty if `claim` states it")
    does: str = Field(
        "",
        description='the bug and its condition, as a predicate of the kernel, such as "applies a top-left causal mask once a '
        'prefix is cached"; the diagnosis then states where. Empty for findings other than bugs',
    )
    evidence: tuple[str, ...] = ()
    reproduce: str
    equivalent: tuple[str, ...] = Field(
        (), description="ids of further hypotheses that explain the same calls as well as `id` does"
    )
    operator: str = Field(
        "", description="what the kernel was observed to compute, as text, or an empty string if it was not probed"
    )
    claim: Statement | None = Field(None, description="what is wrong, as numbers; null if `diagnosis` says it")
    shown_by: tuple[Statement, ...] = Field((), description="further evidence, as numbers")
    picture: Picture | None = Field(
        None,
        description="the weights of the smallest telling call: expected, observed, and their difference; null if not measured",
    )

    @property
    def sentence(self) -> str:
        """The diagnosis and the place, with one full stop at the end."""
        text = self.diagnosis if self.does else f"{self.where}: {self.diagnosis}"
        text = f"Only where {self.only}: {text}" if self.only else text
        text = f"Not in the catalogue, but inferred by probing: {text}" if self.id == OPERATOR else text
        return f"{text.rstrip('.')}."

    @property
    def observed(self) -> str:
        """The operator that the kernel was observed to compute, or an empty string if the diagnosis states it already."""
        return "" if self.operator in self.diagnosis else self.operator
