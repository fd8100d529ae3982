"""Python's tracebacks among the lines of a log.

A header and a frame are recognised by their form. Source lines and the exception have no such form: they are looked for in lines
that nothing else claims, so a traceback survives other writers' lines in between.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

HEADER = "Traceback (most recent call last):"
CHAINED = re.compile(
    "During handling of the above exception, another exception occurred:"
    "|The above exception was the direct cause of the following exception:"
)
FRAME = re.compile(r'\s*(?:\| +)?File "(?P<file>[^"\n]{1,500})", line (?P<line>\d{1,9})(?:, in (?P<name>\S.*))?\s*')
_EXCEPTION = re.compile(r"(?!(?:INFO|WARNING|ERROR|DEBUG|CRITICAL|FATAL)\b)[A-Za-z_][\w.]{0,200}(?::(?:\s.*)?)?")
_DIGIT = re.compile(r"\d")
# Most frames to keep: the first ones and the innermost.
_FRAMES = 200


class Frame(NamedTuple):
    """A frame of a traceback. `name` is empty if it has none, as for a syntax error."""

    file: str
    line: int
    name: str = ""


@dataclass
class Traceback:
    """A traceback: its lines, from `first` to `last`, its frames, and the exception as it was printed.

    Attributes:
        before: text of its first line before the header.
        exception: empty if the text ends before it.
        exception_line: the line of the exception, or 0 if it is missing.
    """

    first: int
    last: int
    before: str = ""
    frames: list[Frame] = field(default_factory=list)
    exception: str = ""
    exception_line: int = 0


class Tracebacks:
    """Follows tracebacks line by line, past any prefix that a logger puts on each line.

    Args:
        keep: receives each traceback when it ends.
        patience: how many lines after a traceback's last one its next one may be. If that is more than 1, other writers' lines
            may be indented, too, so the source of a frame ends with its marks.
    """

    def __init__(self, keep: Callable[[Traceback], None], patience: float = 1) -> None:
        self._keep, self._patience = keep, patience
        self._open: Traceback | None = None
        self._shape = ""
        self._source_due = False

    def line(self, number: int, text: str) -> bool:
        """Read a line that nothing else claims. Return True if it is part of a traceback."""
        return self.form(number, text) or self.inside(number, text)

    def form(self, number: int, text: str) -> bool:
        """Read a line that may be a header, or a frame of the open traceback. Return True if it is."""
        at = text.find(HEADER)
        if at >= 0:
            self.end()
            self._open = Traceback(number, number, text[:at])
            self._shape, self._source_due = _shape(text[:at]), False
            return True
        trace = self._within(number)
        match = FRAME.fullmatch(self._rest(trace, text)) if trace else None
        if not trace or not match:
            return False
        if len(trace.frames) == _FRAMES:
            trace.frames.pop()
        trace.frames.append(Frame(match["file"], int(match["line"]), match["name"] or ""))
        trace.last, self._source_due = number, True
        return True

    def inside(self, number: int, text: str) -> bool:
        """Read a line that may be a source line or the exception of the open traceback. Return True if it is."""
        trace = self._within(number)
        if trace is None:
            return False
        rest = self._rest(trace, text).rstrip()
        if rest.startswith("  ") and (self._source_due or self._patience == 1 or rest.startswith("  [Previous line")):
            trace.last, self._source_due = number, bool(rest.strip(" ^~"))
            return True
        if not trace.frames or not _EXCEPTION.fullmatch(rest):
            return False
        trace.exception, trace.exception_line, trace.last = rest, number, number
        self.end()
        return True

    def end(self) -> None:
        """End the open traceback."""
        if self._open:
            self._keep(self._open)
        self._open = None

    def _within(self, number: int) -> Traceback | None:
        if self._open and number - self._open.last > self._patience:
            self.end()
        return self._open

    def _rest(self, trace: Traceback, text: str) -> str:
        """Strip the prefix that a line's writer also put before the header."""
        column = len(trace.before)
        return text[column:] if column and _shape(text[:column]) == self._shape else text


def _shape(prefix: str) -> str:
    """Reduce a prefix to the parts that are the same on every line."""
    return _DIGIT.sub("0", prefix)
