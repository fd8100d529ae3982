"""Turns a report's checks and suites into tests: an unproven claim fails and states how to prove it."""

from __future__ import annotations

import pytest

from assay.harness.judge.report import Report
from assay.reports.wording.requirements import said_check
from assay.reports.wording.say import say
from assay.reports.wording.verdict import headline, reasons, suite_title


def needs(report: Report, *suites: str) -> None:
    """Skip a claim about suites unless the run includes one of them."""
    if not set(suites) & set(report.asked):
        pytest.skip(f"--suites does not include {' or '.join(suites)}")


def check(report: Report, *ids: str) -> None:
    """Pass if the checks with these ids are ok, or skip if one of them was not checked."""
    __tracebackhide__ = True
    checks = {each.id: each for each in report.checks}
    for id_ in ids:
        if id_ not in checks:
            pytest.fail(
                f"the report has no check {id_!r}: the run ended early ({headline(report)} {reasons(report)[0]})"
            )
        wanted = said_check(checks[id_])
        if wanted.status == "not checked":
            pytest.skip(f"{wanted.title}: {wanted.found}")
        if wanted.status != "ok":
            pytest.fail(f"{wanted.status}: {wanted.title}: {wanted.found}\nTo resolve: {wanted.settles}", pytrace=False)


def suite(report: Report, id_: str) -> None:
    """Pass if the suite's verdict is pass."""
    __tracebackhide__ = True
    suites = {each.id: each for each in report.suites}
    if id_ not in suites:
        pytest.fail(f"the suite {id_!r} did not run: {headline(report)} {reasons(report)[0]}", pytrace=False)
    if suites[id_].verdict != "pass":
        pytest.fail(f"{suites[id_].verdict}: {suite_title(suites[id_])}: {say(*suites[id_].why)}", pytrace=False)
