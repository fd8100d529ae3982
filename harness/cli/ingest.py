"""Other people's logs, results and dumps: ``assay ingest``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from assay.harness.cli.app import app, trace
from assay.harness.cli.output import Json, deliver, new_folder
from assay.harness.extras import require


@app.command()
def ingest(
    files: Annotated[list[Path], typer.Argument(help="Logs, results files, traces or tensors.")],
    out: Annotated[
        Path | None,
        typer.Option(help="A folder for ingest.json, ingest.html and ingest.junit.xml.", callback=new_folder),
    ] = None,
    json: Json = False,
) -> None:
    """Read other tools' logs, results, traces and tensors, and report what follows from them."""
    if out is not None:
        require("reports", "assay ingest --out")
    from assay.harness.files import write_whole
    from assay.harness.ingest.recognise import ingest as read
    from assay.reports.ingest import ingest_document

    result = read(files, trace)
    document = ingest_document(result)
    if out is None:
        raise typer.Exit(deliver(document, json))
    write_whole(out / "ingest.json", result.model_dump_json(indent=2) + "\n")
    raise typer.Exit(deliver(document, json, out / "ingest.html", out / "ingest.junit.xml"))
