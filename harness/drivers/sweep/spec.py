"""The request of a sweep, from ``sweep.toml`` and ``--set``, and its result, to which `assay.harness.schema.RULE` applies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self, get_args

from pydantic import Field, ValidationError, field_validator, model_validator

from assay.harness.config import expectation
from assay.harness.errors import UsageError
from assay.harness.reading import read_toml
from assay.harness.schema import RULE, Part
from assay.harness.sides import Settings
from assay.harness.statement import Worded
from assay.harness.text import did_you_mean
from assay.harness.verdict import Decided, Verdict

SCHEMA: Literal["assay.sweep/4"] = "assay.sweep/4"
_Command = Literal["check", "replay", "run", "bench"]
COMMANDS: tuple[_Command, ...] = get_args(_Command)
Value = str | int | float | bool | tuple[str | int | float, ...]
"""The value of a flag: true or false for a switch, several for a flag that may be repeated."""
CELLS, CELL, OUT = "cells", "cell.json", "out"
"""A sweep's folder of cells, each in a folder named by its key; the cell's record there, and the evidence of its command."""
RESULT, LOG = "result.json", "log.txt"
"""Files next to a cell's record: what the command printed with ``--json``, and everything else that it printed."""


class Limits(Settings):
    """The resources and the time of a cell. A cell that takes longer is ended, and its verdict is error."""

    gpus: int = Field(0, ge=0, description="GPUs of a cell; it sees no others")
    accelerator: str = Field("", description="kind of GPU, as Ray names it: H100, A100, L4; only with --ray")
    cpus: float = Field(1.0, gt=0, description="cores that a cell counts as; only Ray places cells by them")
    minutes: float = Field(240.0, gt=0, description="time")


class SweepSpec(Settings):
    """Everything that decides what a sweep does. Names of flags use ``_`` for ``-``."""

    command: _Command
    axes: dict[str, tuple[Value, ...]] = Field(
        min_length=1, description="values by name of a flag; one value is a constant"
    )
    limits: Limits = Limits()
    runtime_env: dict[str, Any] = Field({}, description="environment of the workers, in Ray's format; only with --ray")

    @field_validator("axes", mode="before")
    @classmethod
    def _spelled_alike(cls, given: Any) -> Any:
        """Spell names with ``_``, and turn a single value of an axis into a list."""
        if not isinstance(given, dict):
            return given
        return {
            name.replace("-", "_"): value if isinstance(value, list | tuple) else [value]
            for name, value in given.items()
        }

    @model_validator(mode="after")
    def _axes_agree(self) -> Self:
        for name, values in self.axes.items():
            if not values:
                raise ValueError(f"the axis {name} with at least one value")
            if len({*map(repr, values)}) < len(values):
                raise ValueError(f"the axis {name} with each value once")
        return self


class SweptCell(Part):
    """A cell of a sweep: an assay command for one combination of the axes' values."""

    key: str = Field(description="hash of what decides it: command, code under test, files, environment, device kind")
    command: tuple[str, ...] = Field(
        description='words of the command without secrets, such as "check", "mine:forward", "--size=full"'
    )
    given: tuple[str, ...] = Field((), exclude=True, repr=False, description="the same words as actually run")
    axes: dict[str, str] = Field(description="value by name of axis, without secrets")
    verdict: Verdict | None = Field(None, description="null for a cell that did not run")
    headline: str = Field("", description="the result as a sentence")
    problem: str = Field("", description="why the result is missing")
    seconds: float = 0.0


class SweepResult(Decided, Worded):
    __doc__ = f"A sweep: its verdict is that of its worst cell. {RULE}"

    words = ("headline",)

    schema_id: Literal["assay.sweep/4"] = Field(SCHEMA, alias="schema")

    command: str = Field(description="the command that repeats it")
    folder: str
    created: str = Field(description="ISO 8601, UTC")
    seconds: float
    axes: dict[str, tuple[str, ...]]
    cells: tuple[SweptCell, ...]
    interrupted: bool = False


def make_spec(source: str, sets: Sequence[str]) -> SweepSpec:
    """Read a ``sweep.toml``, or use a command's name instead, and add the axes of ``--set``, which replace the file's.

    Raises:
        UsageError: the file cannot be read, or something in it is invalid.
    """
    if source not in COMMANDS and not Path(source).is_file():
        expected = f"a sweep.toml, or one of {', '.join(COMMANDS)} with --set"
        near = did_you_mean(source, COMMANDS) or "check the path; docs/sweeps.md has an example"
        raise UsageError(f"The file {source} does not exist.", expected, near)
    given: dict[str, Any] = {"command": source} if source in COMMANDS else read_toml(Path(source))
    axes: dict[str, list[str]] = {}
    for word in sets:
        name, equals, values = word.partition("=")
        name = name.replace("-", "_").strip("_")
        if not equals or not name or not all(values.split(",")):
            raise UsageError(f"--set is {word!r}.", "an axis with its values", "write it as in --set candidate=a,b")
        axes[name] = values.split(",")
    try:
        own = {name.replace("-", "_"): values for name, values in given.get("axes", {}).items()}
        return SweepSpec(**{**given, "axes": {**own, **axes}})
    except ValidationError as error:
        raise _wrong(source, error) from None
    except (AttributeError, TypeError):
        raise UsageError(f"{source} is not a sweep.", "tables of TOML", "see docs/sweeps.md") from None


def _wrong(source: str, error: ValidationError) -> UsageError:
    first = error.errors()[0]
    place = [str(part) for part in first["loc"] if not str(part).startswith(("str", "int", "float", "bool", "tuple"))]
    where = ".".join(place)
    if first["type"] == "extra_forbidden":
        known = [*(Limits if place[0] == "limits" else SweepSpec).model_fields]
        near = did_you_mean(place[-1], known)
        return UsageError(f"{source}: the key {where!r} is unknown.", f"one of {', '.join(known)}", near or "remove it")
    if first["type"] == "missing":
        return UsageError(f"{source} has no {where}.", where, 'add it, as in command = "check"; see docs/sweeps.md')
    if (first["type"], where) == ("too_short", "axes"):
        return UsageError(f"{source} has no axis.", "at least one axis", "add one, as in --set candidate=a,b")
    problem = f"{source}: {where} is {first['input']!r}." if where else f"{source} contradicts itself."
    return UsageError(problem, expectation(first["msg"]), "correct it")
