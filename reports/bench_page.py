"""Writes the result of a bench: ``bench.json`` and ``bench.html``."""

from __future__ import annotations

from pathlib import Path

from assay.harness.files import write_whole
from assay.harness.judge.latency_result import LatencyResult
from assay.reports.latency_view import latency_view
from assay.reports.page import to_page
from assay.reports.summary import VERDICTS

JSON, HTML = "bench.json", "bench.html"


def write_bench(result: LatencyResult, folder: Path) -> Path:
    """Write both files into the folder of a bench.

    Returns:
        The path of the page.

    Raises:
        EvidenceError: the disk is full or not writable.
    """
    write_whole(folder / JSON, result.model_dump_json(indent=2) + "\n")
    page = folder / HTML
    write_whole(page, to_html(result))
    return page


def to_html(result: LatencyResult) -> str:
    """The page of a bench."""
    return to_page("bench.html.jinja", result.verdict, mark=VERDICTS[result.verdict], latency=latency_view(result))
