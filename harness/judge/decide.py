"""The verdict: those of the suites and the checks -> `Judgement`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar

from pydantic import Field

from assay.harness.evidence.manifest import FailureResult
from assay.harness.policy import SuiteName
from assay.harness.schema import RULE, Part
from assay.harness.stats.multiple import holm
from assay.harness.text import listed
from assay.harness.verdict import Check, Decided, Finding, Verdict

WHOLE: tuple[SuiteName, ...] = ("accuracy", "greedy", "logits", "layers")
"""Suites without which a run is partial. The latency suite is asked for on its own: a time is no accuracy."""
BASELINE = "baseline"
"""Id of the suite that compares the candidate with its accepted baseline."""
INVARIANCE = "invariance"
"""Id of the suite that switches features of the candidate that must change nothing."""
# Id of the suite that compares times.
_LATENCY = "latency"


class SuiteVerdict(Part):
    """The verdict of a suite, or of a load of a bench, with its reason."""

    id: str = Field(description='stable, such as "accuracy"')
    title: str
    verdict: Verdict
    why: str = Field(description="one sentence: the number that decided, and the bound that applies")
    p_regression: float | None = Field(
        None, description="p value of no regression: small where the suite shows one; null where it tests nothing"
    )


_Suite = TypeVar("_Suite", bound=SuiteVerdict)


SCHEMA: Literal["assay.report/2"] = "assay.report/2"


class Judgement(Decided):
    __doc__ = f"""Base of the results of a run, of a bench and of a comparison of features: the verdict with its reasons. {RULE}"""

    schema_id: Literal["assay.report/2"] = Field(SCHEMA, alias="schema")
    headline: str = Field(description="the verdict in one sentence")
    reasons: tuple[str, ...] = Field(description="why, most important first")


def holm_corrected(suites: Sequence[_Suite], alpha: float) -> list[_Suite]:
    """Correct the suites' verdicts by Holm's method over all of them.

    A run without any regression is then called one at most with probability `alpha`, however many suites it has.

    A suite whose p value is not below alpha after the correction is inconclusive. A regression without a p value (an output that
    is not finite, a bug that was named) is certain, and counts as p = 0; a suite that tests nothing counts as p = 1. A pass needs
    no correction: all suites must pass (intersection-union test; Berger, Technometrics 24, 295-300 (1982)).

    Args:
        suites: each decided at level `alpha`.
    """
    p_values = [
        float(suite.verdict != "regression") if suite.p_regression is None else suite.p_regression for suite in suites
    ]
    corrected = []
    for suite, p in zip(suites, holm(p_values), strict=True):
        if suite.verdict == "regression" and p > alpha:
            over = f"Holm's correction over {len(suites)} suites gives p = {p:.2g}, not below {alpha:g}"
            changes = {"verdict": "inconclusive", "why": f"{suite.why} {over}: no regression is shown."}
            suite = suite.model_copy(update=changes)
        corrected.append(suite)
    return corrected


def decide(
    candidate: str,
    suites: Sequence[SuiteVerdict],
    checks: Sequence[Check],
    failure: FailureResult | None = None,
    *,
    cause: Finding | None = None,
    left_out: Sequence[str] = (),
    shown: str = "",
    scope: str = "",
) -> Judgement:
    """Decide the verdict of a run or a bench.

    Args:
        failure: what ended it early; None if nothing did.
        cause: the finding that says what a wrong kernel does; None if there is none.
        left_out: suites of a whole run that were not requested. The headline then says that the run was partial.
        shown: how a regression shows, in the words that end its headline, such as "accuracy 1.000 -> 0.219".
        scope: what a pass covers, in the headline: the model, how many questions, how many tokens.

    - *error*: the engine failed, even if something was measured before.
    - *regression*: a suite regressed and the servers differed in nothing but the backend. Checks that are missing do not excuse it.
    - *pass*: every suite passed and no check failed or is missing.
    - *inconclusive*: anything else.
    """
    if failure:
        todo = f"What to do: {failure.do.rstrip('.')}." if failure.do else failure.found
        said = f"the{failure.found[3:]}" if failure.found.startswith("The ") else failure.found
        return Judgement(verdict="error", headline=f"No verdict: {said}", reasons=(todo,))
    unmet = [check for check in checks if check.status in ("failed", "missing")]
    partial = "Partial run: " * bool(left_out)
    reasons = [f"{check.title}: {check.found}. To resolve: {check.settles}." for check in unmet]
    regressed = [suite for suite in suites if suite.verdict == "regression"]
    if regressed and "failed" not in {check.status for check in unmet}:
        why = [cause.sentence] if cause else []
        headline = f"{partial}Do not merge: {candidate} {_wrong(regressed, cause, shown)}."
        return Judgement(verdict="regression", headline=headline, reasons=(*why, *map(_sentence, regressed), *reasons))
    undecided = [_sentence(suite) for suite in suites if suite.verdict != "pass"] if suites else ["No suite ran."]
    if reasons or undecided:
        headline = f"{partial}Inconclusive: not enough evidence about {candidate}."
        return Judgement(verdict="inconclusive", headline=headline, reasons=(*reasons, *undecided))
    headline = f"{partial}{candidate} {_passed(suites, left_out, scope)}."
    return Judgement(verdict="pass", headline=headline, reasons=tuple(map(_sentence, suites)))


def _passed(suites: Sequence[SuiteVerdict], left_out: Sequence[str], scope: str) -> str:
    """Describe what a candidate passed, in words that follow its name."""
    scope = f", {scope}" if scope else ""
    if not left_out:
        return f"is no worse than the reference, within the stated margins{scope}"
    out = f"{listed(left_out)} {'was' if len(left_out) == 1 else 'were'} left out"
    return f"passes {listed([suite.id for suite in suites])}{scope}; {out}"


def _wrong(regressed: Sequence[SuiteVerdict], cause: Finding | None, shown: str) -> str:
    """Describe what the candidate does wrong, and how it shows, in words that follow its name."""
    shown = f" ({shown})" if shown else ""
    if cause is not None and cause.does:
        return f"{cause.does}{shown}"
    ids = {suite.id for suite in regressed}
    if ids == {INVARIANCE}:
        return f"changes its output with features that must change nothing{shown}"
    other = "its accepted baseline" if ids == {BASELINE} else "the reference"
    return f"is {'slower' if ids == {_LATENCY} else 'worse'} than {other}{f': {cause.title}' if cause else ''}{shown}"


def _sentence(suite: SuiteVerdict) -> str:
    return f"{suite.title}: {suite.why}"
