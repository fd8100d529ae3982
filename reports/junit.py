"""``report.junit.xml``: what CI systems show of a run.

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

import re
from collections.abc import Iterable

from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

from assay.harness.judge.report import Check, Report, SuiteResult, Verdict
from assay.harness.text import one_line, visible
from assay.reports import summary
from assay.reports.terminal import PLAIN_WIDTH, explained_by, picture_lines

OUTPUT_LIMIT = 10_000


def to_junit(report: Report) -> str:
    """The report as JUnit XML: a test suite with the verdict and the checks, and one per suite of the run."""
    document = JUnitXml("assay")
    prefix = f"assay.{_name(report.candidate.backend)}"
    overall = TestSuite("assay")
    overall.timestamp = one_line(report.created)
    for key, value in _properties(report):
        overall.add_property(key, one_line(value))
    verdict = verdict_case("verdict", prefix, report.verdict, report.headline, _why(report))
    verdict.time = report.seconds
    cases = [verdict, *(check_case(check, f"{prefix}.checks") for check in report.checks)]
    for case in cases:
        overall.add_testcase(case)
    document.add_testsuite(overall)
    for suite in report.suites:
        document.add_testsuite(_suite(suite, f"{prefix}.{_name(suite.id)}", ended_early=report.failure is not None))
    return '<?xml version="1.0" encoding="utf-8"?>\n' + str(document.tostring().decode("utf-8")) + "\n"


def _properties(report: Report) -> Iterable[tuple[str, str]]:
    yield "verdict", report.verdict
    yield "exit_code", str(report.exit_code)
    yield "run_id", report.run_id
    yield "reference", report.reference.backend
    yield "candidate", report.candidate.backend
    yield "engine", report.candidate.engine
    yield "device", report.environment.device
    yield "model", report.environment.model
    yield "model_hash", report.environment.model_hash
    yield "reproduce", report.reproduce


def _suite(suite: SuiteResult, classname: str, ended_early: bool) -> TestSuite:
    result = TestSuite(one_line(suite.id))
    result.add_property("synthetic", str(suite.synthetic).lower())
    for metric in suite.metrics:
        result.add_property(one_line(metric.id), one_line(metric.text))
        if metric.bound is not None:
            result.add_property(f"bound of {one_line(metric.id)}", summary.bound_and_policy(metric))
    line = summary.suite_line(suite)
    output = [
        f"{line.suite}: {suite.why}",
        *([f"accuracy: reference {line.reference}, candidate {line.candidate}"] if suite.tallies else []),
        f"differences: {line.differences}",
        *(
            f"{row.id} ({row.title} {row.bucket}): reference {row.reference_right}/{row.items}, "
            f"candidate {row.candidate_right}/{row.items}, unparsed {row.candidate_unparsed}"
            for row in suite.conditions
            if row.items
        ),
    ]
    case = verdict_case("verdict", classname, suite.verdict, f"{line.suite}: {suite.why}", output)
    if ended_early and suite.verdict != "pass":  # one cause is one error: that of the run
        case.result = [Skipped(f"the run ended early; {one_line(suite.why, 300)}")]
    result.add_testcase(case)
    return result


def verdict_case(name: str, classname: str, verdict: Verdict, message: str, output: Iterable[str]) -> TestCase:
    """A case that passes, fails, or is an error, by a verdict."""
    case = TestCase(one_line(name) or "(unnamed)", classname)
    text = _text(output)
    if verdict == "pass":
        case.system_out = text
        return case
    kind = Failure if verdict == "regression" else Error
    result = kind(one_line(message, 400), verdict)
    result.text = text
    case.result = [result]
    return case


def check_case(check: Check, classname: str) -> TestCase:
    """A case for a requirement of a pass."""
    case = TestCase(one_line(check.id) or "(unnamed)", classname)
    found = f"{check.title}: {check.found}"
    if check.status == "ok":
        case.system_out = _text([found])
        return case
    kind = {"failed": Failure, "missing": Error, "not checked": Skipped}[check.status]
    result = kind(one_line(found, 400), check.status)
    result.text = _text([found, f"To resolve: {check.settles}"] if check.settles else [found])
    case.result = [result]
    return case


def _why(report: Report) -> list[str]:
    lines = list(report.reasons)
    if report.failure and report.failure.details:
        lines += ["", report.failure.details]
    for finding in report.findings:
        lines += ["", f"{finding.severity}: {finding.id}: {finding.sentence}"]
        lines += [f"  observed: {finding.observed}"] if finding.observed else []
        lines += [row.plain for row in picture_lines(finding, PLAIN_WIDTH, 2)]
        lines += [f"  {line}" for line in finding.evidence]
        lines += [f"  {line}" for line in explained_by(finding)]
        lines += [f"  to reproduce: {finding.reproduce}"] if finding.reproduce else []
    if report.layers:
        lines += ["", *summary.layer_diff_lines(report.layers)]
    if report.latency:
        lines += ["", *summary.latency_lines(report.latency)]
    return [*lines, "", f"to repeat this run: {report.reproduce}"]


def _text(lines: Iterable[str]) -> str:
    return visible("\n".join(lines))[:OUTPUT_LIMIT]


def _name(text: str) -> str:
    """`text` as one part of a class name: CI systems split them at dots, so a URL or a `module:function` must not add any."""
    return re.sub(r"[^\w-]+", "_", one_line(text, 100)) or "_"
