"""``ingest.junit.xml``: what CI systems show of files that were read.

A serious finding is a ``<failure>``, a warning and an unknown file are an ``<error>``: as in the JUnit file of a run, what is
unproven is not green. The case ``verdict`` is never green either, since a log cannot prove a pass.
"""

from __future__ import annotations

from collections.abc import Iterable

from junitparser import Error, Failure, JUnitXml, TestCase, TestSuite

from assay.harness.ingest.recognise import UNKNOWN
from assay.harness.ingest.result import CitedFinding, Document, IngestResult
from assay.harness.text import one_line, visible
from assay.reports.ingest_text import cited, file_line


def to_junit(result: IngestResult) -> str:
    """The result as JUnit XML: a test suite with the verdict, and one per file with a case for each finding."""
    whole = JUnitXml("assay ingest")
    overall = TestSuite("assay")
    overall.timestamp = one_line(result.created)
    overall.add_property("verdict", result.verdict)
    overall.add_property("exit_code", str(result.exit_code))
    kind = {"regression": Failure, "pass": None}.get(result.verdict, Error)
    overall.add_testcase(_case("verdict", "assay.ingest", kind, result.headline, result.next_steps))
    whole.add_testsuite(overall)
    for document in result.documents:
        whole.add_testsuite(_suite(document))
    return '<?xml version="1.0" encoding="utf-8"?>\n' + str(whole.tostring().decode("utf-8")) + "\n"


def _suite(document: Document) -> TestSuite:
    suite = TestSuite(one_line(document.file.path))
    unknown = document.file.format == UNKNOWN
    read = _case("read", "assay.ingest", Error if unknown else None, file_line(document.file), document.file.notes)
    suite.add_testcase(read)
    for finding in document.findings:
        suite.add_testcase(_finding(finding, document.file.unit))
    return suite


def _finding(finding: CitedFinding, unit: str) -> TestCase:
    kind = {"serious": Failure, "warning": Error}.get(finding.severity)
    return _case(
        finding.id,
        "assay.ingest.findings",
        kind,
        f"{finding.where}: {finding.diagnosis}",
        [*finding.evidence, cited(finding, unit)],
    )


def _case(
    name: str, classname: str, kind: type[Failure] | type[Error] | None, message: str, lines: Iterable[str]
) -> TestCase:
    case = TestCase(one_line(name), classname)
    text = visible("\n".join([message, *lines]))
    if kind is None:
        case.system_out = text
        return case
    problem = kind(one_line(message, 400), "assay")
    problem.text = text
    case.result = [problem]
    return case
