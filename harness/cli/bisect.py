"""Bisecting: ``assay bisect layers``. Other commands of the group register on `bisect_app`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from assay.harness.cli.app import app, say
from assay.harness.cli.flags import STARTED, Config, instrumented_spec, spec_flags
from assay.harness.cli.output import Json, deliver, new_folder, progress
from assay.harness.config import BISECT_FLAGS
from assay.harness.extras import require

bisect_app = typer.Typer(no_args_is_help=True, help="Find the layers, or the commit, that an error comes from.")
app.add_typer(bisect_app, name="bisect")


@bisect_app.command()
@spec_flags(BISECT_FLAGS, about=STARTED)
def layers(
    flags: dict[str, Any],
    questions: Annotated[int, typer.Option(help="Questions in each probe.", min=1)] = 32,
    by: Annotated[
        Literal["answers", "text"] | None,
        typer.Option(
            help="What must be correct again: the answers to the questions, or the exact greedy text; by default the answers, "
            "if the reference gets enough of them right."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="A new folder for the server's log and bisect.json.", callback=new_folder)
    ] = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """Find the layers that must run the reference for the output to be correct again, in one running server.

    Exit codes: 0 no layer needs the reference, 1 layers were found, 2 usage error, 3 undecided.

    """
    require("serve", "assay bisect layers")

    from assay.harness.drivers.bisect.layer_probes import bisect_layers
    from assay.harness.run.plan import prepare
    from assay.harness.run.run_folder import default_folder
    from assay.reports.layer_bisection import layers_document

    spec = instrumented_spec(flags | {"questions": questions, "suites": "accuracy,layers"}, config)
    plan = prepare(spec)
    folder = out or default_folder(spec.candidate.backend)
    with progress() as display:
        result = bisect_layers(plan, by, folder, display)
    say(f"Details: {folder / 'bisect.json'}")
    raise typer.Exit(deliver(layers_document(result), json))
