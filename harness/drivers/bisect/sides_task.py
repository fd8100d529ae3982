"""What a bisection of two sides asks, measures and finds, and its folder."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from assay.harness.config import RUN_FLAGS, RunSpec
from assay.harness.drivers.bisect import SCHEMA, Outcome
from assay.harness.drivers.bisect.sides_search import Searched
from assay.harness.errors import ExitCode
from assay.harness.schema import Record
from assay.harness.sides import Device, Side, hide
from assay.harness.statement import Statement, state
from assay.harness.text import clip
from assay.harness.verdict import Finding

Evidence = Literal["fingerprint", "logits", "texts", "answers"]
"""What a probe was judged by, the cheapest first."""
EVIDENCE: tuple[Evidence, ...] = ("logits", "texts", "answers")


Kind = Literal["backend", "flag", "variable", "interpreter", "package", "config", "file"]
# Most characters of a value that a name shows.
_SHOWN = 40


class Difference(Record):
    """One difference between two sides: `before` is the reference's value or "", `after` the candidate's."""

    kind: Kind
    name: str
    before: str = ""
    after: str = ""

    @property
    def label(self) -> str:
        """The difference as a person names it: "--page-size=64", "transformers 5.2.0 -> 5.3.0", "config.json: rope_theta"."""
        before, after = (clip(hide(self.name, value), _SHOWN) for value in (self.before, self.after))
        if self.kind in ("flag", "variable"):
            name = f"environment.{self.name}" if self.kind == "variable" else self.name
            return f"{name}={after}" if after not in ("", "true") else name if after else f"without {name}"
        if self.kind == "file":
            return self.name
        if before == after:
            return f"{self.name} {before}, other content"
        return f"{self.name} {before or 'absent'} -> {after or 'absent'}"


class SidesProbe(Record):
    """One probe: the reference with some differences, compared with the reference."""

    applied: tuple[str, ...] = Field(description="the differences, as they are named")
    outcome: Outcome
    by: Evidence | None = Field(None, description="what decided; null if nothing did")
    value: float | None = Field(
        None,
        description="what was measured: mean KL in nats, share of texts that differ by more than noise, loss of accuracy",
    )
    limit: float | None = Field(None, description="the largest such value that is no loss")
    problem: str = Field("", description="why it cannot be said whether these differences break anything")
    seconds: float = 0.0


class SidesQuestion(Record):
    """``question.json``: what a folder's probes belong to."""

    schema_id: Literal["assay.bisect/7"] = Field(SCHEMA, alias="schema")
    run: str = Field(description="nonce of the evidence")
    spec: dict[str, Any]
    differences: tuple[str, ...]


class SidesBisection(Record):
    """``bisect.json``: the differences between two sides, and the smallest sets of them that break the candidate."""

    schema_id: Literal["assay.bisect/7"] = Field(SCHEMA, alias="schema")
    outcome: Literal["found", "nothing", "inconclusive"]
    why: Statement
    reference: Side
    candidate: Side
    device: Device
    differences: tuple[Difference, ...]
    left_out: tuple[str, ...] = Field((), description="packages of the reference alone, which stay in every probe")
    sets: tuple[tuple[str, ...], ...] = Field(
        (), description="each breaks the candidate; several differences in one do so only together"
    )
    steady: bool = Field(True, description="whether no set came out both ways")
    probes: tuple[SidesProbe, ...]
    findings: tuple[Finding, ...] = ()
    reproduce: str = Field(description="the command that repeats the bisection")
    seconds: float

    @property
    def exit_code(self) -> ExitCode:
        """1 if differences are named, 0 if all of them together break nothing, 3 if undecided."""
        codes = {"found": ExitCode.REGRESSION, "nothing": ExitCode.PASS, "inconclusive": ExitCode.NO_VERDICT}
        return codes[self.outcome]


def command_of(spec: RunSpec) -> str:
    """Return the run that compares two sides."""
    return shlex.join(["assay", "run", *spec.given_flags(RUN_FLAGS)])


def findings_of(
    searched: Searched, differences: Mapping[str, Difference], probes: Sequence[SidesProbe], commands: Sequence[str]
) -> tuple[Finding, ...]:
    """Make the finding of each set of differences, with its probes and the run that shows it."""
    findings = []
    for names, command in zip(searched.sets, commands, strict=True):
        of_set = [probe for probe in probes if set(probe.applied) == set(names) and probe.outcome == "bad"]
        shown = [
            state("broken-by-differences", by=probe.by, value=probe.value, limit=probe.limit, differences=len(names))
            for probe in of_set[:1]
        ]
        parts = [probe for probe in probes if probe.applied and set(probe.applied) < set(names)]
        shown += [
            state("part-of-differences", differences=list(probe.applied), outcome=probe.outcome, problem=probe.problem)
            for probe in {probe.applied: probe for probe in parts}.values()
        ]
        findings.append(
            Finding(
                id="differences-break-candidate",
                title="differences that break the candidate",
                severity="serious",
                where=", ".join(names),
                claim=state(
                    "differences-break-candidate",
                    together=len(names) > 1,
                    kinds=sorted({differences[n].kind for n in names}),
                ),
                shown_by=tuple(shown),
                reproduce=command,
            )
        )
    return tuple(findings)
