"""The cells of a sweep: the product of the axes, as command lines, each with a key made of everything that decides it."""

from __future__ import annotations

import hashlib
import itertools
import json
import platform
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from assay.harness.attention.source import source_hashes
from assay.harness.backend import Backend
from assay.harness.config import FILE
from assay.harness.drivers.sweep.spec import SweepSpec, SweptCell, Value
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
        device: kind of device that the cells run on.

    Raises:
        UsageError: an axis is not an option of the command.
    """
    for name in spec.axes:
        if name not in options:
            raise UsageError(
                f"The axis {name} is not an option of assay {spec.command}.",
                f"one of {', '.join(options)}",
                did_you_mean(name, [*options]) or f"see assay {spec.command} -h",
            )
    cells = []
    for values in itertools.product(*spec.axes.values()):
        axes = dict(zip(spec.axes, values, strict=True))
        taken = {name: axes[name] for name in options if name in axes}
        command = (spec.command, *_words(taken, options))
        environment_of_workers = json.dumps(spec.runtime_env, sort_keys=True, default=str)
        decided = [command, environment_of_workers, device, _identity(taken)]
        key = _hash(json.dumps(decided, sort_keys=True))[:16]
        shown = {name: _label(name, value) for name, value in axes.items()}
        cells.append(SweptCell(key=key, command=hide_flags(command), given=command, axes=shown))
    return cells


def _label(name: str, value: Value) -> str:
    """Return a value of an axis as text, without secrets."""
    return " ".join(hide_flags([f"--{name.replace('_', '-')}", *_text(value).split(" ")])[1:])


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
    return {"environment": _environment(), **code, f"files of {FILE}": _files_of(str(FILE)), **files}


@cache
def _environment() -> dict[str, str]:
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
