"""The result of checking a kernel as JUnit XML: one case, so that one cause counts once in a CI system."""

from __future__ import annotations

from pathlib import Path

from junitparser import JUnitXml, TestSuite

from assay.harness.files import write_whole
from assay.harness.offline.check import CheckResult
from assay.harness.text import one_line
from assay.reports.check_text import cause_first, message
from assay.reports.junit import verdict_case


def write_junit(result: CheckResult, path: Path) -> None:
    """Write the file.

    Raises:
        EvidenceError: the disk is full or not writable.
    """
    write_whole(path, to_junit(result))


def to_junit(result: CheckResult) -> str:
    """The result as JUnit XML. The case ``verdict`` is named by the kernel; its message starts with the cause."""
    document, suite = JUnitXml("assay check"), TestSuite("assay check")
    worst = "" if result.worst is None else f"{result.worst.ratio:.3g}"
    for key, value in (
        ("verdict", result.verdict),
        ("exit_code", str(int(result.exit_code))),
        ("kernel", result.kernel),
        ("calls", str(len(result.computed) + len(result.broken))),
        ("failing", str(len(result.failing))),
        ("not covered", str(len(result.refused) + len(result.excluded) + len(result.left_out))),
        ("worst own error as a multiple of its bound", worst),
        ("findings", " ".join(finding.id for finding in result.findings)),
        ("reproduce", result.again),
    ):
        suite.add_property(key, one_line(value))
    name, lines = f"assay.check.{result.kernel}", message(result).splitlines()
    case = verdict_case("verdict", name, result.verdict, cause_first(result), lines)
    case.time = result.seconds
    suite.add_testcase(case)
    document.add_testsuite(suite)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + str(document.tostring().decode("utf-8")) + "\n"
