"""The page of ``assay runs``."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote

from assay.harness.files import write_whole
from assay.harness.judge.history import PAGE, RunLine, RunList
from assay.reports.page import to_page
from assay.reports.runs_text import STRIP, level, suites_of, treatment, worst_text


def write_runs(listed: RunList, path: Path) -> None:
    """Write the page.

    Raises:
        EvidenceError: the disk is full or not writable.
    """
    write_whole(path, to_html(listed, path.parent))


def to_html(listed: RunList, beside: Path) -> str:
    """The runs of a folder as one self-contained HTML page; the header has the verdict of the newest.

    Args:
        listed: the runs.
        beside: the folder of the page, from which its links lead to the runs' own pages.
    """

    def link(run: RunLine) -> str:
        """The address of a run's page relative to this one; empty where it has none."""
        page = Path(run.folder) / PAGE
        return quote(os.path.relpath(page.resolve(), beside.resolve())) if page.is_file() else ""

    newest = next((one for one in listed.runs if one.verdict is not None), None)
    return to_page(
        "runs.html.jinja",
        newest.verdict if newest else None,
        listed=listed,
        newest=newest,
        histories=[(treatment(history[0]), history, suites_of(history)) for history in listed.histories],
        unread=[one for one in listed.runs if one.verdict is None],
        most=STRIP,
        link=link,
        level=level,
        worst_text=worst_text,
    )
