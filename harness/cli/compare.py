"""``assay compare``: two results of an evaluation tool, a benchmark or a test run; or runs of assay, two or more."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from assay.harness.cli.app import app, as_given
from assay.harness.cli.output import Html, Json, Junit, deliver
from assay.harness.config import points_meant
from assay.harness.errors import UsageError
from assay.harness.policy import WIDEST_MARGIN


def _fraction(margin: float) -> float:
    if not 0 < margin <= WIDEST_MARGIN:
        raise UsageError(
            f"--margin is {margin:g}.",
            f"more than 0 and at most {WIDEST_MARGIN:g}, as a fraction",
            points_meant("--margin", margin) or "give another value, or leave it out",
        )
    return margin


@app.command()
def compare(
    results: Annotated[
        list[Path],
        typer.Argument(
            help="The accepted result, then the new one of the same tool: files or folders. Of runs, two or more."
        ),
    ],
    margin: Annotated[
        float,
        typer.Option(
            help="Largest loss of the mean score that still passes, as a fraction; at most 0.1.", callback=_fraction
        ),
    ] = 0.02,
    alpha: Annotated[float, typer.Option(help="Error rate of each interval and test.", min=1e-6, max=0.2)] = 0.05,
    latency_bound: Annotated[
        float, typer.Option(help="Largest ratio of times, B over A, that still passes.", min=1.0)
    ] = 1.10,
    length_bound: Annotated[
        float,
        typer.Option(
            help="Largest change of the length of answers that passes, as a fraction, where the files record tokens.",
            min=1e-6,
            max=0.5,
        ),
    ] = 0.05,
    metric: Annotated[
        str, typer.Option(help="Score that counts, where a tool writes several: exact_match,strict-match for lm-eval.")
    ] = "",
    json: Json = False,
    html: Html = None,
    junit: Junit = None,
) -> None:
    """Compare results that are there: two of an evaluation tool, a benchmark or tests; or two or more runs."""
    from assay.harness.fingerprint.stored import has_fingerprint, is_fingerprint
    from assay.harness.ingest.results.compare_results import PassLimits
    from assay.harness.ingest.results.side_by_side import are_runs

    if len(results) < 2:
        raise UsageError(f"Only {results[0]} was named.", "two results, or two or more runs", "name the other one too")
    if len(results) == 2 and any(map(is_fingerprint, results)) and all(map(has_fingerprint, results)):
        from assay.harness.fingerprint.differences import compare_fingerprints
        from assay.harness.fingerprint.stored import read_fingerprint
        from assay.reports.fingerprint import diff_document

        diff = compare_fingerprints(read_fingerprint(results[0]), read_fingerprint(results[1]))
        raise typer.Exit(deliver(diff_document(diff), json, html, junit))
    limits = PassLimits(margin, alpha, latency_bound, length_bound)
    if are_runs(results):
        from assay.harness.ingest.results.side_by_side import compare_runs
        from assay.reports.compare import runs_compared_document

        raise typer.Exit(deliver(runs_compared_document(compare_runs(results, limits, as_given())), json, html, junit))
    if len(results) > 2:
        raise UsageError(
            f"{len(results)} results were named, and not all of them are runs of assay.",
            "two results; only of runs more than two",
            "compare them in pairs",
        )
    from assay.harness.ingest.results.compare_results import compare as run
    from assay.reports.compare import compare_document

    result = run(results[0], results[1], limits, metric, reproduce=as_given())
    raise typer.Exit(deliver(compare_document(result), json, html, junit))
