"""The words of a gate: the candidate beside its accepted baseline, its policy, and its earlier runs."""

from __future__ import annotations

from assay.harness.judge.judgement import Metric
from assay.harness.text import percent, two_digits
from assay.reports.wording.accuracy import by_betting, in_points
from assay.reports.wording.say import Measured, says


@says
def _against_accepted() -> str:
    return "Against the accepted answers:"


@says
def _own_error_grew(where: str, accepted: float, now: float, above: bool, line: str) -> str:
    return (
        f"Own error grew most at {where}: {percent(accepted)} accepted, {percent(now)} now, a factor "
        f"{'above' if above else 'within'} the policy's {line}."
    )


@says
def _non_inferior_anyway() -> str:
    return "No loss beyond the margin is shown, and the candidate is non-inferior to the reference."


@says
def _nothing_in_common() -> str:
    return "The run and the baseline measured nothing in common."


@says
def _loss_since_accepted(metric: Metric, level: float) -> Measured:
    return Measured(
        "loss of accuracy since it was accepted", in_points(metric), f"Accepted minus now, {by_betting(level)}"
    )


@says
def _own_error_growth(metric: Metric) -> Measured:
    text = "" if metric.value is None else f"{two_digits(metric.value)} times"
    return Measured("growth of own error", text, "Largest over layers and conditions")
