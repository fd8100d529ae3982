"""The result for a kernel that ended its process before its check had come to an end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from assay.harness.attention.matrix import Case
from assay.harness.evidence.cause import ReplayResult
from assay.harness.offline.check_result import CheckResult, WorstOfMatrix
from assay.harness.text import percent
from assay.harness.verdict import UNEXPLAINED, Finding, serious, with_evidence


@dataclass(frozen=True)
class Known:
    """The record that a process left whose kernel ended it.

    Attributes:
        how: how it ended, for example "was killed by SIGABRT".
        call: the call that the kernel had begun, in words; empty if it was computing none.
        computed: cases that were computed: by name, whether out of bounds, own error and bound of the worst cell and head.
        result: the result as it stood; None if the matrix was not yet done.
        asked: the kernel's name, the cases of its check, and a command that repeats it; None if it ended before, or was no check.
    """

    how: str
    call: str
    computed: tuple[tuple[str, bool, float, float], ...] = ()
    result: CheckResult | ReplayResult | None = None
    asked: tuple[str, Sequence[Case], str] | None = None

    @property
    def end(self) -> str:
        """The way in which the process ended, and where."""
        return f"{self.how} {f'in {self.call}' if self.call else 'outside of a call'}"

    @property
    def asked_for_more(self) -> str:
        """The same of a process that ended after its kernel's result was known."""
        return f"asked for more, the process of the kernel {self.end}"


def interrupted(known: Known) -> CheckResult:
    """Make the result of a check whose process the kernel ended, once it was known what was asked.

    If the matrix was done, its verdict stands. If not, the calls before the end count: the kernel is wrong if one of them is, and
    else there is no verdict.

    Args:
        known: what the process left, with what it was asked.
    """
    assert known.asked is not None
    kernel, cases, again = known.asked
    if isinstance(known.result, CheckResult):
        result = known.result
        if not serious(result.findings):
            return replace(result, missing=(*result.missing, known.asked_for_more))
        return replace(result, findings=tuple(with_evidence(result.findings, known.asked_for_more)))
    by_name = {case.name: case for case in cases}
    done = [record for record in known.computed if record[0] in by_name]
    computed = tuple(by_name[name] for name, _, _, _ in done)
    wrong = tuple(by_name[name] for name, fails, _, _ in done if fails)
    worst = max(
        (WorstOfMatrix(by_name[name], own, bound) for name, _, own, bound in done),
        key=lambda worst: worst.ratio,
        default=None,
    )
    extent = f"{len(done)} of {len(cases)} calls were computed before"
    findings = []
    if worst is not None and wrong:
        findings.append(
            Finding(
                id=UNEXPLAINED, title="unexplained error", severity="serious", where=f"{len(wrong)} of {len(done)} calls",
                diagnosis="the output is out of bounds; the process ended before it was known why",
                evidence=(
                    f"the worst own error is {percent(worst.own)} (noise explains {percent(worst.bound)}): {worst.case.name}",
                    f"the process of the kernel {known.end}; {extent}",
                ),
                reproduce=again,
            )
        )  # fmt: skip
    return CheckResult(
        kernel=kernel, computed=computed, wrong=wrong, worst=worst, refused=(), excluded=(), broken=(),
        missing=(f"the process of the kernel {known.end}; {extent}",), findings=tuple(findings), smallest="", test="",
        again=again, seconds=0.0,
    )  # fmt: skip


def interrupted_replay(result: ReplayResult, known: Known) -> ReplayResult:
    """Make the result of a replay as it stood when the kernel ended its process."""
    if not serious(result.findings):
        return result
    return result.model_copy(update={"findings": tuple(with_evidence(result.findings, known.asked_for_more))})
