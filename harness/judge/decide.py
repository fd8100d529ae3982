"""The verdict: those of the suites and the checks -> `Judgement`."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from assay.harness.evidence.manifest import Failure
from assay.harness.schema import Part
from assay.harness.verdict import Check, Decided, Verdict

ACCURACY_TESTED = "accuracy-tested"
"""Id of the check that is there only if no question was asked."""
BASELINE = "baseline"
"""Id of the suite that compares the candidate with its accepted baseline."""


class SuiteVerdict(Part):
    """The verdict of a suite, or of a load of a bench, with its reason."""

    id: str = Field(description='stable, such as "mmlu"')
    title: str
    verdict: Verdict
    why: str = Field(description="one sentence: the number that decided, and the bound that applies")
    p_regression: float | None = Field(
        None, description="p value of no regression: small where the suite shows one; null where it tests nothing"
    )


class Judgement(Decided):
    """The verdict of a run or a bench, with its reasons."""

    headline: str = Field(description="the verdict in one sentence")
    reasons: tuple[str, ...] = Field(description="why, most important first")


def decide(
    candidate: str, suites: Sequence[SuiteVerdict], checks: Sequence[Check], failure: Failure | None = None
) -> Judgement:
    """The verdict of a run or a bench.

    - *error*: the engine failed, even if something was measured before.
    - *regression*: a suite regressed and the servers differed in nothing but the backend. Checks that are missing do not excuse it.
    - *pass*: every suite passed and no check failed or is missing.
    - *inconclusive*: anything else.
    """
    if failure:
        return Judgement(verdict="error", headline="No verdict: the run failed.", reasons=(failure.message,))
    unmet = [check for check in checks if check.status in ("failed", "missing")]
    reasons = [f"{check.title}: {check.found}. To resolve: {check.settles}." for check in unmet]
    regressed = [one for one in suites if one.verdict == "regression"]
    if regressed and not any(check.status == "failed" for check in unmet):
        other = "the reference" if any(one.id != BASELINE for one in regressed) else "its accepted baseline"
        return Judgement(
            verdict="regression",
            headline=f"Do not merge: {candidate} is worse than {other}.",
            reasons=(*map(_sentence, regressed), *reasons),
        )
    undecided = [one for one in suites if one.verdict != "pass"]
    if unmet or undecided or not suites:
        return Judgement(
            verdict="inconclusive",
            headline=f"Inconclusive: not enough evidence about {candidate}.",
            reasons=(*reasons, *(map(_sentence, undecided) if suites else ["No suite ran."])),
        )
    untested = any(check.id == ACCURACY_TESTED for check in checks)
    return Judgement(
        verdict="pass",
        headline=f"{candidate} passes the suites that ran; accuracy was not tested."
        if untested
        else f"{candidate} is no worse than the reference, within the stated margins.",
        reasons=tuple(map(_sentence, suites)),
    )


def _sentence(suite: SuiteVerdict) -> str:
    return f"{suite.title}: {suite.why}"
