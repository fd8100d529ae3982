"""Traces of engines and profilers: ``assay trace show``, ``diff``, ``record``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from assay.harness.cli.app import app, say
from assay.harness.cli.output import Html, Json, deliver, new_file
from assay.harness.extras import require

trace_app = typer.Typer(no_args_is_help=True, add_completion=False)
app.add_typer(trace_app, name="trace", help="Read a trace of an engine or a profiler, compare two, or record one.")

_REQUEST_TIMEOUT_S = 600.0
"""For a server of MLC-LLM."""


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


@trace_app.command()
def record(
    server: Annotated[str, typer.Argument(help="The URL of an MLC-LLM server.")],
    out: Annotated[Path, typer.Option(help="A file for the trace, in JSON.", callback=new_file)],
    requests: Annotated[
        int, typer.Option(help="Questions to ask first, which share a prefix; 0 only collects the trace.", min=0)
    ] = 2,
    max_tokens: Annotated[int, typer.Option(help="Token limit of an answer.", min=1)] = 32,
) -> None:
    """Record the event trace of an MLC-LLM server: of all its requests since it started."""
    require("serve", "assay trace record")
    import json

    from assay.evals.questions import PROMPT_HEADER
    from assay.harness.engines.base import ChatRequest
    from assay.harness.engines.mlc import MlcServer
    from assay.harness.files import write_whole

    with MlcServer("reference", server, _REQUEST_TIMEOUT_S) as engine:
        asks = [ChatRequest(f"{PROMPT_HEADER}\n\nHow much is {n} + {n}?", max_tokens) for n in range(1, requests + 1)]
        engine.ask(asks, 1, lambda index, reply: None)
        events = engine.event_trace()
    write_whole(out, json.dumps(events))
    say(f"{len(events):,} events of {engine.label} in {out}")
