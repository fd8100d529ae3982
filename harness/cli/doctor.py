"""``assay doctor``: the requirements of a run in this environment."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from assay.harness.attention.interpreter import interpret_without_gpu
from assay.harness.cli.app import app
from assay.harness.cli.flags import Config, spec_flags
from assay.harness.cli.output import Json, console, deliver
from assay.harness.config import SERVER_FLAGS, make_spec

if TYPE_CHECKING:
    from assay.harness.run.doctor import Examination
    from assay.reports.document import Document


@app.command()
@spec_flags(SERVER_FLAGS)
def doctor(
    flags: dict[str, Any],
    config: Config = None,
    json: Json = False,
) -> None:
    """Examine this environment: what a run needs, what is here, and what to do about the rest."""
    interpret_without_gpu()

    from assay.harness.run.doctor import Examination, examine
    from assay.reports.terminal import render

    spec = make_spec(flags, config)
    examined = []
    for shown in examine(spec):  # shown at once: the last of them calls a kernel, which may hang
        render(_document(Examination(device=spec.device, examined=(shown,))), console)
        examined.append(shown)
    document = _document(Examination(device=spec.device, examined=tuple(examined)))
    raise typer.Exit(deliver(replace(document, body=()), json))


_SIGNS = {"ok": "ok     ", "missing": "MISSING", "not needed": "-      "}


def _document(made: Examination) -> Document:
    """A line for each thing that a run needs, and what to do where it is missing."""
    from assay.reports.document import Block, Cell, Document, Line

    lines: list[Block] = []
    for examined in made.examined:
        lines.append(Line((Cell(_SIGNS[examined.status], examined.status), f" {examined.id:<10}  {examined.found}")))
        lines += [Line(f"  {'':<10}  What to do: {examined.do}")] if examined.do else []
    missing = [examined.id for examined in made.examined if examined.status == "missing"]
    fails = f"A run on {made.device} would fail: {', '.join(missing)}."
    return Document(
        command="doctor",
        title=made.device,
        verdict=None,
        exit_code=int(made.exit_code),
        headline=fails if missing else f"Everything that a run on {made.device} needs is here.",
        body=lines,
        result=made,
    )
