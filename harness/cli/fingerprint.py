"""``assay fingerprint``: what is really being served, of a model with its flags, or of a URL; and what differs between two."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from assay.harness.cli.app import app
from assay.harness.cli.output import Html, Json, Junit, deliver, new_file, progress
from assay.harness.errors import UsageError
from assay.harness.sides import BUILTIN_MODEL, Device, hide
from assay.harness.text import did_you_mean

if TYPE_CHECKING:
    from assay.harness.evidence.fingerprint import Fingerprint

_USAGE = "assay fingerprint --model M, assay fingerprint URL, or assay fingerprint diff A B"


@app.command()
def fingerprint(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[URL] | diff A B", help="A running server; or diff, and two files of --out or folders of runs."
        ),
    ] = None,
    model: Annotated[str, typer.Option(help="Model folder or hub name; of a URL, the model to ask.")] = BUILTIN_MODEL,
    backend: Annotated[
        str, typer.Option(help="Attention backend or kernel; by default the engine's own reference.")
    ] = "",
    device: Annotated[Device, typer.Option(help="Device that the model is loaded on.")] = "cpu",
    engine_arg: Annotated[
        list[str] | None,
        typer.Option("--engine-arg", help="Flag of the engine, such as --page-size=16; may be repeated."),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option("--env", metavar="NAME=VALUE", help="Environment variable of the engine; may be repeated."),
    ] = None,
    python: Annotated[str, typer.Option("--python", help="Python whose packages read and load the model.")] = "",
    files: Annotated[
        bool,
        typer.Option(
            "--files", help="Only read the model's files, as the packages of --python do: no engine is needed."
        ),
    ] = False,
    allow: Annotated[
        list[str] | None,
        typer.Option("--allow", metavar="NAME", help="What may differ in a diff: packages, arguments.page_size, ..."),
    ] = None,
    startup_timeout: Annotated[float, typer.Option(help="Seconds until the model must be loaded.", min=1)] = 900.0,
    out: Annotated[Path | None, typer.Option(help="A file for the fingerprint.", callback=new_file)] = None,
    json: Json = False,
    html: Html = None,
    junit: Junit = None,
) -> None:
    """Show what is really being served: token ids, RoPE, weights, backends; and rank what differs between two servers."""
    from assay.harness.evidence.fingerprint import FINGERPRINT
    from assay.reports.fingerprint import fingerprint_document

    named = words or []
    _refuse_unused(context, named)
    if named[:1] == ["diff"]:
        raise typer.Exit(_diff(named[1:], allow or [], json, html, junit))
    if len(named) > 1:
        raise UsageError(f"{named[0]!r} is followed by {named[1]!r}.", _USAGE, "see assay fingerprint --help")
    if named:
        made = _of_url(named[0], model)
    else:
        made = _of_side(model, backend, device, engine_arg or [], env or [], python, files, startup_timeout)
    if out:
        FINGERPRINT.write(out.parent, made) if out.name == FINGERPRINT.name else _write(out, made)
    raise typer.Exit(deliver(fingerprint_document(made), json, html, junit))


_UNUSED = {
    "diff": ("model", "backend", "device", "engine_arg", "env", "python", "files", "startup_timeout", "out"),
    "a URL": ("backend", "device", "engine_arg", "env", "python", "files", "startup_timeout", "allow"),
    "a model": ("allow",),
}
"""The options that each form of the command does not have."""


def _refuse_unused(context: typer.Context, named: list[str]) -> None:
    """Refuse an option of another form of the command, which would do nothing.

    Raises:
        UsageError: there is one.
    """
    form = "diff" if named[:1] == ["diff"] else "a URL" if named else "a model"
    sources = {name: context.get_parameter_source(name) for name in _UNUSED[form]}
    if given := [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]:
        option = f"--{given[0].replace('_', '-')}"
        raise UsageError(f"{option} does nothing with {form}.", _USAGE, "leave it out; --json prints what diff finds")


def _write(out: Path, made: Fingerprint) -> None:
    from assay.harness.files import write_whole

    write_whole(out, made.model_dump_json(indent=1))


def _of_url(url: str, model: str) -> Fingerprint:
    from assay.harness.backend import is_server_url
    from assay.harness.extras import require
    from assay.harness.run.fingerprints import of_url

    if not (url.startswith(("http://", "https://")) and is_server_url(url)):
        raise UsageError(f"{hide('', url)!r} is no URL of a server.", _USAGE, "see assay fingerprint --help")
    require("serve", "assay fingerprint URL")
    with progress() as display, display.waiting(f"asking {url}"):
        return of_url(url, "" if model == BUILTIN_MODEL else model, 60.0)


def _of_side(
    model: str,
    backend: str,
    device: Device,
    flags: list[str],
    env: list[str],
    python: str,
    files: bool,
    timeout_s: float,
) -> Fingerprint:
    from assay.harness.extras import require
    from assay.harness.run.fingerprints import of_files, of_side
    from assay.harness.sides import Side, profile_of

    if wrong := next((pair for pair in env if "=" not in pair), None):
        raise UsageError(f"--env={wrong} has no value.", "--env NAME=VALUE", "add it")
    require("serve", "assay fingerprint")
    environment = dict(pair.split("=", 1) for pair in env)
    side = Side(
        backend=backend or profile_of("sglang").references[device],
        model=model,
        interpreter=python,
        flags=tuple(flags),
        environment=environment,
    )
    with progress() as display, display.waiting(f"reading {model}" if files else f"loading {model}"):
        return of_files(side, timeout_s) if files else of_side(side, device, timeout_s)


def _diff(named: list[str], allowed: list[str], json: bool, html: Path | None, junit: Path | None) -> int:
    from assay.harness.fingerprint.differences import RANKS, compare_fingerprints
    from assay.harness.fingerprint.stored import read_fingerprint
    from assay.reports.fingerprint import diff_document

    if unknown := [name for name in allowed if name.partition(".")[0] not in RANKS]:
        raise UsageError(
            f"--allow={unknown[0]} is no part of a fingerprint.",
            f"one of {', '.join(RANKS)}, or a name of one, as in arguments.page_size",
            did_you_mean(unknown[0], RANKS) or "take the name in brackets that a diff prints",
        )
    if len(named) != 2:
        raise UsageError(
            f"diff got {len(named)} names.",
            "two: fingerprint files, or folders of a run's server",
            "assay fingerprint diff A B",
        )
    left, right = (read_fingerprint(Path(name)) for name in named)
    return deliver(diff_document(compare_fingerprints(left, right, allowed)), json, html, junit)
