"""The pages of a trace, and of two traces compared."""

from __future__ import annotations

from pathlib import Path

from markupsafe import Markup

from assay.harness.files import write_whole
from assay.harness.ingest.result import Document
from assay.harness.ingest.trace.diff import TraceDiff
from assay.harness.ingest.trace.verdict import verdict_of
from assay.harness.verdict import Verdict
from assay.reports.ingest import file_line
from assay.reports.page import to_page
from assay.reports.trace_terminal import STEP_COLUMNS, step_cells
from assay.reports.trace_timeline import timeline_svg

TRACE_WORDS: dict[Verdict, str] = {"pass": "In order", "regression": "Out of order", "inconclusive": "Not all read"}
DIFF_WORDS: dict[Verdict, str] = {"pass": "Equal", "regression": "Different", "inconclusive": "Not compared"}


def write_trace(document: Document, path: Path) -> None:
    """Write the page of a trace.

    Raises:
        EvidenceError: the disk is full or not writable.
    """
    write_whole(path, trace_html(document))


def trace_html(document: Document) -> str:
    """A trace as one self-contained page."""
    verdict = verdict_of(document)
    return to_page(
        "trace.html.jinja",
        verdict,
        word=TRACE_WORDS[verdict],
        document=document,
        headline=file_line(document.file),
        timeline=Markup(timeline_svg(document.timeline) if document.timeline else ""),
    )


def write_diff(result: TraceDiff, path: Path) -> None:
    """Write the page of two traces compared.

    Raises:
        EvidenceError: the disk is full or not writable.
    """
    write_whole(path, diff_html(result))


def diff_html(result: TraceDiff) -> str:
    """Two traces compared, as one self-contained page."""
    return to_page(
        "trace_diff.html.jinja",
        result.verdict,
        word=DIFF_WORDS[result.verdict],
        result=result,
        files=[file_line(file) for file in (result.a, result.b)],
        columns=STEP_COLUMNS,
        steps=[step_cells(row) for row in result.steps],
        timelines=[Markup(timeline_svg(one)) for one in result.timelines],
    )
