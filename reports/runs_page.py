"""The page of ``assay runs``."""

from __future__ import annotations

from pathlib import Path

from assay.harness.files import write_whole
from assay.harness.judge.history import RunList
from assay.reports.page import to_page
from assay.reports.runs_text import STRIP, level, suites_of, treatment, worst_text


def write_runs(listed: RunList, path: Path) -> None:
    """Write the page.

    Raises:
        EvidenceError: the disk is full or not writable.
    """
    write_whole(path, to_html(listed))


def to_html(listed: RunList) -> str:
    """The runs of a folder as one self-contained HTML page; the header has the verdict of the newest."""
    newest = next((one for one in listed.runs if one.verdict is not None), None)
    return to_page(
        "runs.html.jinja",
        newest.verdict if newest else None,
        listed=listed,
        newest=newest,
        histories=[(treatment(history[0]), history, suites_of(history)) for history in listed.histories],
        unread=[one for one in listed.runs if one.verdict is None],
        most=STRIP,
        level=level,
        worst_text=worst_text,
    )
