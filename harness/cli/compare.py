"""``assay compare``: two results of an evaluation tool, a benchmark, a test run, or of assay."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from assay.harness.cli.app import app, as_given, console, say


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(help="The accepted result: a file, or the output folder of a tool.")],
    b: Annotated[Path, typer.Argument(help="The new one, of the same tool.")],
    margin: Annotated[
        float, typer.Option(help="Largest loss of the mean score that still passes, as a fraction.", min=1e-6, max=0.1)
    ] = 0.02,
    alpha: Annotated[float, typer.Option(help="Error rate of each interval and test.", min=1e-6, max=0.2)] = 0.05,
    latency_bound: Annotated[
        float, typer.Option(help="Largest ratio of times, B over A, that still passes.", min=1.0)
    ] = 1.10,
    metric: Annotated[
        str, typer.Option(help="Score that counts, where a tool writes several: exact_match,strict-match for lm-eval.")
    ] = "",
    json: Annotated[Path | None, typer.Option(help="A file for the result as JSON.")] = None,
    html: Annotated[Path | None, typer.Option(help="A file for the result as an HTML page.")] = None,
    junit: Annotated[Path | None, typer.Option(help="A file for the result as JUnit XML.")] = None,
) -> None:
    """Compare two results that are already there: of an evaluation tool, a benchmark, tests, or runs."""
    from assay.harness.ingest.results.compare import Limits
    from assay.harness.ingest.results.compare import compare as run
    from assay.reports.compare_text import render_compare, write_compare_json, write_compare_junit

    result = run(a, b, Limits(margin, alpha, latency_bound), metric, reproduce=as_given())
    render_compare(result, console)
    if json:
        write_compare_json(result, json)
    if junit:
        write_compare_junit(result, junit)
    if html:
        from assay.reports.compare_page import write_compare

        write_compare(result, html)
        say(f"Report: {html}")
    raise typer.Exit(result.exit_code)
