"""Finds the place in a kernel where an exception was raised, for any caller of the kernel and any library that it calls."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from traceback import TracebackException, walk_tb
from types import FrameType

RAISED = "raised "
"""The beginning of a breach's description if the kernel raised."""
# Packages whose functions call kernels, and are never part of one.
_CALLERS = tuple(str(Path(__file__).resolve().parents[1] / room) + "/" for room in ("localize", "checks", "readout"))
# Libraries that decorate kernels, or that kernels call.
_LIBRARIES = frozenset(("torch", "triton", "numpy", "contextlib", "functools")) | sys.stdlib_module_names


def raised(error: BaseException) -> str:
    """Describe an exception after "the kernel": "raised ValueError: no such head (mine.py, line 12, in forward)"."""
    return f"{RAISED}{type(error).__name__}: {_said(error)[:200]} ({_place(error)})"


def _place(error: BaseException) -> str:
    """Return file, line and function of the innermost frame of the kernel's own file or package."""
    # Triton's interpreter and compiler wrap a kernel's exceptions, so the causes of this one count too.
    frames = [pair for exception in _chain(error) for pair in _frames(exception)]
    if not frames:
        return "when it was called"
    entry = next((frame for frame, _ in frames if _package(frame) not in _LIBRARIES), frames[0][0])
    file, package = entry.f_code.co_filename, _package(entry)
    frame, line = [
        (frame, line)
        for frame, line in frames
        if frame.f_code.co_filename == file or (_package(frame) == package and package not in _LIBRARIES)
    ][-1]
    return f"{Path(frame.f_code.co_filename).name}, line {line}, in {frame.f_code.co_name}"


def traceback_of(error: BaseException) -> str:
    """Format the traceback, without the frames of the kernel's callers."""
    made = TracebackException.from_exception(error)
    exceptions = [made]
    for exception in exceptions:  # grows during the loop
        exception.stack[:] = [frame for frame in exception.stack if not _calls(frame.filename)]
        exceptions += [other for other in (exception.__cause__, exception.__context__) if other is not None]
    return "".join(made.format()).rstrip("\n").replace("\x1b", "?")  # its message must not control a terminal


def _said(error: BaseException) -> str:
    """Return one line of an exception's message: the first, or a compiler's last, after "at 12:8:" and the source."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "" if not lines else lines[-1] if re.fullmatch(r"at \d+:\d+:", lines[0]) else lines[0]


def _chain(error: BaseException) -> list[BaseException]:
    chain = [error]
    while (cause := chain[-1].__cause__) is not None and cause not in chain:
        chain.append(cause)
    return chain


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """Yield the frames of a traceback and their lines, outermost first, without those that call kernels."""
    return ((frame, line) for frame, line in walk_tb(error.__traceback__) if not _calls(frame.f_code.co_filename))


def _calls(file: str) -> bool:
    return str(Path(file).resolve()).startswith(_CALLERS)


def _package(frame: FrameType) -> str:
    """Return the package of a frame's module, even if Python runs the module as ``__main__``."""
    spec = frame.f_globals.get("__spec__")
    return str(frame.f_globals.get("__name__", "") if spec is None else spec.name).partition(".")[0]
