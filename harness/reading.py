"""The entry point of every file reader: it opens regular files of bounded size, and reports a reader's crash as a damaged file."""

from __future__ import annotations

import os
import stat
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from assay.harness.errors import AssayError, EvidenceError, UsageError
from assay.harness.text import one_line

LARGEST = 1 << 29
"""Most bytes of a file that is read as a whole: parsed, JSON takes several times as much memory."""


@contextmanager
def reading(path: Path | str, kind: str) -> Iterator[None]:
    """Run a reader: whatever it raises on content that it was not written for means that the file is damaged.

    It is also a decorator, for readers that read one file per call.

    Args:
        path: the file to read.
        kind: what it should be, without an article: "results file".

    Raises:
        EvidenceError: the reader raised something. The cause is kept, for a traceback.
        AssayError: the reader itself reported what is wrong.
    """
    try:
        yield
    except (AssayError, ImportError):  # an ImportError is about this environment
        raise
    except Exception as error:  # includes RecursionError and MemoryError, from deep or absurdly large content
        said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise EvidenceError(
            f"{path} is not a whole {kind}: {one_line(said)}.",
            "the file as it was written",
            "copy it again or make it again; -v shows where reading it failed",
        ) from error


def regular_file(path: Path) -> os.stat_result:
    """Return the status of a file that may be opened: opening a pipe would wait for a writer.

    Raises:
        OSError: it is missing.
        EvidenceError: it is not a regular file.
    """
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(21, "Is a directory", str(path))
    if not stat.S_ISREG(status.st_mode):
        raise EvidenceError(
            f"{path} is not a regular file.", "a file, not a pipe or a device", "copy its content to a file"
        )
    return status


def whole_file(path: Path, largest: int = LARGEST) -> bytes:
    """Read the content of a file as a whole.

    Args:
        path: the file.
        largest: most bytes that it may have.

    Raises:
        OSError: it is missing or cannot be read.
        EvidenceError: it is not a regular file, such as a pipe or a device, which may have no end; or it is too large.
    """
    status = regular_file(path)
    if status.st_size > largest:
        raise EvidenceError(
            f"{path} has {status.st_size:,} bytes.",
            f"at most {largest:,} in such a file",
            "check that it is the right file",
        )
    return path.read_bytes()


def read_toml(path: Path) -> dict[str, Any]:
    """Read a file of settings that a user wrote.

    Raises:
        UsageError: it cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(whole_file(path).decode("utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError, OSError) as error:
        raise UsageError(
            f"{path} cannot be read: {error}.", "a TOML file", "correct it at the position named"
        ) from None
