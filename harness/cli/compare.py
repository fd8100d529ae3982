"""``assay compare``: two results, files of tensors, traces or fingerprints."""

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
        typer.Argument(help="The accepted one, then the new one: files or folders.", metavar="A B"),
    ],
    margin: Annotated[
        float,
        typer.Option(
            help="Largest loss of the mean score that still passes, as a fraction; at most 0.1.", callback=_fraction
        ),
    ] = 0.02,
    metric: Annotated[
        str, typer.Option(help="Score that counts, where a tool writes several: exact_match,strict-match for lm-eval.")
    ] = "",
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="Error up to which a token of a head is equal, of tensors; by default what rounding to their dtype explains. "
            "With 0, every bit must be equal.",
            min=0,
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            help="The model's folder: its config.json splits tensors of [tokens, heads * head_dim] into heads."
        ),
    ] = None,
    layout: Annotated[
        str, typer.Option(help="Dimensions of tensors: b, t, h, d for batch, token, head, head dim, such as bhtd.")
    ] = "",
    json: Json = False,
    html: Html = None,
    junit: Junit = None,
) -> None:
    """Compare two results, folders of runs, files of tensors, traces or fingerprints that are there.

    Exit codes: 0 B is as good as A, or equal to it; 1 it is not; 2 wrong use; 3 no verdict.
    """
    from assay.harness.fingerprint.stored import has_fingerprint, is_fingerprint

    if len(results) != 2:
        raise UsageError(
            f"{len(results)} results were named." if results[1:] else f"Only {results[0]} was named.",
            "two results, the accepted one first",
            "compare them in pairs" if results[1:] else "name the other one too",
        )
    a, b = results
    if any(map(is_fingerprint, results)) and all(map(has_fingerprint, results)):
        from assay.harness.fingerprint.differences import compare_fingerprints
        from assay.harness.fingerprint.stored import read_fingerprint
        from assay.reports.fingerprint import diff_document

        diff = compare_fingerprints(read_fingerprint(a), read_fingerprint(b))
        raise typer.Exit(deliver(diff_document(diff), json, html, junit))
        from assay.harness.ingest.comparison import PassLimits
    from assay.harness.ingest.recognise import compare as run
    from assay.harness.ingest.tensor_diff import TensorRule
    from assay.harness.ingest.tensor_layout import ModelHeads, check_axes
    from assay.reports.compare import compare_document

    rule = TensorRule(tolerance, ModelHeads.of(model) if model else None, check_axes(layout))
    result = run(a, b, PassLimits(margin), rule, metric, reproduce=as_given())
    raise typer.Exit(deliver(compare_document(result), json, html, junit))
