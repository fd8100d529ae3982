"""Writes all reports of a run."""

from __future__ import annotations

from pathlib import Path

from assay.harness.files import write_whole
from assay.harness.judge.report import Report
from assay.reports.json_report import to_json
from assay.reports.junit import to_junit
from assay.reports.markdown import to_markdown
from assay.reports.page import to_html
from assay.reports.run_report import run_document


def write_reports(report: Report, folder: Path) -> list[Path]:
    """Write ``report.json``, ``report.html``, ``report.junit.xml`` and ``report.md`` into `folder`, created if needed.

    Each file is replaced atomically; if writing fails, the old one stays.
    """
    write_whole(folder / "report.json", to_json(report))  # first: the others can be rebuilt from it
    document = run_document(report)
    rendered = {
        "report.html": to_html(document),
        "report.junit.xml": to_junit(document),
        "report.md": to_markdown(document),
    }
    for name, text in rendered.items():
        write_whole(folder / name, text)
    return [folder / name for name in ("report.json", *rendered)]
