"""The page of what was read of other people's files: findings first, then facts and tables, what was not read at the end."""

from __future__ import annotations

from assay.harness.ingest.recognise import UNKNOWN
from assay.harness.ingest.result import IngestResult
from assay.reports import ingest_text
from assay.reports.page import to_page
from assay.reports.summary import VERDICTS


def to_html(result: IngestResult) -> str:
    """The result as one self-contained HTML page."""
    return to_page(
        "ingest.html.jinja",
        result.verdict,
        mark=VERDICTS[result.verdict],
        result=result,
        unknown=UNKNOWN,
        file_line=ingest_text.file_line,
        cited=ingest_text.cited,
        place=ingest_text.place,
    )
