"""``report.junit.xml``: what CI systems show of a run.

A claim that is not proven must not look green, and must not look like a loss of accuracy either:

- ``regression``, and a condition found not to hold, are a ``<failure>``;
- ``inconclusive``, ``error``, and a condition that could not be established, are an ``<error>``: GitLab, Jenkins and the
  usual GitHub actions count both as not passed, and show them apart;
- ``not checked`` is ``<skipped>``.

The suite ``assay`` always holds a case ``verdict``, so that a run without suites or conditions is not green either.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

from assay.harness.judge.report import Check, Report, SuiteResult, Verdict
from assay.harness.text import one_line, visible
from assay.reports import summary

OUTPUT_LIMIT = 10_000


def to_junit(report: Report) -> str:
    """The report as JUnit XML: a test suite for the conditions of a pass and one per suite of the run."""
    document = JUnitXml("assay")
    prefix = f"assay.{_name(report.candidate.backend)}"
    overall = TestSuite("assay")
    overall.timestamp = one_line(report.created)
    for key, value in _properties(report):
        overall.add_property(key, one_line(value))
    verdict = _case("verdict", prefix, report.verdict, report.headline, _why(report))
    verdict.time = report.seconds
    cases = [verdict, *(_check_case(check, f"{prefix}.conditions") for check in report.checks)]
    for case in cases:
        overall.add_testcase(case)
    document.add_testsuite(overall)
    for suite in report.suites:
        document.add_testsuite(_suite(suite, f"{prefix}.{_name(suite.id)}"))
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


def _suite(suite: SuiteResult, classname: str) -> TestSuite:
    result = TestSuite(one_line(suite.id))
    result.add_property("synthetic", str(suite.synthetic).lower())
    for metric in suite.metrics:
        result.add_property(one_line(metric.name), one_line(metric.text))
        if metric.bound is not None:
            result.add_property(f"bound of {one_line(metric.name)}", summary.bound_and_policy(metric))
    line = summary.suite_line(suite)
    output = [
        suite.why,
        *([f"accuracy: reference {line.reference}, candidate {line.candidate}"] if suite.tallies else []),
        f"differences: {line.differences}",
        *(
            f"by {row.by}, {row.bucket}: reference {row.reference_right}/{row.items}, "
            f"candidate {row.candidate_right}/{row.items}, unparsed {row.candidate_unparsed}"
            for row in suite.conditions
            if row.items
        ),
    ]
    result.add_testcase(_case(line.suite, classname, suite.verdict, suite.why, output))
    return result


def _case(name: str, classname: str, verdict: Verdict, message: str, output: Iterable[str]) -> TestCase:
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


def _check_case(check: Check, classname: str) -> TestCase:
    case = TestCase(one_line(check.title) or "(unnamed)", classname)
    if check.status == "ok":
        case.system_out = _text([check.found])
        return case
    kind = {"failed": Failure, "missing": Error, "not checked": Skipped}[check.status]
    result = kind(one_line(check.found, 400), check.status)
    result.text = _text([check.found, f"To settle it: {check.settles}"] if check.settles else [check.found])
    case.result = [result]
    return case


def _why(report: Report) -> list[str]:
    lines = list(report.reasons)
    for finding in report.findings:
        lines += ["", f"{finding.severity}: {finding.where}: {finding.diagnosis}"]
        lines += [f"  {line}" for line in finding.evidence]
        lines += [f"  show it again: {finding.reproduce}"] if finding.reproduce else []
    if report.layers:
        lines += ["", *summary.layer_diff_lines(report.layers)]
    if report.latency:
        lines += ["", *summary.latency_lines(report.latency)]
    return [*lines, "", f"repeat this run: {report.reproduce}"]


def _text(lines: Iterable[str]) -> str:
    return visible("\n".join(lines))[:OUTPUT_LIMIT]


def _name(text: str) -> str:
    """Dots part a class name in CI systems, so a URL or a `module:function` must not bring its own."""
    return re.sub(r"[^\w-]+", "_", one_line(text, 100)) or "_"
