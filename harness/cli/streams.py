"""Standard output and standard error that outlive their readers: what becomes of the output never changes an exit code."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any, TextIO

from assay.harness.errors import AssayError

_READER_GONE = (errno.EPIPE, errno.ECONNRESET)


def keep_open() -> None:
    """Replace both streams, for everything that writes to them: this package, Typer, Rich, and a kernel that prints.

    A stream whose reader goes away (``assay run | head -1``) falls silent, and so does one that was never open (``>&-``).
    Without this, Typer and Rich end the command with exit code 1, which means that the candidate regressed. What the encoding of
    a stream lacks is written as an escape. Standard output on a full disk raises an AssayError.
    """
    sys.stdout, sys.stderr = _outliving(sys.stdout), _outliving(sys.stderr)


class _Outliving(io.FileIO):
    """A file descriptor that leads nowhere from its first failed write on."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            if self.fileno() == 1 and error.errno not in _READER_GONE:
                raise AssayError(
                    f"standard output could not be written: {error.strerror}.",
                    "a terminal, a pipe or a file with room",
                    "write it elsewhere; what a command writes to files is not affected",
                ) from None
            return memoryview(data).nbytes


def _outliving(stream: TextIO | None) -> TextIO:
    if stream is None:  # the lowest free descriptor is its own, so that no file that is opened later gets its number
        return open(os.devnull, "w")
    raw = io.BufferedWriter(_Outliving(stream.fileno(), "wb", closefd=False))
    return io.TextIOWrapper(
        raw,
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=getattr(stream, "line_buffering", False),
    )
