"""``assay runs --site FOLDER``: the reports of runs, beside a page that leads to them."""

from __future__ import annotations

from pathlib import Path

from assay.harness.evidence.storage import is_url, open_storage
from assay.harness.files import write_whole
from assay.harness.history.rows import SHOWN
from assay.harness.judge.history import RunList

_REPORTS = "reports"
_MOST = 200
"""Reports that are copied: each has about 150 kB."""


def copy_reports(listed: RunList, site: Path) -> dict[str, str]:
    """Copy reports of runs and logs of cells into a site: the newest of each treatment, those that did not pass first.

    Returns:
        The address of each, relative to its page, by the run's folder.
    """
    storage = open_storage(listed.folder)
    newest = [history[-1] for history in listed.histories]
    copied: dict[str, str] = {}
    for run in sorted(newest, key=lambda run: run.verdict == "pass"):
        if len(copied) == _MOST:
            break
        name = run.folder.removeprefix(listed.folder).strip("/")
        if is_url(listed.folder):
            there = storage.file_hashes(name) if storage.complete(name) else {}
            file = next((file for file in SHOWN if file in there), "")
            content = storage.read_file(name, file) if file else None
        else:
            file = next((file for file in SHOWN if (Path(run.folder) / file).is_file()), "")
            content = (Path(run.folder) / file).read_bytes() if file else None
        if content is not None:
            copied[run.folder] = f"{_REPORTS}/{name}{Path(file).suffix}"
            write_whole(site / copied[run.folder], content, durable=False)
    return copied
