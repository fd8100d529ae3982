"""Files: written so that no reader ever sees half of one, safe names, and the time that they were made."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from assay.harness.errors import EvidenceError


def file_name(text: str) -> str:
    """`text` as the name of a file or folder: all but letters, digits, "_", "-" and "." becomes "-"."""
    return "".join(c if c.isalnum() or c in "_-." else "-" for c in text)


def timestamp() -> str:
    """Now, as documents record it: ISO 8601 in UTC, to the second."""
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"


def write_whole(path: Path, content: str | bytes, *, durable: bool = True) -> None:
    """Write a file that appears complete or not at all; until then an older version stays in place.

    Args:
        path: the file. Its folder is created if it does not exist.
        content: text is encoded as UTF-8, with its newlines as they are.
        durable: whether the file must survive a power failure, which costs a disk about 10 ms. Without it the file still
            survives the death of the process, which is enough for what a server writes between two forward passes.

    Raises:
        EvidenceError: the folder or the file cannot be written, for instance because the disk is full.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        raise EvidenceError(
            f"{path} cannot be written: {error.strerror or error}.",
            "a writable folder on a disk with free space",
            "free some space and run the same command again, or choose another folder",
        ) from None
