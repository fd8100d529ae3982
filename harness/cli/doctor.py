"""``assay doctor``: the requirements of a run in this environment."""

from __future__ import annotations

from typing import Any

import typer

from assay.harness.attention.interpreter import interpret_without_gpu
from assay.harness.cli.app import app, say
from assay.harness.cli.flags import Config, spec_flags
from assay.harness.cli.output import Json, print_json
from assay.harness.config import SERVER_FLAGS, make_spec
from assay.harness.errors import ExitCode


@app.command()
@spec_flags(SERVER_FLAGS)
def doctor(
    flags: dict[str, Any],
    config: Config = None,
    json: Json = False,
) -> None:
    """Examine this environment: what a run needs, what is here, and what to do about the rest."""
    interpret_without_gpu()

    from assay.harness.doctor import Examination, Examined, examine

    def show(examined: Examined) -> Examined:
        if not json:
            say(f"{_SIGNS[examined.status]} {examined.id:<10}  {examined.found}")
            if examined.do:
                say(f"  {'':<10}  What to do: {examined.do}")
        return examined

    spec = make_spec(flags, config)
    made = Examination(device=spec.device, examined=tuple(show(one) for one in examine(spec)))
    if json:
        print_json(made.model_dump_json(indent=2, by_alias=True))
    elif made.exit_code == ExitCode.PASS:
        say(f"Everything that a run on {spec.device} needs is here.")
    else:
        missing = [one.id for one in made.examined if one.status == "missing"]
        say(f"A run on {spec.device} would fail: {', '.join(missing)}.")
    raise typer.Exit(made.exit_code)


_SIGNS = {"ok": "ok     ", "missing": "MISSING", "not needed": "-      "}
