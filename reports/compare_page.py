"""The page of ``assay compare``."""

from __future__ import annotations

from pathlib import Path

from assay.harness.files import write_whole
from assay.harness.ingest.results.comparison import CompareResult
from assay.reports.compare_text import LATENCY_COLUMNS, TASK_COLUMNS, latency_cells, task_cells
from assay.reports.page import to_page
from assay.reports.summary import VERDICTS


def write_compare(result: CompareResult, path: Path) -> None:
    """Write the page.

    Raises:
        EvidenceError: the disk is full or not writable.
    """
    write_whole(path, to_html(result))


def to_html(result: CompareResult) -> str:
    """The result as one self-contained HTML page."""
    tasks = [*result.tasks, *([result.overall] if result.overall and len(result.tasks) > 1 else [])]
    return to_page(
        "compare.html.jinja",
        result.verdict,
        mark=VERDICTS[result.verdict],
        result=result,
        task_columns=TASK_COLUMNS,
        task_rows=[task_cells(one) for one in tasks],
        latency_columns=LATENCY_COLUMNS,
        latency_rows=[latency_cells(one) for one in result.latencies],
    )
