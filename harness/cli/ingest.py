"""Other people's logs, results and dumps: ``assay ingest``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from assay.harness.cli.app import app, say, trace
from assay.harness.cli.output import Json, deliver, new_folder, outcome


@app.command()
def ingest(
    files: Annotated[list[Path], typer.Argument(help="Logs, results files, traces or dumps.")],
    out: Annotated[
        Path | None,
        typer.Option(help="A folder for ingest.json, ingest.html and ingest.junit.xml.", callback=new_folder),
    ] = None,
    json: Json = False,
) -> None:
    """Read other tools' logs, results, traces and dumps, and report what follows from them."""
    from assay.harness.ingest.recognise import ingest as read
    from assay.reports.ingest import ingest_document

    result = read(files, trace)
    document = ingest_document(result)
    deliver(document, json)
    if out is not None:
        from assay.harness.extras import require

        require("reports", "assay ingest --out")
        from assay.harness.files import write_whole
        from assay.reports.junit import document_junit
        from assay.reports.page import to_html

        for name, text in (
            ("ingest.json", result.model_dump_json(indent=2) + "\n"),
            ("ingest.html", to_html(document)),
            ("ingest.junit.xml", document_junit(document)),
        ):
            write_whole(out / name, text)
        say(f"\nReport: {out / 'ingest.html'}")
    raise typer.Exit(outcome(result.exit_code, f"{result.verdict.upper()}: {result.headline}"))
