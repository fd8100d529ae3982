"""A sweep -> its cells: the product of the axes, as command lines, each with a key. Pure functions."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from assay.harness.backend import Backend
from assay.harness.errors import UsageError
from assay.harness.sides import Side
from assay.harness.sweep.spec import DEVICE_AXIS, Command, SweepSpec, Value
from assay.harness.text import did_you_mean

Axes = Mapping[str, Value]
HONEST = "torch.nn.functional:scaled_dot_product_attention"
"""The kernel beside which a pack is recorded: one for all candidates, so that all are replayed on the same calls."""
_RECORD = "record"


@dataclass(frozen=True)
class Option:
    """An option or argument of a command, as an axis names it.

    Attributes:
        flag: as on a command line; empty for an argument.
        kind: whether it takes a value, takes none, or may be repeated.
        off: the flag that turns a switch off; empty if there is none.
        required: whether the command needs it.
    """

    flag: str
    kind: Literal["value", "switch", "repeated"] = "value"
    off: str = ""
    required: bool = False


Options = Mapping[str, Option]
"""The options of a command by name, with ``_`` for ``-``."""


@dataclass(frozen=True)
class SweepCell:
    """A cell that is to be run.

    Attributes:
        key: hash of what decides it.
        command: words of the command, without those that say where it runs.
        axes: value by name of axis, of those that the command takes, or the one that recorded its pack.
        accelerator: kind of GPU that it needs; empty for any.
        pack: key of the cell that records its pack; empty for none.
    """

    key: str
    command: tuple[str, ...]
    axes: Mapping[str, str]
    accelerator: str = ""
    pack: str = ""


@dataclass(frozen=True)
class Combination:
    """A combination of values of the axes, and its cells in the order of the stages."""

    axes: Mapping[str, str]
    cells: tuple[SweepCell, ...]


@dataclass(frozen=True)
class SweepPlan:
    """A sweep's combinations, and all cells that they share, by key: those that record packs first."""

    combinations: tuple[Combination, ...]
    cells: Mapping[str, SweepCell]


Identify = Callable[[Mapping[str, Value], str], Mapping[str, str]]
"""Returns what decides a cell besides its command: receives its flags by name, and the kind of GPU."""


def plan(spec: SweepSpec, options: Mapping[str, Options], identify: Identify) -> SweepPlan:
    """Make the cells of a sweep.

    Args:
        spec: the sweep.
        options: of each of its commands, and of ``record``.
        identify: returns the code, the environment and the device kind that a cell's key holds.

    Raises:
        UsageError: an axis or a constant is an option of none of the commands, or a command lacks one that it needs.
    """
    stages: tuple[str, ...] = spec.stages
    records = len(stages) > 1 and "replay" in stages
    _check_names(spec, options)
    cells: dict[str, SweepCell] = {}
    combinations = []
    for axes in _product(spec):
        given = {**spec.set, **axes}
        pack = _cell(_RECORD, {**given, "candidate": HONEST}, axes, options, identify) if records else None
        made = [_cell(stage, given, axes, options, identify, pack if stage == "replay" else None) for stage in stages]
        for cell in [*([pack] if pack else []), *made]:
            cells.setdefault(cell.key, cell)
        combinations.append(Combination(_shown(axes), tuple(cells[cell.key] for cell in made)))
    ordered = sorted(cells.values(), key=lambda cell: [_RECORD, *stages].index(cell.command[0]))
    return SweepPlan(tuple(combinations), {cell.key: cell for cell in ordered})


def _check_names(spec: SweepSpec, options: Mapping[str, Options]) -> None:
    """Refuse names that are options of none of a sweep's commands.

    Raises:
        UsageError: there is such a name, or a command lacks an option that it needs.
    """
    known = dict.fromkeys(name for stage in spec.stages for name in options[stage])
    commands = " and ".join(f"assay {stage}" for stage in spec.stages)
    for where, names in (("axis", [*spec.axes]), ("constant", [*spec.set])):
        for name in names:
            if name in known or (name == DEVICE_AXIS and where == "axis"):
                continue
            raise UsageError(
                f"The {where} {name} is no option of {commands}.",
                f"one of {', '.join([*known, *([DEVICE_AXIS] if where == 'axis' else [])])}",
                did_you_mean(name, [*known]) or f"see {commands.split(' and ')[0]} -h",
            )
    recorded = len(spec.stages) > 1
    for stage in spec.stages:
        for name, option in options[stage].items():
            if option.required and name not in {*spec.axes, *spec.set} and not (name == "pack" and recorded):
                raise UsageError(
                    f"assay {stage} needs {name}, and the sweep does not name it.",
                    f"{name} under [axes] or [set]",
                    f"add it, as in --set {name}=A,B",
                )


def _shown(axes: Axes) -> dict[str, str]:
    """Spell the values of axes as text."""
    return {name: _text(value) for name, value in axes.items()}


def _product(spec: SweepSpec) -> Iterator[dict[str, Value]]:
    """Yield the combinations of a sweep that are not excluded."""
    for values in itertools.product(*spec.axes.values()):
        axes = dict(zip(spec.axes, values, strict=True))
        if not any(all(axes[name] == value for name, value in left_out.items()) for left_out in spec.exclude):
            yield axes


def _cell(
    stage: str,
    given: Axes,
    axes: Axes,
    options: Mapping[str, Options],
    identify: Identify,
    pack: SweepCell | None = None,
) -> SweepCell:
    """Make the cell of a stage: it takes those of the values that are options of its command."""
    taken = {name: given[name] for name in options[stage] if name in given}
    if stage in ("check", "replay") and "candidate" in taken:
        taken["candidate"] = _without_server(_text(taken["candidate"]))
    accelerator = _text(given.get(DEVICE_AXIS, ""))
    command = (*stage.split(), *_words(taken, options[stage]))
    decided = {"command": command, "pack": pack.key if pack else "", **identify(taken, accelerator)}
    key = hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).hexdigest()[:16]
    own = {name: value for name, value in axes.items() if name in options[stage] or name == DEVICE_AXIS}
    if stage == _RECORD:
        own.pop("candidate", None)
    of_pack = pack.axes if pack else {}
    return SweepCell(key, command, {**of_pack, **_shown(own)}, accelerator, pack.key if pack else "")


def _without_server(candidate: str) -> str:
    """Return the name by which a candidate is called without a server: that of an engine's own backend begins with the engine."""
    return (
        f"{Side.model_fields['engine'].default}:{candidate}" if Backend.parse(candidate).kind == "native" else candidate
    )


def _words(taken: Axes, options: Options) -> list[str]:
    """Return values as words of a command line: flags first, then arguments in their order."""
    flags: list[str] = []
    for name, value in taken.items():
        option = options[name]
        if not option.flag:
            continue
        if option.kind == "switch":
            flags += [option.flag] if value is True else [option.off] if value is False and option.off else []
        else:
            flags += [f"{option.flag}={part}" for part in map(_text, value if isinstance(value, tuple) else (value,))]
    return [*flags, *(_text(value) for name, value in taken.items() if not options[name].flag)]


def _text(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def commands_of(spec: SweepSpec) -> Sequence[Command | str]:
    """Return the commands whose options a plan needs."""
    return [*spec.stages, *([_RECORD] if len(spec.stages) > 1 and "replay" in spec.stages else [])]
