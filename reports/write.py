"""Writes all reports of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from assay.harness.files import write_whole
from assay.harness.judge.report import Report
from assay.reports.json_report import to_json
from assay.reports.junit import to_junit
from assay.reports.run_markdown import to_markdown
from assay.reports.run_page import to_html

# report.json comes first: the others can be rebuilt from it.
RENDERERS: dict[str, Callable[[Report], str]] = {
    "report.json": to_json,
    "report.html": to_html,
    "report.junit.xml": to_junit,
    "report.md": to_markdown,
}


def write_reports(report: Report, folder: Path) -> list[Path]:
    """Write ``report.json``, ``report.html``, ``report.junit.xml`` and ``report.md`` into `folder`, created if needed.

    Each file is replaced atomically; if writing fails, the old one stays.

    Raises:
        EvidenceError: the folder or a file cannot be written, for instance because the disk is full.
    """
    written = []
    for name, render in RENDERERS.items():
        path = folder / name
        write_whole(path, render(report))
        written.append(path)
    return written
