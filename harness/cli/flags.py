"""The flags of a run, derived from the fields of `RunSpec`: declared once for all commands."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer

from assay.harness.attention.interpreter import interpret_without_gpu
from assay.harness.backend import Backend
from assay.harness.config import RunSpec, flag, make_spec
from assay.harness.errors import UsageError

_PANELS = {
    "Latency": ("latency_shapes", "latency_concurrency", "latency_seconds", "latency_bound"),
    "Advanced": (
        "alpha", "greedy_margin", "concurrency", "max_tokens", "require", "growth", "budget_mb", "servers", "startup_timeout",
        "request_timeout",
    ),
}  # fmt: skip

Config = Annotated[
    Path | None, typer.Option(help="An assay.toml; by default the one in the working directory, if any.")
]
Out = Annotated[Path | None, typer.Option(help="The run's folder; an unfinished run there is resumed.")]


def spec_flags(names: Sequence[str], short: str = "") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command flags named and described as fields of `RunSpec`.

    The command receives those that were given, by field name, as its first argument; the flags come before its other options.

    Args:
        names: fields.
        short: a prefix of field names that a flag may leave out: with "latency_", ``--bound`` is ``--latency-bound``.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**given: Any) -> None:
            values = {name: given.pop(name) for name in names}
            command({name: _value(value) for name, value in values.items() if value is not None}, **given)

        others = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
        parameters = [_parameter(name, short) for name in names] + [
            other.replace(kind=inspect.Parameter.KEYWORD_ONLY) for other in others
        ]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        del run.__wrapped__  # inspect would read the signature of the wrapped function
        return run

    return decorate


def instrumented_spec(flags: Mapping[str, Any], config: Path | None) -> RunSpec:
    """Make a spec of two backends whose servers assay starts and can instrument, and set up Triton for their kernels.

    Raises:
        UsageError: one of them is a URL.
    """
    interpret_without_gpu()
    spec = make_spec(flags, config)
    for name, backend in (("--reference", spec.reference), ("--candidate", spec.candidate)):
        if Backend.parse(backend).is_url:
            raise UsageError(
                f"{name} is the URL {backend}.",
                "a backend or kernel that assay starts itself",
                "name one; see assay backends",
            )
    return spec


def _parameter(name: str, short: str) -> inspect.Parameter:
    names = [name.removeprefix(short), name] if short and name.startswith(short) else [name]
    option = typer.Option(
        *map(flag, names),
        help=RunSpec.model_fields[name].description,
        rich_help_panel=next((panel for panel, fields in _PANELS.items() if name in fields and not short), None),
        show_default=False,
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[_type(name) | None, option]
    )


def _type(name: str) -> Any:
    """The type of a flag: a number, or text for everything that `RunSpec` itself parses. ``--engine-arg`` may be repeated."""
    if name == "engine_arg":
        return list[str]
    annotation = RunSpec.model_fields[name].annotation
    kinds = {annotation} if get_origin(annotation) is None else set(get_args(annotation))
    return next((number for number in (int, float) if number in kinds), str)


def _value(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
