"""The place in a kernel where an exception was raised, whoever called the kernel and whatever it called."""

from __future__ import annotations

import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from traceback import walk_tb
from types import FrameType

RAISED = "raised "
"""How the words of a breach begin where the kernel raised."""
_CALLERS = ("assay.harness.localize.", "assay.harness.checks.", "assay.harness.readout.")
"""Rooms whose functions call kernels; none of them is in a kernel."""
_LIBRARIES = frozenset(("torch", "triton", "numpy", "contextlib", "functools"))
"""What decorates kernels, and what they call."""


def raised(error: BaseException) -> str:
    """Describe an exception in words that follow "the kernel": "raised ValueError: no such head (mine.py, line 12, in forward)"."""
    return f"{RAISED}{type(error).__name__}: {_said(error)[:200]} ({_place(error)})"


def _place(error: BaseException) -> str:
    """Return file, line and function of the innermost frame that is the kernel's own.

    Its own are the frame that assay called, unless that is a decorator of a library, and those of the same package or folder. The
    exceptions that this one was raised from are looked at too: Triton's interpreter and compiler wrap those of a kernel.
    """
    chain = [error]
    while (cause := chain[-1].__cause__) is not None and cause not in chain:
        chain.append(cause)
    frames = [frame for exception in chain for frame in _frames(exception)]
    if not frames:
        return "when it was called"
    entry = next((frame for frame, _ in frames if _package(frame) not in _LIBRARIES), frames[0][0])
    own = [(frame, line) for frame, line in frames if _belongs(frame, entry)]
    frame, line = own[-1]
    return f"{Path(frame.f_code.co_filename).name}, line {line}, in {frame.f_code.co_name}"


def traceback_of(error: BaseException) -> str:
    """Format the traceback, without the frames of whoever called the kernel."""
    text = "".join(traceback.format_exception(error))
    kept: list[str] = []
    hidden = False
    here = str(Path(__file__).resolve().parents[1])
    for line in text.splitlines():
        if located := re.match(r'  File "(.*)", line \d+', line):
            hidden = str(Path(located[1]).resolve()).startswith(
                tuple(f"{here}/{room}/" for room in ("localize", "offline", "readout"))
            )
        elif not line.startswith("    "):
            hidden = False
        if not hidden:
            kept.append(line)
    return "\n".join(kept).replace("\x1b", "?")  # what it says must not drive a terminal


def _said(error: BaseException) -> str:
    """Return an exception's message in one line: the first; a compiler's last, after "at 12:8:" and the source."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "" if not lines else lines[-1] if re.fullmatch(r"at \d+:\d+:", lines[0]) else lines[0]


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """Yield the frames of its traceback, and their lines, outermost first; without those that call kernels."""
    for frame, line in walk_tb(error.__traceback__):
        if not _module(frame).startswith(_CALLERS):
            yield frame, line


def _module(frame: FrameType) -> str:
    """Return the name of a frame's module, also of one that Python runs as ``__main__``."""
    spec = frame.f_globals.get("__spec__")
    return str(frame.f_globals.get("__name__", "") if spec is None else spec.name)


def _package(frame: FrameType) -> str:
    return _module(frame).partition(".")[0]


def _belongs(frame: FrameType, entry: FrameType) -> bool:
    """Return True if a frame is of the package or the folder of another one, outside of libraries."""
    if frame.f_code.co_filename == entry.f_code.co_filename:
        return True
    if _package(frame) in _LIBRARIES | sys.stdlib_module_names:
        return False
    if _package(frame) == _package(entry):
        return True
    folder, libraries = Path(entry.f_code.co_filename).resolve().parent, Path(sysconfig.get_path("purelib")).resolve()
    here = Path(frame.f_code.co_filename).resolve()
    return here.is_relative_to(folder) and not here.is_relative_to(libraries)
