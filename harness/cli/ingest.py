"""Other people's logs, results and dumps: ``assay ingest``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from assay.harness.cli.app import app, console, say, trace
from assay.harness.cli.output import Json, new_folder, outcome, print_json


@app.command()
def ingest(
    files: Annotated[list[Path], typer.Argument(help="Logs, results files, traces or dumps.")],
    out: Annotated[
        Path | None,
        typer.Option(help="A folder for ingest.json, ingest.html and ingest.junit.xml.", callback=new_folder),
    ] = None,
    json: Json = False,
) -> None:
    """Read other people's logs, results, traces and dumps, and say what follows from them."""
    from assay.harness.files import write_whole
    from assay.harness.ingest.recognise import ingest as read
    from assay.reports.ingest_text import render

    result = read(files, trace)
    document = result.model_dump_json(indent=2) + "\n"
    if json:
        print_json(document)
    else:
        render(result, console)
    if out is not None:
        from assay.harness.extras import require

        require("reports", "assay ingest --out")
        from assay.reports.ingest_junit import to_junit
        from assay.reports.ingest_page import to_html

        for name, text in (
            ("ingest.json", document),
            ("ingest.html", to_html(result)),
            ("ingest.junit.xml", to_junit(result)),
        ):
            write_whole(out / name, text)
        say(f"\nReport: {out / 'ingest.html'}")
    raise typer.Exit(outcome(result.exit_code, f"{result.verdict.upper()}: {result.headline}"))
