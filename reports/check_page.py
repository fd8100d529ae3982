"""The page of a checked kernel: what is wrong with it, and where."""

from __future__ import annotations

from pathlib import Path

from assay.harness.files import write_whole
from assay.harness.offline.check import CheckResult
from assay.reports import check_text
from assay.reports.page import to_page
from assay.reports.summary import VERDICTS


def write_check(result: CheckResult, path: Path) -> None:
    """Write the page.

    Raises:
        EvidenceError: the disk is full or not writable.
    """
    write_whole(path, to_html(result))


def to_html(result: CheckResult) -> str:
    """The result as one self-contained HTML page."""
    return to_page(
        "check.html.jinja",
        result.verdict,
        mark=VERDICTS[result.verdict],
        result=result,
        headline=check_text.headline(result),
        rows=check_text.rows(result.axes) if result.failing and result.right else (),
        indifferent=check_text.indifferent(result.axes),
        not_covered=check_text.not_covered(result),
    )
