"""The verdict of a run or a bench, by its suites and its checks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from assay.harness.evidence.manifest import FailureResult
from assay.harness.judge.judgement import SuiteVerdict
from assay.harness.statement import state
from assay.harness.stats.multiple import holm
from assay.harness.verdict import Check, Verdict

_Suite = TypeVar("_Suite", bound=SuiteVerdict)


def holm_corrected(suites: Sequence[_Suite], alpha: float) -> list[_Suite]:
    """Correct the suites' verdicts by Holm's method over all of them.

    The probability that a run without a regression is called one is then at most `alpha`, however many suites it has.

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
            corrected_away = state("not-below-alpha", suites=len(suites), p=p, alpha=alpha)
            suite = suite.model_copy(update={"verdict": "inconclusive", "why": (*suite.why, corrected_away)})
        corrected.append(suite)
    return corrected


def decide(of: Iterable[Verdict], checks: Sequence[Check], failure: FailureResult | None = None) -> Verdict:
    """Decide the verdict of a run, by those of its suites, or of a bench, by those of its ratios.

    - *error*: the engine failed, even if something was measured before.
    - *regression*: a suite regressed and the servers differed only in the treatment. Missing checks do not excuse it.
    - *pass*: every suite passed and no check failed or is missing.
    - *inconclusive*: anything else.
    """
    verdicts, statuses = set(of), {check.status for check in checks}
    if failure:
        return "error"
    if "regression" in verdicts and "failed" not in statuses:
        return "regression"
    return "pass" if verdicts == {"pass"} and not statuses & {"failed", "missing"} else "inconclusive"
