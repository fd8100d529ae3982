"""``assay explain``: the meaning of a hypothesis or a finding."""

from __future__ import annotations

from typing import Annotated

import typer

from assay.harness.cli.app import app, console
from assay.harness.cli.output import Html, deliver
from assay.harness.errors import UsageError


@app.command()
def explain(
    id: Annotated[
        str | None, typer.Argument(help="The id of a hypothesis or finding; without one, all are listed.")
    ] = None,
    html: Html = None,
) -> None:
    """Explain a finding: its picture, wrong and right code, and public bugs of its kind."""
    from assay.harness.explain.pages import page
    from assay.harness.localize.threads import few_threads
    from assay.reports.explain import explain_document, render_list

    if id is None:
        if html:
            raise UsageError("--html was given without an id.", "assay explain ID --html FILE", "name one of the ids")
        render_list(console)
        return
    with few_threads(()):
        explained = page(id)
    deliver(explain_document(explained), html=html)
