"""Runs that have ended: ``assay runs``, ``assay show``, ``assay open``."""

from __future__ import annotations

import os
import sys
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from assay.harness.cli.app import app, say
from assay.harness.cli.output import Json, deliver
from assay.harness.config import RUNS
from assay.harness.errors import UsageError

Run = Annotated[
    str | None,
    typer.Argument(
        metavar="PATH",
        help=f"A run's folder, its report.json, or the beginning of a name in {RUNS}; by default the newest run there.",
    ),
]


@app.command()
def runs(
    folder: Annotated[Path, typer.Argument(help="A folder of runs.")] = RUNS,
    json: Json = False,
) -> None:
    """List the runs in a folder: verdict, treatment, date, worst own error, and the history of each suite."""
    from assay.harness.judge.history import list_runs
    from assay.reports.runs import runs_document

    deliver(runs_document(list_runs(folder)), json)


@app.command()
def show(run: Run = None, json: Json = False) -> None:
    """Show the report that a run has already. Nothing is judged again; `assay report` does that."""
    from assay.harness.judge.history import PAGE, report_of
    from assay.reports.run_report import run_document

    path = _found(run)
    page = (path if path.is_dir() else path.parent) / PAGE
    raise typer.Exit(deliver(run_document(report_of(path), page), json))


def _found(run: str | None) -> Path:
    """Return the path of the run that is meant."""
    from assay.harness.judge.history import find_run

    return find_run(Path(run) if run else None, RUNS)


@app.command(name="open")
def open_(run: Run = None) -> None:
    """Open a run's HTML report in a browser, or print its path where there is none."""
    from assay.harness.judge.history import PAGE, REPORT, check_run

    path = _found(run)
    page = (path if path.is_dir() else path.parent) / PAGE
    if not page.is_file():
        check_run(path if path.is_dir() or path.name != REPORT else path.parent)
        raise UsageError(
            f"{path} has no {PAGE}.", "a run with a report", f"make it from the evidence: assay report {path}"
        )
    if not _opens(page):
        say(f"No browser was found. The report is {page.resolve()}")


def _opens(page: Path) -> bool:
    """Open a page in a browser with a window of its own, not one that runs in the terminal; return True if that worked."""
    on_linux = sys.platform.startswith("linux")
    if on_linux and not any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")):
        return False
    try:
        return webbrowser.open(page.resolve().as_uri())
    except webbrowser.Error:
        return False
