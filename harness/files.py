"""Writing a report such that a reader never meets half a file."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from assay.harness.errors import EvidenceError


def write_whole(path: Path, text: str) -> None:
    """Write a file into a folder that is made if need be; it appears whole or not at all, and an older one stays until then.

    Raises:
        EvidenceError: the folder or the file cannot be written, for instance because the disk is full.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        raise EvidenceError(
            f"{path} cannot be written: {error.strerror or error}.",
            "a folder with room and write permission",
            "free some space or give another folder with --out",
        ) from None
