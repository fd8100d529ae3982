"""``assay runs --site FOLDER``: the reports of runs, beside a page that leads to them."""

from __future__ import annotations

from pathlib import Path

from assay.harness.errors import EvidenceError
from assay.harness.evidence.storage import is_url, open_storage
from assay.harness.files import write_whole
from assay.harness.judge.history import PAGE, RunLine, RunList

_REPORTS = "reports"
_MOST = 200
"""Reports that are copied: each has about 150 kB."""


def copy_reports(listed: RunList, site: Path) -> dict[str, str]:
    """Copy the reports of runs into a site: of the newest of each treatment, those that did not pass first.

    Returns:
        The address of each, relative to its page, by the run's folder.
    """
    newest = [history[-1] for history in listed.histories]
    copied: dict[str, str] = {}
    for run in sorted(newest, key=lambda run: run.verdict == "pass"):
        if len(copied) == _MOST:
            break
        content = _report(run, listed.folder)
        if content is not None:
            copied[run.folder] = f"{_REPORTS}/{run.folder.removeprefix(listed.folder).strip('/')}.html"
            write_whole(site / copied[run.folder], content, durable=False)
    return copied


def _report(run: RunLine, place: str) -> bytes | None:
    if not is_url(place):
        path = Path(run.folder) / PAGE
        return path.read_bytes() if path.is_file() else None
    try:
        return open_storage(place).read_file(run.folder.removeprefix(place).strip("/"), PAGE)
    except EvidenceError:  # a cell without a report of its own
        return None
