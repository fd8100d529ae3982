"""The words of a verdict: what a check, a finding and a verdict are.

An `id` is kebab-case and stable; a title is prose and may change, so nothing compares one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from pydantic import Field, computed_field, model_validator

from assay.harness.errors import ExitCode
from assay.harness.picture import Picture
from assay.harness.schema import Part
from assay.harness.text import one_line

Verdict = Literal["pass", "regression", "inconclusive", "error"]
CheckStatus = Literal["ok", "failed", "missing", "not checked"]
Severity = Literal["info", "warning", "serious"]
OPERATOR_SHOWN = 160
"""Most characters of an operator in a headline or a title."""
WORST_FIRST: tuple[Verdict, ...] = ("regression", "error", "inconclusive", "pass")
"""Verdicts in the order in which one of them stands for several."""


UNEXPLAINED = "unexplained"
"""Id of the finding that an output is wrong in a way that no hypothesis explains."""
CONTRACT_BROKEN = "contract-broken"
"""Id of the finding that a kernel broke its contract."""
OPERATOR = "operator"
"""Id of the finding that a kernel computes an operator that was read and has no name."""


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
    """Find the first serious finding; None if there is none.

    What it does is complete: with the operator that was read if the bug has no name, and with the only calls in which it shows.

    Args:
        findings: of a run or a check, in their order; those of the layer diff come before those of the op-level matrix.
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
        """The exit code of the command: it follows from the verdict."""
        return int(exit_code_of(self.verdict))

    @model_validator(mode="before")
    @classmethod
    def _without_exit_code(cls, data: Any) -> Any:
        """Drop the exit code of a document that was read: it is computed."""
        return {key: value for key, value in data.items() if key != "exit_code"} if isinstance(data, dict) else data


class Check(Part):
    """One requirement of a pass, and whether it was met. `missing` and `failed` forbid a pass; `not checked` does not."""

    id: str = Field(description='stable, such as "kernel-ran-extend"')
    title: str = Field(description="what is the case, by the status")
    status: CheckStatus
    found: str
    settles: str = Field("", description="what would resolve it, where it is not ok")


@dataclass(frozen=True)
class Requirement:
    """A requirement of a pass, with what is the case by the outcome of its check, each a clause.

    Attributes:
        id: of its check.
        ok: what is required.
        failed: of a check that shows that it is not met; by default as `missing`.
        missing: of one that does not show that it is met; by default it says so.
        unchecked: of one that does not look; by default it says so.
        part: what it is required of, such as a phase; empty for a requirement without parts.
        sides: names of the two sides, which clauses may use.
    """

    id: str
    ok: str
    failed: str = ""
    missing: str = ""
    unchecked: str = ""
    part: str = ""
    sides: tuple[str, str] = ("the reference", "the candidate")

    def of(self, part: str, title: str = "") -> Requirement:
        """Return the same requirement of a part, such as a phase; the title names it by `title`, or by its id."""
        return replace(self, id=f"{self.id}-{part}", part=title or part)

    def check(self, status: CheckStatus, found: str, settles: str = "") -> Check:
        """Make its check, whose title says how it came out.

        Args:
            status: whether it was met.
            found: what was found.
            settles: what would resolve it; left out where it is met.
        """
        missing = self.missing or f"it is not shown that {self.ok}"
        clause = {
            "ok": self.ok,
            "failed": self.failed or missing,
            "missing": missing,
            "not checked": self.unchecked or f"it was not checked that {self.ok}",
        }[status]
        title = clause.format(reference=self.sides[0], candidate=self.sides[1]) + (
            f": {self.part}" if self.part else ""
        )
        return Check(id=self.id, title=title, status=status, found=found, settles="" if status == "ok" else settles)

    def met(self, met: bool, found: str, settles: str) -> Check:
        """Make its check, which is missing if it was not met."""
        return self.check("ok" if met else "missing", found, settles)


class Finding(Part):
    """One thing that is wrong: where, why, on what evidence, and a command that reproduces it."""

    explained: ClassVar[bool] = True
    """Whether ``assay explain`` has a page for the id."""

    id: str = Field(
        description='stable: the name of the bug, or of the comparison that failed, such as "mask-top-left"'
    )
    title: str
    severity: Severity
    where: str
    only: str = Field(
        "",
        description='values of the axes of a matrix outside of which it does not show, such as "head_dim is 128"; empty if there '
        "are none, or if what was read tells where it shows",
    )
    diagnosis: str
    does: str = Field(
        "",
        description='what the kernel does and when, in words that follow its name, such as "applies a top-left causal mask once a '
        'prefix is cached"; the diagnosis then states where; empty for findings that are no bug of a kernel',
    )
    evidence: tuple[str, ...]
    reproduce: str
    equivalent: tuple[str, ...] = Field(
        (), description="ids of further hypotheses that explain the same calls as well as `id` does"
    )
    operator: str = Field("", description="what the kernel was observed to compute, in words; empty if it was not read")
    picture: Picture | None = Field(
        None,
        description="the weights of the smallest telling call: expected, read, and what differs; null if there is none",
    )

    @property
    def sentence(self) -> str:
        """The diagnosis and the place, with one full stop at the end."""
        text = self.diagnosis if self.does else f"{self.where}: {self.diagnosis}"
        text = f"Only where {self.only}: {text}" if self.only else text
        return f"{text.rstrip('.')}."

    @property
    def observed(self) -> str:
        """The operator that the kernel was observed to compute, unless the diagnosis states it; empty if nothing is to be added."""
        return "" if self.operator in self.diagnosis else self.operator
