"""The result of checking a kernel as JUnit XML: one case, so that one cause counts once in a CI system."""

from __future__ import annotations

from pathlib import Path

from assay.harness.files import write_whole
from assay.harness.offline.check import CheckResult
from assay.reports.check_text import cause_first, message
from assay.reports.document import Case, Suite
from assay.reports.junit import to_xml


def write_junit(result: CheckResult, path: Path) -> None:
    """Write the file.

    Raises:
        EvidenceError: the disk is full or not writable.
    """
    write_whole(path, to_junit(result))


def to_junit(result: CheckResult) -> str:
    """The result as JUnit XML. The case ``verdict`` is named by the kernel; its message starts with the cause."""
    worst = "" if result.worst is None else f"{result.worst.ratio:.3g}"
    properties = {
        "verdict": result.verdict,
        "exit_code": str(int(result.exit_code)),
        "kernel": result.kernel,
        "calls": str(len(result.computed) + len(result.broken)),
        "failing": str(len(result.failing)),
        "not covered": str(len(result.refused) + len(result.excluded) + len(result.left_out)),
        "worst own error as a multiple of its bound": worst,
        "findings": " ".join(finding.id for finding in result.findings),
        "reproduce": result.again,
    }
    name, lines = f"assay.check.{result.kernel}", message(result).splitlines()
    case = Case("verdict", name, result.verdict, cause_first(result), lines, result.seconds)
    return to_xml("assay check", [Suite("assay check", [case], properties)])
