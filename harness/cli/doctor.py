"""``assay doctor``: before the first run, check what a run needs."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any

import typer

from assay.harness.attention.interpreter import interpret_without_gpu
from assay.harness.cli.app import app
from assay.harness.cli.flags import Config, spec_flags
from assay.harness.cli.output import deliver, progress
from assay.harness.config import SERVER_FLAGS, is_candidate_named, make_spec

if TYPE_CHECKING:
    from assay.harness.run.doctor import Examination
    from assay.reports.document import Document


@app.command()
@spec_flags(SERVER_FLAGS)
def doctor(
    flags: dict[str, Any],
    config: Config = None,
) -> None:
    """Check this environment: what a run needs, what is installed, and how to get the rest."""
    interpret_without_gpu()

    from assay.harness.run.doctor import Examination, examine

    spec, examined = make_spec(flags, config), list[Any]()
    # Suppress what imports print and warn of, so that the answer comes first. The last step calls a kernel, which may hang.
    with (
        progress() as display,
        display.waiting("examining", lambda: f"the last step was {examined[-1].id}" if examined else ""),
        redirect_stdout(sys.stderr),
        _unwarned(),
    ):
        for shown in examine(spec, is_candidate_named(flags, config)):
            examined.append(shown)
    raise typer.Exit(deliver(_document(Examination(device=spec.device, examined=tuple(examined)))))


@contextmanager
def _unwarned() -> Iterator[None]:
    """Silence warnings: other packages warn of devices that are not here."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


_SIGNS = {"ok": "ok     ", "missing": "MISSING", "not needed": "-      "}


def _document(made: Examination) -> Document:
    """List everything that a run needs, one line each, and how to get what is missing."""
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
