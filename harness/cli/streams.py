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
    Without this, Typer and Rich end the command with exit code 1, which means that the candidate regressed, and ``print`` raises
    in the middle of a kernel. What the encoding of a stream lacks (``LC_ALL=C``) is written as an escape.
    Standard error never raises; standard output on a full disk raises an AssayError.
    """
    sys.stdout = _outliving(sys.stdout, 1, "standard output")
    sys.stderr = _outliving(sys.stderr, 2, "")


class _Outliving(io.FileIO):
    """A file descriptor that leads nowhere from its first failed write on.

    Args:
        descriptor: stays open when this object is closed.
        named: what an error calls it; empty if a failed write is never an error.
    """

    def __init__(self, descriptor: int, named: str) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._named = named

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            _lead_nowhere(self.fileno())
            if self._named and error.errno not in _READER_GONE:
                raise AssayError(
                    f"{self._named} could not be written: {error.strerror}.",
                    "a terminal, a pipe or a file with room",
                    "write it elsewhere; what a command writes to files is not affected",
                ) from None
            return memoryview(data).nbytes


def _outliving(stream: TextIO | None, descriptor: int, named: str) -> TextIO:
    if stream is None:
        _lead_nowhere(descriptor)  # else the next file to be opened gets its number, and what native code prints
        return io.TextIOWrapper(io.BufferedWriter(_Outliving(descriptor, named)), encoding="utf-8")
    if not isinstance(stream, io.TextIOWrapper):
        return stream  # not the process's own: a test's, or a notebook's
    return io.TextIOWrapper(
        io.BufferedWriter(_Outliving(stream.fileno(), named)),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _lead_nowhere(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if nowhere != descriptor:  # where it was closed, the lowest free number may be its own
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
