"""Dumps of tensors: ``assay tensors diff``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from assay.harness.cli.app import app
from assay.harness.cli.output import Html, Json, deliver
from assay.harness.errors import UsageError

tensors_app = typer.Typer(
    no_args_is_help=True, help="Compare dumps of tensors: layer, head and token of the first and the worst difference."
)
app.add_typer(tensors_app, name="tensors")


@tensors_app.callback()
def _tensors() -> None:
    """Compare dumps of tensors: layer, head and token of the first and the worst difference."""


@tensors_app.command()
def diff(
    a: Annotated[
        Path, typer.Argument(help="The reference's dump: a folder, or a .safetensors, .pt, .npz or .npy file.")
    ],
    b: Annotated[Path, typer.Argument(help="The candidate's dump.")],
    exact: Annotated[bool, typer.Option("--exact", help="Every bit must be equal.")] = False,
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="Error up to which a token of a head is equal; by default what rounding to its dtype explains.", min=0
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="The model's folder: its config.json splits [tokens, heads * head_dim] into heads."),
    ] = None,
    layout: Annotated[
        str, typer.Option(help="Dimensions in order: b, t, h, d for batch, token, head, head dim, such as bhtd.")
    ] = "",
    json: Json = False,
    html: Html = None,
) -> None:
    """Name layer, head and token of the first and the worst difference of two dumps.

    Exit codes: 0 equal within bounds, 1 different, 2 usage error, 3 cannot be compared (what did not pair is listed).
    """
    from assay.harness.ingest.source_file import two
    from assay.harness.ingest.tensors import tensor_diff as comparing
    from assay.harness.ingest.tensors.dump import open_dump
    from assay.harness.ingest.tensors.layout import DumpedModel, check_axes
    from assay.reports.tensor_dumps import tensor_diff_document

    if exact and tolerance is not None:
        raise UsageError("--exact and --tolerance are both given.", "one of them", "drop one")
    two(a, b, "dumps")
    shape, axes = DumpedModel.of(model) if model else None, check_axes(layout)
    result = comparing.diff(open_dump(a), open_dump(b), exact=exact, tolerance=tolerance, model=shape, axes=axes)
    raise typer.Exit(deliver(tensor_diff_document(result), json, html))
