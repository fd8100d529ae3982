"""``assay invariance``: features that should not affect outputs, toggled alone and in pairs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from assay.harness.cli.app import app
from assay.harness.cli.flags import STARTED, Config, instrumented_spec, spec_flags
from assay.harness.cli.output import deliver, new_folder, progress
from assay.harness.config import INVARIANCE_FLAGS
from assay.harness.extras import require
from assay.harness.files import write_whole

if TYPE_CHECKING:
    from assay.harness.judge.invariance_result import InvarianceResult


@app.command()
@spec_flags(INVARIANCE_FLAGS, about=STARTED)
def invariance(
    flags: dict[str, Any],
    features: Annotated[
        str,
        typer.Option(help="Features to toggle, by id, separated by commas; by default all that this setup supports."),
    ] = "",
    together: Annotated[
        bool,
        typer.Option(
            "--together",
            help="Turn all of --features on in one variant, and each alone if that differs. By default every two features are on "
            "together in some variant, and each without the other.",
        ),
    ] = False,
    out: Annotated[Path | None, typer.Option(help="A new folder for the evidence.", callback=new_folder)] = None,
    config: Config = None,
) -> None:
    """Toggle features that should not affect outputs (prefix cache, chunks, pages, overlap, ...), and compare each time."""
    require("serve", "assay invariance")

    from assay.harness.run.run import compare_features
    from assay.harness.run.run_folder import default_folder

    spec = instrumented_spec({"candidate": "torch_native", **flags}, config)
    folder = out or Path(f"{default_folder(spec.reference.backend)}-invariance")
    named = tuple(dict.fromkeys(name.strip() for name in features.split(",") if name.strip()))
    with progress() as display:
        result = compare_features(spec, folder, features=named, together=together, display=display)
    raise typer.Exit(show_features(result, folder))


def show_features(result: InvarianceResult, folder: Path) -> int:
    """Write a result and its page into its folder, show it, and return the exit code."""
    from assay.reports.invariance import invariance_document

    document = invariance_document(result)
    write_whole(folder / "invariance.json", document.json(result) + "\n")
    return deliver(document, folder / "invariance.html")
