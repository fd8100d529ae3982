"""A line of text → the fault that it reports, and the tracebacks of Python among the lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from assay.harness.ingest.any_log.figures import LONGEST

TITLES = {
    "cuda-error": "CUDA error",
    "out-of-memory": "Out of memory",
    "nccl-error": "NCCL error",
    "crash": "Crash",
    "not-a-number": "NaN or infinity",
    "error": "Error",
}
"""Faults by id, the most telling first: a line counts as the first that it is."""
_FAULTS = (
    ("out-of-memory", r"out of memory|outofmemory|oom[- ]kill|cannot allocate memory|std::bad_alloc|cuda_error_out_of_memory"),
    ("cuda-error", r"cuda (?:runtime |driver )?error|cuda_error_|cublas_status_(?!success)|cudnn_status_(?!success)"
                   r"|device-side assert|illegal memory access|unspecified launch failure|hip error"),
    ("nccl-error", r"nccl ?error|nccl warn|nccl(?:internal|system|unhandled\w{0,10}|remote)error|nccl.{0,60}timed? ?out"),
    ("crash", r"segmentation fault|core dumped|bus error|\bsig(?:segv|abrt|bus|ill)\b|fatal python error|terminate called"
              r"|illegal instruction|ggml_assert|assert(?:ion)?.{0,120} failed|assertion failed"),
    ("not-a-number", r"\b(?:nans?|infs?)\b.{0,40}\b(?:detected|found|logits?|logprobs?)\b"
                     r"|\b(?:detected|found|contains?|has|have)\b.{0,20}\b(?:nans?|infs?)\b"),
)  # fmt: skip
_COMPILED = tuple((id, re.compile(pattern)) for id, pattern in _FAULTS)
_LEVEL = re.compile(r"(?:ERROR|FATAL|CRITICAL)\b|\[E\] |error: |fatal: |E\d{4} \d\d:")
_LEVEL_WITHIN = re.compile(r"[\[( |:](?:ERROR|FATAL|CRITICAL)[\]) |:]|\[E\] ")
_PREFIX = 100
"""Characters before a level: a time, a process, a file."""
_TRACEBACK = "Traceback (most recent call last):"
_FRAME = re.compile(r' {2,8}File "(?P<file>[^"\n]{1,500})", line (?P<line>\d{1,9})(?:, in (?P<name>.{1,200}))?')
_RAISED = re.compile(r"[A-Za-z_][\w.]{0,200}(?::(?: .*)?)?")
_DIGIT = re.compile(r"\d")


def fault(text: str) -> str:
    """Return the id of the fault that a line reports; empty if it reports none."""
    text = text[:LONGEST]
    lower = text.lower()
    for id, pattern in _COMPILED:
        if pattern.search(lower):
            return id
    return "error" if _LEVEL.match(text) or _LEVEL_WITHIN.search(text, 0, _PREFIX) else ""


class Traceback(NamedTuple):
    """A traceback: its lines, the exception as it was printed, and the innermost frame as ``file:line in name``.

    `raised` is empty where the text ends before it.
    """

    first: int
    last: int
    raised: str
    frame: str


class Tracebacks:
    """Follows tracebacks, a line at a time, behind whatever a logger puts before each line."""

    def __init__(self) -> None:
        self._first = self._last = self._column = 0
        self._shape = self._frame = ""

    def line(self, number: int, text: str) -> Iterator[Traceback | None]:
        """Yield nothing if a line is in no traceback, None if it is within one, and the traceback if it is the last."""
        at = text.find(_TRACEBACK, 0, LONGEST)
        if at >= 0:
            yield from filter(None, [self.cut_off()])
            self._first = self._last = number
            self._column, self._shape, self._frame = at, _shape(text[:at]), ""
            yield None
            return
        if not self._first:
            return
        rest = text[self._column : LONGEST] if _shape(text[: self._column]) == self._shape else text[:LONGEST]
        frame = _FRAME.match(rest)
        if frame:
            self._frame = f"{frame['file']}:{frame['line']}" + (f" in {frame['name']}" if frame["name"] else "")
        elif not rest.startswith("  "):
            raised = rest.strip() if _RAISED.fullmatch(rest.rstrip()) and self._frame else ""
            found = Traceback(self._first, number if raised else self._last, raised, self._frame)
            self._first = 0
            yield found
            return
        self._last = number
        yield None

    def cut_off(self) -> Traceback | None:
        """Return the traceback that ends without an exception; None if none is open."""
        if not self._first:
            return None
        found = Traceback(self._first, self._last, "", self._frame)
        self._first = 0
        return found


def _shape(prefix: str) -> str:
    """Strip a prefix of what changes from line to line."""
    return _DIGIT.sub("0", prefix)


def message(text: str) -> str:
    """Strip a line of its numbers: what two lines that report the same share."""
    return _DIGIT.sub("0", text[:LONGEST])
