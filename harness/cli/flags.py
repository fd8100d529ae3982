"""The flags of a run, derived from the settings of a `RunSpec` and declared once for all commands."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import wraps
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, get_args, get_origin

import typer
from pydantic_core import PydanticUndefined

from assay.harness.attention.interpreter import interpret_without_gpu
from assay.harness.backend import Backend
from assay.harness.cli.output import new_folder
from assay.harness.config import FIELDS, REPEATED, RunSpec, defaults, flag, make_spec
from assay.harness.errors import UsageError
from assay.harness.sides import Device

Config = Annotated[
    Path | None, typer.Option(help="An assay.toml; by default the one in the working directory, if any.")
]


Out = Annotated[
    Path | None,
    typer.Option(help="The run's folder; an unfinished run there is resumed.", callback=new_folder),
]


def existing(expected: str) -> Callable[[Path | None], Path | None]:
    """Make the callback of an option or argument whose folder must exist."""

    def check(path: Path | None) -> Path | None:
        if path is not None and not path.exists():
            raise UsageError(f"{path} does not exist.", expected, "check the path")
        if path is not None and not path.is_dir():
            raise UsageError(f"{path} is a file.", expected, "name the folder")
        return path

    return check


def _run_folder(path: Path) -> Path:
    """Make the callback of an argument that must be the folder of a run."""
    from assay.harness.judge.history import check_run

    check_run(path)
    return path


RunFolderArgument = Annotated[Path, typer.Argument(help="A run's folder.", callback=_run_folder)]

STARTED = {
    "reference": "attention backend of the reference",
    "candidate": "attention backend of the candidate, or a kernel as module:function",
}
"""Help of the backends' flags for commands that must start both servers themselves and refuse a URL."""


def spec_flags(
    names: Sequence[str], hidden: Collection[str] = (), about: Mapping[str, str] = MappingProxyType({})
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command flags with the names and descriptions of a `RunSpec`'s settings.

    The command's first argument receives the given flags, by field name; these flags come before the command's other options.

    Args:
        hidden: fields whose flags work but are not listed, since the command refuses their usual values.
        about: descriptions of fields with a narrower meaning in this command.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**given: Any) -> None:
            values = {name: given.pop(name) for name in names}
            settings = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items() if v is not None}
            command(settings, **given)

        others = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
        parameters = [_parameter(name, name in hidden, about.get(name, "")) for name in names]
        parameters += [other.replace(kind=inspect.Parameter.KEYWORD_ONLY) for other in others]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        del run.__wrapped__  # inspect would read the signature of the wrapped function
        return run

    return decorate


def refuse_flags_before(context: typer.Context) -> None:
    """Refuse flags before a subcommand, where they would have no effect.

    Raises:
        UsageError: a flag of the command was given before a subcommand.
    """
    command, inner = context.info_name, context.invoked_subcommand
    sources = {param.name: context.get_parameter_source(param.name) for param in context.command.params}
    given = [flag(name) for name, source in sources.items() if name and source and source.name == "COMMANDLINE"]
    if given:
        raise UsageError(
            f"Before {inner}, {', '.join(given)} would apply to {command} itself.",
            f"the flags of {command} {inner}, after the word {inner}",
            f"see assay {command} {inner} --help",
        )


def instrumented_spec(flags: Mapping[str, Any], config: Path | None) -> RunSpec:
    """Make a spec of two backends whose servers assay starts and can instrument; set up Triton for their kernels."""
    interpret_without_gpu()
    spec = make_spec(flags, config)
    for name, backend in (("--reference", spec.reference.backend), ("--candidate", spec.candidate.backend)):
        if Backend.parse(backend).is_url:
            raise UsageError(
                f"{name} is the URL {backend}.",
                "a backend or kernel that assay starts itself",
                "name one; see assay backends",
            )
    return spec


def _parameter(name: str, hidden: bool, about: str) -> inspect.Parameter:
    about = about or FIELDS[name].description or ""
    default = f"  [default: {_default_text(name)}]" if _default_text(name) else ""
    option = typer.Option(
        flag(name), help=f"{about[0].upper()}{about[1:]}.{default}", show_default=False, hidden=hidden
    )
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=None, annotation=Annotated[_type(name) | None, option])


def _default_text(name: str) -> str:
    """Return a field's default as its flag would be given, or an empty string if none exists or the description states it."""
    devices: tuple[Device, ...] = get_args(Device)
    by_device = {device: values[name] for device in devices if name in (values := defaults(device))}
    if by_device:
        if len(set(by_device.values())) == 1:
            return str(by_device["cpu"])
        return ", ".join(f"{value} with --device {device}" for device, value in by_device.items())
    default = FIELDS[name].default
    if default is None or default == "" or default == () or default is PydanticUndefined:
        return ""
    return (
        ",".join(map(str, default))
        if isinstance(default, tuple)
        else f"{default:g}"
        if isinstance(default, float)
        else str(default)
    )


def _type(name: str) -> Any:
    """Return a flag's type: a number, or text that `RunSpec` parses; a list of either for flags that may be repeated."""
    if name in REPEATED:
        return list[str]
    annotation = FIELDS[name].annotation
    kinds = {annotation} if get_origin(annotation) is None else set(get_args(annotation))
    return next((number for number in (int, float) if number in kinds), str)
