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
from dataclasses import replace
from pathlib import Path

from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

from assay.harness.files import write_whole
from assay.harness.judge.report import Report, SuiteResult
from assay.harness.text import one_line, visible
from assay.reports import summary
from assay.reports.document import Case, Document, Suite
from assay.reports.terminal import PLAIN_WIDTH, explained_by, picture_lines

OUTPUT_LIMIT = 10_000


def to_junit(report: Report) -> str:
    """The report as JUnit XML: a test suite with the verdict and the checks, and one per suite of the run."""
    prefix = f"assay.{_name(report.candidate.backend)}"
    verdict = Case("verdict", prefix, report.verdict, report.headline, _why(report), report.seconds)
    cases = [verdict, *(Case.of(check, f"{prefix}.checks") for check in report.checks)]
    suites = [Suite("assay", cases, dict(_properties(report)), report.created)]
    ended_early = report.failure is not None
    suites += [_suite(suite, f"{prefix}.{_name(suite.id)}", ended_early) for suite in report.suites]
    return to_xml("assay", suites)


def document_junit(document: Document) -> str:
    """The cases of a document as JUnit XML."""
    return to_xml(document.name, document.suites)


def write_junit(document: Document, path: Path) -> None:
    """Write a document's cases.

    Raises:
        EvidenceError: the disk is full or not writable.
    """
    write_whole(path, document_junit(document))


def to_xml(name: str, suites: Iterable[Suite]) -> str:
    """Suites of cases as JUnit XML."""
    document = JUnitXml(name)
    for suite in suites:
        made = TestSuite(one_line(suite.name))
        if suite.created:
            made.timestamp = one_line(suite.created)
        for key, value in suite.properties.items():
            made.add_property(one_line(key), one_line(value))
        for case in suite.cases:
            made.add_testcase(_case(case))
        document.add_testsuite(made)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + str(document.tostring().decode("utf-8")) + "\n"


_KINDS = {
    "regression": Failure, "failed": Failure, "inconclusive": Error, "error": Error, "missing": Error,
    "not checked": Skipped,
}  # fmt: skip


def _case(case: Case) -> TestCase:
    made = TestCase(one_line(case.name) or "(unnamed)", case.classname)
    if case.seconds is not None:
        made.time = case.seconds
    text = visible("\n".join(case.lines))[:OUTPUT_LIMIT]
    if case.outcome in ("pass", "ok"):
        made.system_out = text
        return made
    result = _KINDS[case.outcome](one_line(case.message, 400), case.outcome)
    result.text = text
    made.result = [result]
    return made


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


def _suite(suite: SuiteResult, classname: str, ended_early: bool) -> Suite:
    properties = {"synthetic": str(suite.synthetic).lower()}
    for metric in suite.metrics:
        properties[metric.id] = metric.text
        if metric.bound is not None:
            properties[f"bound of {metric.id}"] = summary.bound_and_policy(metric)
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
    case = Case("verdict", classname, suite.verdict, f"{line.suite}: {suite.why}", output)
    if ended_early and suite.verdict != "pass":  # one cause is one error: that of the run
        case = replace(case, outcome="not checked", message=f"the run ended early; {suite.why}", lines=())
    return Suite(suite.id, [case], properties)


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


def _name(text: str) -> str:
    """`text` as one part of a class name: CI systems split them at dots, so a URL or a `module:function` must not add any."""
    return re.sub(r"[^\w-]+", "_", one_line(text, 100)) or "_"
