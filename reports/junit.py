"""A document as JUnit XML, for CI systems.

An unproven claim must not look green, nor like a loss of accuracy:

- ``regression`` and a ``failed`` check are a ``<failure>``;
- ``inconclusive``, ``error`` and a ``missing`` check are an ``<error>``: GitLab, Jenkins and the usual GitHub actions
  count both as not passed, and distinguish them;
- ``not checked`` is ``<skipped>``, and so is a suite that did not pass in a run that ended early: one cause is one ``<error>``.

The suite ``assay`` always has a case ``verdict``, so that a run without suites or checks is not green either. Cases are
named by the stable ids of checks and suites, so that a CI system recognises them from run to run; their texts have the titles, and
the ids of findings and conditions.
"""

from __future__ import annotations

from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

from assay.harness.errors import ExitCode
from assay.harness.text import one_line, visible
from assay.reports.document import CaseResult, Document, Outcome, Suite

_OUTPUT_LIMIT = 10_000


def to_junit(document: Document) -> str:
    """The cases of a document as JUnit XML."""
    made = JUnitXml("assay")
    for suite in document.suites or [_suite_of(document)]:
        made.add_testsuite(_suite(suite))
    return '<?xml version="1.0" encoding="utf-8"?>\n' + str(made.tostring().decode("utf-8")) + "\n"


def _suite_of(document: Document) -> Suite:
    """Make the suite of a document that names none: one case, which is green only if the command exits with 0."""
    outcome: Outcome = "failed" if document.code else "ok"
    if document.code == ExitCode.NO_VERDICT:
        outcome = "missing"
    if document.exit_code is None:
        outcome = document.verdict or outcome
    case = CaseResult("verdict", f"assay.{document.command}", outcome, document.headline, [document.headline])
    return Suite(f"assay {document.command}", [case])


def _suite(suite: Suite) -> TestSuite:
    made = TestSuite(one_line(suite.name))
    if suite.created:
        made.timestamp = one_line(suite.created)
    for key, value in suite.properties.items():
        made.add_property(one_line(key), one_line(value))
    for case in suite.cases:
        made.add_testcase(_case(case))
    return made


_KINDS = {
    "regression": Failure, "failed": Failure, "inconclusive": Error, "error": Error, "missing": Error,
    "not checked": Skipped,
}  # fmt: skip


def _case(case: CaseResult) -> TestCase:
    made = TestCase(one_line(case.name) or "(unnamed)", case.classname)
    if case.seconds is not None:
        made.time = case.seconds
    text = visible("\n".join(case.lines))[:_OUTPUT_LIMIT]
    if case.outcome in ("pass", "ok"):
        made.system_out = text
        return made
    result = _KINDS[case.outcome](one_line(case.message, 400), case.outcome)
    result.text = text
    made.result = [result]
    return made
