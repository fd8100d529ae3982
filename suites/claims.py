"""Turning a report's checks and suites into tests: a claim that is not proven fails, and says what would prove it."""

from __future__ import annotations

import pytest

from assay.harness.collect.plan import Plan
from assay.harness.judge.report import Report


def needs(plan: Plan, *suites: str) -> None:
    """Skip a claim on suites of which the run was asked for none."""
    if not set(suites) & set(plan.spec.suites):
        pytest.skip(f"--suites asks for no {' and no '.join(suites)}")


def check(report: Report, name: str) -> None:
    """Pass if every check whose name begins with `name` is ok; skip if it is not checked yet."""
    __tracebackhide__ = True
    found = [check for check in report.checks if check.id == name or check.id.startswith(f"{name}-")]
    if not found:
        pytest.fail(f"the report has no check {name!r}: the run ended early ({report.headline} {report.reasons[0]})")
    for one in found:
        if one.status == "not checked":
            pytest.skip(f"{one.title}: {one.found}")
        if one.status != "ok":
            pytest.fail(f"{one.status}: {one.title}: {one.found}\nTo resolve: {one.settles}", pytrace=False)


def suite(report: Report, name: str) -> None:
    """Pass if the suite's verdict is pass."""
    __tracebackhide__ = True
    for one in report.suites:
        if one.id == name:
            if one.verdict != "pass":
                pytest.fail(f"{one.verdict}: {one.title}: {one.why}", pytrace=False)
            return
    pytest.fail(f"the suite {name!r} was not run: {report.headline} {report.reasons[0]}", pytrace=False)
