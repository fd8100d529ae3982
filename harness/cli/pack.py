"""Replay packs from and for other tools: ``assay pack import``, ``assay pack export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from assay.harness.cli.app import app, say
from assay.harness.cli.output import Json, deliver, new_folder

pack_app = typer.Typer(
    no_args_is_help=True, help="Make a replay pack of another tool's dump or trace, or write a pack for that tool."
)
app.add_typer(pack_app, name="pack")


@pack_app.callback()
def _pack() -> None:
    """Make a replay pack of another tool's dump or trace, or write a pack for that tool."""


@pack_app.command(name="import")
def import_(
    dump: Annotated[
        Path, typer.Argument(help="A dump of SGLang, of FlashInfer's API or of hooks, or a FlashInfer Trace folder.")
    ],
    out: Annotated[Path, typer.Option(help="A new folder for the pack.", callback=new_folder)],
    model: Annotated[
        Path | None,
        typer.Option(help="The model's folder: its config.json gives heads and layers where a dump does not."),
    ] = None,
    budget_mb: Annotated[
        int, typer.Option(help="Largest size of the replay pack, in MiB; calls are sampled.", min=1)
    ] = 256,
    json: Json = False,
) -> None:
    """Make a replay pack of a dump, and report what of it could not be used."""
    from assay.harness.ingest.tensors import to_pack
    from assay.harness.ingest.tensors.dump import open_dump
    from assay.harness.ingest.tensors.flashinfer_trace import is_trace
    from assay.harness.ingest.tensors.layout import DumpedModel
    from assay.harness.reading import reading
    from assay.reports.recorded_calls import pack_document

    with reading(dump, "dump"):
        if is_trace(dump):
            made = to_pack.trace_to_pack(dump, out, budget_mb)
        else:
            shape = DumpedModel.of(model) if model else None
            made = to_pack.to_pack(open_dump(dump), out, shape, str(model or ""), budget_mb)
    deliver(pack_document(made.manifest, out, made), json)


@pack_app.command()
def export(
    pack: Annotated[Path, typer.Argument(help="Folder of a replay pack.")],
    flashinfer_trace: Annotated[
        Path,
        typer.Option(help="A new folder for definitions and workloads of flashinfer-bench.", callback=new_folder),
    ],
) -> None:
    """Write a pack as a FlashInfer Trace: definitions with a right-aligned reference, and workloads with the recorded tensors."""
    from assay.harness.ingest.tensors.flashinfer_trace import export_pack

    made = export_pack(pack, flashinfer_trace)
    for line in made.refused:
        say(f"Left out: {line}")
    counts = f"{made.workloads} workloads, {made.with_prefix} with a cached prefix"
    say(f"{counts}, of {len(made.definitions)} definitions: {flashinfer_trace}")
