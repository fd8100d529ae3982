"""The page of what was read of other people's files: findings first, then each file, what was not read at the end."""

from __future__ import annotations

from markupsafe import Markup

from assay.harness.ingest.recognise import UNKNOWN
from assay.harness.ingest.result import IngestResult
from assay.harness.text import one_line
from assay.reports import ingest_text
from assay.reports.page import to_page
from assay.reports.summary import VERDICTS
from assay.reports.trace_timeline import timeline_svg


def to_html(result: IngestResult) -> str:
    """The result as one self-contained HTML page."""
    return to_page(
        "ingest.html.jinja",
        result.verdict,
        mark=VERDICTS[result.verdict],
        result=result,
        unknown=UNKNOWN,
        quiet=[one_line(one.file.path) for one in result.documents if not one.findings and one.file.format != UNKNOWN],
        cited=ingest_text.cited,
        place=ingest_text.place,
        pictures=[Markup(timeline_svg(one.timeline)) if one.timeline else "" for one in result.documents],
    )
