"""Runs that have ended: ``assay runs``, ``assay trend``, ``assay show``, ``assay open``."""

from __future__ import annotations

import os
import sys
import webbrowser
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer

from assay.harness.cli.app import app, say
from assay.harness.cli.output import Html, Json, deliver, new_folder
from assay.harness.config import RUNS
from assay.harness.errors import UsageError
from assay.harness.files import write_whole

By = Literal["commit", "date"]
Run = Annotated[
    str | None,
    typer.Argument(
        metavar="PATH|URL",
        help=f"A run's folder, its report.json, its URL in a storage, or the beginning of a name in {RUNS}; by default the newest "
        "run there.",
    ),
]
Place = Annotated[
    str,
    typer.Argument(metavar="PATH|URL", help="A folder of runs or sweeps, or a storage such as s3://bucket/runs."),
]
Where = Annotated[
    str,
    typer.Option(
        metavar="CONDITION",
        help="A condition in SQL on the columns of the rows: \"model = 'tiny' and verdict = 'regression'\".",
    ),
]


@app.command()
def runs(
    folder: Place = str(RUNS),
    where: Where = "",
    html: Html = None,
    site: Annotated[
        Path | None,
        typer.Option(
            help="A folder for the page as index.html, with the reports of its runs beside it, to be published as it is.",
            callback=new_folder,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """List the runs of a folder or storage: verdict, treatment, date, worst own error, and the history of each suite."""
    from assay.harness.cli.site import copy_reports
    from assay.harness.evidence.storage import ROWS, is_url
    from assay.harness.history.table import RunTable, has_cells
    from assay.harness.history.trend import usual_trends
    from assay.harness.judge.history import list_runs
    from assay.reports.runs import runs_document

    page = html or (site and site / "index.html")
    kept = (page or (Path(folder) / ROWS).is_dir() or has_cells(Path(folder))) and find_spec("duckdb")
    history = RunTable(folder) if where or is_url(folder) or kept else None
    listed = history.runs(where) if history else list_runs(Path(folder))
    trends = usual_trends(history, where) if history and page else []
    if site:
        from assay.reports.page import to_html

        document = runs_document(listed, site, trends, copy_reports(listed, site))
        write_whole(site / "index.html", to_html(document))
        say(f"Site: {site}")
    deliver(runs_document(listed, (html or Path()).parent, trends if html else []), json, html)


@app.command()
def trend(
    metric: Annotated[
        str, typer.Argument(help="own-error, kl, accuracy, latency, lengths, or the id of a metric in a report.json.")
    ],
    folder: Place = str(RUNS),
    where: Where = "",
    by: Annotated[By, typer.Option(help="What a move is between.")] = "date",
    html: Html = None,
    json: Json = False,
) -> None:
    """Show a number over the runs of each comparison, and the first commit or date after which it moved."""
    from assay.harness.history.table import RunTable
    from assay.harness.history.trend import trend_of
    from assay.reports.trend import trend_document

    deliver(trend_document(trend_of(RunTable(folder, "assay trend"), metric, where, by)), json, html)


@app.command()
def show(run: Run = None, json: Json = False) -> None:
    """Show the report that a run has already. Nothing is judged again; `assay report` does that."""
    from assay.harness.judge.history import PAGE, report_of
    from assay.reports.run_report import run_document

    path = _found(run)
    page = (path if path.is_dir() else path.parent) / PAGE
    raise typer.Exit(deliver(run_document(report_of(path), page), json))


def _found(run: str | None) -> Path:
    """Return the path of the run that is meant; fetch it first if a URL names it."""
    from assay.harness.cli.stored import fetched, run_in
    from assay.harness.evidence.storage import is_url
    from assay.harness.judge.history import find_run

    return fetched(run) if run and is_url(run) else run_in(find_run(Path(run) if run else None, RUNS))


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
