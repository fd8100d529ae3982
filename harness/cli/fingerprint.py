"""``assay fingerprint``: what a model with its flags, or the server at a URL, really runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from assay.harness.cli.app import app
from assay.harness.cli.output import deliver, new_file, progress
from assay.harness.errors import UsageError
from assay.harness.files import write_whole
from assay.harness.sides import BUILTIN_MODEL, Device, Engine, Side, hide, profile_of

if TYPE_CHECKING:
    from assay.harness.evidence.fingerprint import Fingerprint

_USAGE = "assay fingerprint --model M, or assay fingerprint URL"
# Options that a running server has already decided.
_OF_A_MODEL = ("engine", "backend", "device", "engine_arg", "env", "python", "startup_timeout")


@app.command()
def fingerprint(
    context: typer.Context,
    url: Annotated[str, typer.Argument(metavar="[URL]", help="A running server.", show_default=False)] = "",
    model: Annotated[str, typer.Option(help="Model folder or hub name; with a URL, the model to ask.")] = BUILTIN_MODEL,
    engine: Annotated[Engine, typer.Option(help="Engine that loads the model.")] = "sglang",
    backend: Annotated[
        str, typer.Option(help="Attention backend or kernel; by default the engine's own reference.")
    ] = "",
    device: Annotated[Device, typer.Option(help="Device to load the model on.")] = "cpu",
    engine_arg: Annotated[
        list[str] | None,
        typer.Option("--engine-arg", help="Engine flag, such as --page-size=16; may be repeated."),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option("--env", metavar="NAME=VALUE", help="Environment variable of the engine; may be repeated."),
    ] = None,
    python: Annotated[str, typer.Option("--python", help="Python interpreter whose packages load the model.")] = "",
    startup_timeout: Annotated[float, typer.Option(help="Seconds until the model must have loaded.", min=1)] = 900.0,
    out: Annotated[Path | None, typer.Option(help="A file for the fingerprint.", callback=new_file)] = None,
) -> None:
    """Show what is really served: token ids, RoPE, weights, backends. ``assay compare`` ranks the differences between two."""
    from assay.harness.evidence.fingerprint import FINGERPRINT
    from assay.reports.fingerprint import fingerprint_document

    if url:
        sources = {name: context.get_parameter_source(name) for name in _OF_A_MODEL}
        if given := [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]:
            option = f"--{given[0].replace('_', '-')}"
            raise UsageError(f"{option} does nothing with a URL.", _USAGE, "leave it out")
        made = _of_url(url, model)
    else:
        if wrong := next((pair for pair in env or () if "=" not in pair), None):
            raise UsageError(f"--env={wrong} has no value.", "--env NAME=VALUE", "add it")
        side = Side(
            engine=engine, backend=backend or profile_of(engine).references[device], model=model, interpreter=python,
            flags=tuple(engine_arg or ()), environment=dict(pair.split("=", 1) for pair in env or ()),
        )  # fmt: skip
        made = _of_side(side, device, startup_timeout)
    if out and out.name == FINGERPRINT.name:
        FINGERPRINT.write(out.parent, made)
    elif out:
        write_whole(out, made.model_dump_json(indent=1))
    raise typer.Exit(deliver(fingerprint_document(made)))


def _of_url(url: str, model: str) -> Fingerprint:
    from assay.harness.backend import is_server_url
    from assay.harness.extras import require
    from assay.harness.run.fingerprints import of_url

    if not (url.startswith(("http://", "https://")) and is_server_url(url)):
        raise UsageError(f"{hide('', url)!r} is not the URL of a server.", _USAGE, "see assay fingerprint --help")
    require("serve", "assay fingerprint URL")
    with progress() as display, display.waiting(f"asking {url}"):
        return of_url(url, "" if model == BUILTIN_MODEL else model, 60.0)


def _of_side(side: Side, device: Device, timeout_s: float) -> Fingerprint:
    from assay.harness.extras import require
    from assay.harness.run.fingerprints import of_side

    require("serve", "assay fingerprint")
    with progress() as display, display.waiting(f"loading {side.model}"):
        return of_side(side, device, timeout_s)
