"""Existing files: ``assay compare`` and ``assay ingest``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from assay.harness.cli.app import app, as_given
from assay.harness.cli.output import deliver, trace
from assay.harness.errors import UsageError
from assay.harness.text import did_you_mean

if TYPE_CHECKING:
    from assay.reports.document import Document


@app.command()
def compare(
    results: Annotated[
        list[Path],
        typer.Argument(
            help="The accepted file or folder, then the new one.",
            metavar="A B",
        ),
    ],
    margin: Annotated[
        float,
        typer.Option(help="Largest loss of the mean score that still passes, as a fraction; at most 0.1."),
    ] = 0.02,
    metric: Annotated[
        str, typer.Option(help="Score to compare, if a tool writes several: exact_match,strict-match for lm-eval.")
    ] = "",
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="Tensors: error up to which a cell counts as equal; by default the rounding error of their dtype. "
            "With 0, every bit must be equal.",
            min=0,
        ),
    ] = None,
    layout: Annotated[
        str,
        typer.Option(
            help="Tensors: order of dimensions, with b, t, h, d for batch, token, head, head dim, as in bhtd."
        ),
    ] = "",
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Fingerprints: what may differ, such as packages or arguments.page_size."),
    ] = None,
) -> None:
    """Compare two existing results, run folders, traces, fingerprints or files of tensors.

    Exit codes: 0 B is as good as A, or equal to it; 1 it is not; 2 usage error; 3 no verdict.
    """
    if len(results) != 2:
        named = f"Only {results[0]} was named." if len(results) == 1 else f"{len(results)} results were named."
        do = "name the other one too" if len(results) == 1 else "compare them in pairs"
        raise UsageError(named, "two results, the accepted one first", do)
    a, b = results
    if (compared := _compare_fingerprints(a, b, allow or [])) is not None:
        raise typer.Exit(deliver(compared))
    if allow:
        raise UsageError("--allow does nothing with these files.", "--allow with two fingerprints", "leave it out")
    from assay.harness.ingest.recognise import compare as run
    from assay.harness.ingest.tensor_diff import TensorRule
    from assay.harness.ingest.tensor_layout import check_axes
    from assay.reports.compare import compare_document

    rule = TensorRule(tolerance, check_axes(layout))
    result = run(a, b, margin, rule, metric, reproduce=as_given())
    raise typer.Exit(deliver(compare_document(result)))


def _compare_fingerprints(a: Path, b: Path, allowed: list[str]) -> Document | None:
    """Compare the fingerprints in two files, servers or runs, or return None if they hold none."""
    from assay.harness.evidence.fingerprint import has_fingerprint, is_fingerprint, read_fingerprint

    if not (any(map(is_fingerprint, (a, b))) and all(map(has_fingerprint, (a, b)))):
        return None
    from assay.harness.fingerprint.differences import RANKS, compare_fingerprints
    from assay.reports.fingerprint import diff_document

    if unknown := [name for name in allowed if name.partition(".")[0] not in RANKS]:
        raise UsageError(
            f"--allow={unknown[0]} is not a part of a fingerprint.",
            f"one of {', '.join(RANKS)}, or a name of one, as in arguments.page_size",
            did_you_mean(unknown[0], RANKS) or "take the name in brackets that a comparison prints",
        )
    return diff_document(compare_fingerprints(read_fingerprint(a), read_fingerprint(b), allowed))


@app.command()
def ingest(
    files: Annotated[list[Path], typer.Argument(help="Logs, results files, traces or tensors.")],
) -> None:
    """Read other tools' logs, results, traces and tensors, and report what follows from them."""
    from assay.harness.ingest.recognise import ingest as read
    from assay.reports.ingest import ingest_document

    raise typer.Exit(deliver(ingest_document(read(files, trace))))
