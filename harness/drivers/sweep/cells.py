"""The cells of a sweep: the product of the axes, as command lines, each with a key made of everything that decides it."""

from __future__ import annotations

import hashlib
import itertools
import json
import platform
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from assay.harness.attention.source import source_hashes
from assay.harness.backend import Backend
from assay.harness.config import FILE
from assay.harness.drivers.sweep.spec import DEVICE_AXIS, SweepSpec, SweptCell, Value
from assay.harness.errors import UsageError
from assay.harness.run.machine import installed_packages
from assay.harness.sides import hide_flags
from assay.harness.text import did_you_mean, visible

_CODE = ("candidate", "kernel", "reference")
# Files up to this size in bytes are hashed; a larger one is identified by name, size and time, since weights take minutes.
_SMALL = 1_000_000


class Option(NamedTuple):
    """An option or an argument (which has no flag) of a command; a switch takes no value, and may have a flag to turn it off."""

    flag: str
    switch: bool = False
    off: str = ""


def cells_of(spec: SweepSpec, options: Mapping[str, Option], device: str) -> list[SweptCell]:
    """Make the cells of a sweep.

    Args:
        options: options of its command by name, with ``_`` for ``-``.
        device: kind of device for cells that name none.

    Raises:
        UsageError: an axis or a constant is not an option of the command.
    """
    for where, names in (("axis", [*spec.axes]), ("constant", [*spec.set])):
        for name in names:
            if name not in options and not (name == DEVICE_AXIS and where == "axis"):
                raise UsageError(
                    f"The {where} {name} is not an option of assay {spec.command}.",
                    f"one of {', '.join([*options, *([DEVICE_AXIS] if where == 'axis' else [])])}",
                    did_you_mean(name, [*options]) or f"see assay {spec.command} -h",
                )
    cells = []
    labels = {name: _labels(name, values) for name, values in spec.axes.items()}
    for values in itertools.product(*spec.axes.values()):
        axes = dict(zip(spec.axes, values, strict=True))
        if any(all(axes[name] == value for name, value in left_out.items()) for left_out in spec.exclude):
            continue
        taken = {name: value for name in options if (value := {**spec.set, **axes}.get(name)) is not None}
        command = (spec.command, *_words(taken, options))
        environment_of_workers = json.dumps(spec.runtime_env, sort_keys=True, default=str)
        decided = [command, environment_of_workers, _text(axes.get(DEVICE_AXIS, device)), _identity(taken)]
        key = _hash(json.dumps(decided, sort_keys=True))[:16]
        shown = {name: labels[name][_text(value)] for name, value in axes.items()}
        cells.append(SweptCell(key=key, command=hide_flags(command), given=command, axes=shown))
    return cells


def _labels(name: str, values: Sequence[Value]) -> dict[str, str]:
    """Return a label without secrets for each value of an axis; labels that would then be equal get numbers."""
    labels: dict[str, str] = {}
    for text in map(_text, values):
        label = " ".join(hide_flags([f"--{name.replace('_', '-')}", *text.split(" ")])[1:])
        alike = sum(other == label or other.startswith(f"{label} (") for other in labels.values())
        labels[text] = f"{label} ({alike + 1})" if alike and label != text else label
    return labels


def _words(taken: Mapping[str, Value], options: Mapping[str, Option]) -> list[str]:
    """Return values as words of a command line: flags first, then arguments in their order."""
    flags: list[str] = []
    for name, value in taken.items():
        flag, switch, off = options[name]
        if switch:
            flags += [word for word in (flag if value is True else off if value is False else "",) if word]
        elif flag:
            flags += [f"{flag}={_text(part)}" for part in (value if isinstance(value, tuple) else (value,))]
    return [*flags, *(_text(value) for name, value in taken.items() if not options[name].flag)]


def _text(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _identity(taken: Mapping[str, Value]) -> dict[str, object]:
    """Return everything that decides a cell besides its command: environment, code under test, and the files that it reads."""
    code = {f"code of {name}": _code_of(_text(taken[name])) for name in _CODE if name in taken}
    texts = {name: value if isinstance(value, tuple) else (value,) for name, value in taken.items()}
    files = {f"files of {name}": [_files_of(_text(part)) for part in parts] for name, parts in texts.items()}
    return {"environment": environment(), **code, f"files of {FILE}": _files_of(str(FILE)), **files}


@cache
def environment() -> dict[str, str]:
    """Return the versions of everything that can change a result here; assay's is the hash of its source code."""
    # In a checkout, the parts of the package are symbolic links.
    parts = sorted(path for path in Path(__file__).parents[2].iterdir() if path.is_dir())
    code = b"".join(file.read_bytes() for part in parts for file in sorted(part.resolve().rglob("*.py")))
    versions = {"python": platform.python_version(), "assay": hashlib.sha256(code).hexdigest()[:8]}
    return versions | installed_packages()


@cache
def _code_of(name: str) -> str:
    """Hash a backend's source files and the packages that they import, or return an empty string unless it is a kernel."""
    return _hash(json.dumps(source_hashes(name), sort_keys=True)) if Backend.parse(name).is_kernel else ""


@cache
def _files_of(name: str) -> str:
    """Hash a file, or all files of a folder, or return an empty string if nothing exists at the path."""
    path = Path(name).expanduser()
    files = sorted(path.rglob("*")) if path.is_dir() else [path] if path.is_file() else []
    return _hash("\n".join(_content(file, path) for file in files if file.is_file())) if files else ""


def _content(file: Path, base: Path) -> str:
    status, name = file.stat(), visible(str(file.relative_to(base)))
    if status.st_size > _SMALL:
        return f"{name} {status.st_size} {status.st_mtime_ns}"
    return f"{name} {hashlib.sha256(file.read_bytes()).hexdigest()}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
