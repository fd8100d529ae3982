"""Wheels of tiny packages, to lay over an interpreter's own without an index."""

from __future__ import annotations

import zipfile
from pathlib import Path


def wheel(folder: Path, version: str, value: str = "", requires: str = "", name: str = "fact") -> Path:
    """Write the wheel of a package of one module, whose constant is its version, or another value."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" + (f"Requires-Dist: {requires}\n" if requires else "")
    files = {
        f"{name}/__init__.py": f"VALUE = {value or version!r}\n",
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    return path
