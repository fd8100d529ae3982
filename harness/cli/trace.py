"""Traces of engines and profilers: ``assay trace show``, ``diff``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from assay.harness.cli.app import app
from assay.harness.cli.output import Html, Json, deliver

trace_app = typer.Typer(no_args_is_help=True, add_completion=False)
app.add_typer(trace_app, name="trace", help="Read a trace of an engine or a profiler, or compare two.")


@trace_app.command()
def show(
    file: Annotated[Path, typer.Argument(help="A trace: lines of an MLC-LLM engine, or Chrome trace events.")],
    html: Html = None,
    json: Json = False,
) -> None:
    """Show what a trace states, and the rules that it breaks.

    Exit codes: 0 if all of it was understood and no rule is broken, 1 if rules are broken, 3 if part of it was not understood.
    """
    from assay.harness.ingest.trace.trace_diff import document_of
    from assay.reports.trace_steps import trace_document

    raise typer.Exit(deliver(trace_document(document_of(file)), json, html))


@trace_app.command()
def diff(
    a: Annotated[Path, typer.Argument(help="A trace.")],
    b: Annotated[Path, typer.Argument(help="Another one by the same writer.")],
    html: Html = None,
    json: Json = False,
) -> None:
    """Compare two traces step by step, and name the first difference. Times are shown, not compared.

    Exit codes: 0 if they are equal, 1 if they differ, 3 if they cannot be compared.
    """
    from assay.harness.ingest.trace.trace_diff import diff_files
    from assay.reports.trace_steps import trace_diff_document

    raise typer.Exit(deliver(trace_diff_document(diff_files(a, b)), json, html))
