"""What decides a cell besides its command: the code under test, files that it reads, the environment, and the kind of device."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from assay.harness.attention.source import source_hashes
from assay.harness.backend import Backend
from assay.harness.config import FILE
from assay.harness.sweep.cell_process import environment
from assay.harness.sweep.spec import Value
from assay.harness.text import visible

_CODE = ("candidate", "kernel", "reference")
"""Options that name code."""
_FILES = ("model", "pack", "config", "data", "baselines")
"""Options that may name a file or folder of this machine."""
_SMALL = 1_000_000
"""Bytes up to which a file's content is hashed; of a larger one its name, size and time: a model's weights take minutes."""


def identify(runtime_env: Mapping[str, Any], device: str) -> Callable[[Mapping[str, Value], str], dict[str, str]]:
    """Make what identifies cells; what it looks up is looked up once.

    Args:
        runtime_env: of the workers.
        device: kind of device, for cells that name none.
    """
    here = json.dumps([environment(), {**runtime_env}], sort_keys=True, default=str)
    files, code = cache(_file_identity), cache(_code_identity)

    def of(taken: Mapping[str, Value], accelerator: str) -> dict[str, str]:
        decisive = {"environment": here, "device": accelerator or device}
        decisive |= {f"code of {name}": code(str(taken[name])) for name in _CODE if name in taken}
        decisive |= {f"files of {name}": files(Path(str(taken[name]))) for name in _FILES if name in taken}
        return decisive if "config" in taken else {**decisive, f"files of {FILE}": files(Path(FILE))}

    return of


def _code_identity(name: str) -> str:
    """Hash the code of a backend: its source files and the packages that they import; empty for what is no kernel."""
    if not Backend.parse(name).is_kernel:
        return ""
    return _hash(json.dumps(source_hashes(name), sort_keys=True))


def _file_identity(path: Path) -> str:
    """Hash a file, or all files of a folder; empty if there is nothing at the path."""
    path = path.expanduser()
    files = sorted(path.rglob("*")) if path.is_dir() else [path] if path.is_file() else []
    return _hash("\n".join(_content(file, path) for file in files if file.is_file())) if files else ""


def _content(file: Path, base: Path) -> str:
    status, name = file.stat(), visible(str(file.relative_to(base)))
    if status.st_size > _SMALL:
        return f"{name} {status.st_size} {status.st_mtime_ns}"
    return f"{name} {hashlib.sha256(file.read_bytes()).hexdigest()}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
