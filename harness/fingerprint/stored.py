"""Fingerprints on disk: files that `assay fingerprint --out` wrote, and those in the folder of a run."""

from __future__ import annotations

from pathlib import Path

from assay.harness.errors import UsageError
from assay.harness.evidence.fingerprint import FINGERPRINT, SCHEMA, Fingerprint
from assay.harness.schema import read_json

_START = 2000


def is_fingerprint(path: Path) -> bool:
    """Return True if a file, or the folder of a server, holds a fingerprint."""
    if path.is_dir():
        return (path / FINGERPRINT.name).is_file()
    if not path.is_file() or path.suffix != ".json":
        return False
    with path.open("rb") as file:
        return SCHEMA.encode() in file.read(_START)


def has_fingerprint(path: Path) -> bool:
    """Return True if a file holds a fingerprint, or if a folder has one that `read_fingerprint` reads."""
    return is_fingerprint(path) or _holder(path) is not None


def _holder(path: Path) -> Path | None:
    return next(
        (folder for folder in (path, path / "servers" / "candidate") if (folder / FINGERPRINT.name).is_file()), None
    )


def read_fingerprint(path: Path) -> Fingerprint:
    """Read a fingerprint from its file, or from the folder of a run: RUN is its candidate, RUN/servers/reference the other.

    Raises:
        UsageError: there is none.
        EvidenceError: it is damaged.
    """
    if path.is_dir():
        holder = _holder(path)
        if holder is None:
            raise UsageError(
                f"{path} has no {FINGERPRINT.name}.",
                "the folder of a run, or a file of assay fingerprint --out",
                "check the path",
            )
        path = holder / FINGERPRINT.name
    if not path.is_file():
        raise UsageError(
            f"There is no {path}.", "a file of assay fingerprint --out, or the folder of a run", "check the path"
        )
    return read_json(path, Fingerprint, "write it again with assay fingerprint --out")
