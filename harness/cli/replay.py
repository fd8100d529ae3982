"""A kernel on recorded calls: ``assay replay``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from assay.harness.cli.app import ReadOut, app, errors, report_error
from assay.harness.cli.output import Json, deliver, progress
from assay.worker import Event


@app.command()
def replay(
    pack: Annotated[Path, typer.Argument(help="Folder of a replay pack, recorded by `assay run`.")],
    candidate: Annotated[str, typer.Option(help="A kernel: a published name, module:function, or sglang:BACKEND.")],
    read_out: ReadOut = 30.0,
    json: Json = False,
) -> None:
    """Run a kernel on recorded calls, without a server or a model, and name what is wrong with it."""
    from assay.harness.checks.jobs import ended_early
    from assay.harness.checks.jobs import replay as run
    from assay.reports.recorded_calls import replay_document

    with progress(errors) as display:

        def show(event: Event) -> None:
            if event["event"] == "runs":
                display.count(f"{candidate}: runs on recorded calls", event["done"], event["total"])

        result = run(pack, candidate, read_out=read_out, on_event=show)
    if result.not_run:
        report_error(ended_early(result.not_run, "what it had found is below"))
    raise typer.Exit(deliver(replay_document(result), json))
