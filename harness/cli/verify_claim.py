"""Check a claim about a run against its evidence: ``assay verify-claim``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from assay.harness.cli.app import app
from assay.harness.cli.output import Json, deliver


@app.command(name="verify-claim")
def verify_claim(
    evidence: Annotated[list[Path], typer.Argument(help="Logs, JUnit files, reports or folders of runs.")],
    says: Annotated[
        list[str],
        typer.Option(
            help='A claim: METRIC OP NUMBER, as in "MMLU >= 0.60"; "all tests passed"; or "TEST passed". May be repeated; several '
            "in one text are separated by a comma and a space."
        ),
    ],
    json: Json = False,
) -> None:
    """Check a claim about a run against the evidence: its log, results or report.

    Exit codes: 0 the evidence confirms it, 1 it refutes it, 3 it does neither.
    """
    from assay.harness.extras import require

    if any(path.suffix == ".xml" for path in evidence):
        require("reports", "assay verify-claim with a JUnit file")

    from assay.harness.ingest.claim import verify
    from assay.reports.ingest import claims_document

    raise typer.Exit(deliver(claims_document(verify(evidence, says)), json))
