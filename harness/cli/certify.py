"""The certificate: ``assay certify``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from assay.harness.cli.app import app, console, errors, say

MATRIX = "certificate.md"


@app.command()
def certify(
    out: Annotated[Path, typer.Option(help="Folder of the results: a repeated command goes on from there.")] = Path(
        "certificate"
    ),
    device: Annotated[str | None, typer.Option(help="Device to run on; by default a GPU, if there is one.")] = None,
    fault: Annotated[list[str] | None, typer.Option(help="Only the fault with this id; may be repeated.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the matrix and of its data.", min=0)] = 0,
    time_limit: Annotated[float, typer.Option(help="Longest examination of one fault, in seconds.", min=1)] = 120.0,
) -> None:
    """Seed every fault of the catalogue, and certify which of them are caught, named and pinned, and that nothing else is flagged.

    Exit codes: 0 if every fault that shows was caught and there was no false alarm, 1 if not, 3 if something was not examined.
    """
    from assay.harness.attention.call import default_device
    from assay.harness.certify.op_level import OpLevel
    from assay.harness.certify.op_tasks import op_envelope, op_tasks
    from assay.harness.certify.session import certify as run
    from assay.harness.files import write_whole
    from assay.harness.progress import ProgressDisplay
    from assay.reports.certificate_text import markdown, render

    level = OpLevel(device or default_device(), seed)
    tasks = op_tasks(level, fault or ())
    certificate = run(tasks, op_envelope(level), out, ProgressDisplay(errors), time_limit)
    write_whole(out / MATRIX, markdown(certificate))
    render(certificate, console)
    say(f"Written: {out / MATRIX}, {out / 'certificate.json'}")
    raise typer.Exit(certificate.exit_code)
