"""Bisecting: ``assay bisect layers``. Other commands of the group register on `bisect_app`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from assay.harness.attention.interpreter import interpret_without_gpu
from assay.harness.cli.app import app, console
from assay.harness.cli.flags import SERVER_FLAGS, Config, spec_flags
from assay.harness.config import make_spec
from assay.harness.errors import UsageError

bisect_app = typer.Typer(no_args_is_help=True, help="Find the layers, or the commit, that an error comes from.")
app.add_typer(bisect_app, name="bisect")


@bisect_app.command()
@spec_flags(SERVER_FLAGS)
def layers(
    flags: dict[str, Any],
    questions: Annotated[int, typer.Option(help="Questions in each probe.", min=1)] = 32,
    by: Annotated[
        Literal["answers", "text"] | None,
        typer.Option(
            help="What must be right again: the answers to the questions, or the exact greedy text; by default the answers, if "
            "the reference knows enough of them to lose some."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A new folder for the server's log and bisect.json.")] = None,
    config: Config = None,
) -> None:
    """Find the layers that must run the reference for the task to be right again, in one running server."""
    from assay.harness.bisect.layer_probes import bisect_layers
    from assay.harness.collect.plan import prepare
    from assay.harness.collect.run_folder import default_folder
    from assay.harness.engines.backend import Backend
    from assay.harness.progress import ProgressDisplay
    from assay.reports.bisect_layers import render_layers

    interpret_without_gpu()
    spec = make_spec(flags | {"questions": questions, "greedy_prompts": 0}, config)
    for name, backend in (("--reference", spec.reference), ("--candidate", spec.candidate)):
        if Backend.parse(backend).is_url:
            raise UsageError(
                f"{name} is the URL {backend}.",
                "a backend or kernel that assay starts itself",
                "name one; see assay backends",
            )
    plan = prepare(spec)
    folder = out or default_folder(spec)
    with ProgressDisplay(console) as display:
        result = bisect_layers(plan, by, folder, display)
    render_layers(result, console)
    console.print(f"Details: {folder / 'bisect.json'}", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(result.exit_code)
