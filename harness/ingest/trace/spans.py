"""The spans of a Chrome trace: begins matched with their ends, kernels with their launches.

Read off what writes them: PyTorch 2.11 and 2.13 (complete events "X", flows, instants, metadata; kernels carry
``args.correlation``, which the call that launched them shares), ``event_trace_recorder.cc`` of MLC-LLM at 79d603f ("B", "E", "i";
a request is a thread), and SGLang 0.5.23's ``utils/profile_merger.py`` (the ranks in the pids, all else as PyTorch wrote it).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from sys import intern
from typing import Any, NamedTuple

from assay.harness.ingest.trace.steps import Violation
from assay.harness.text import one_line

_PHASES = frozenset("XBEbneiIMCstfSTpFPORNDvVc()")
"""Values of ``ph`` in the Trace Event Format; the second half of them is deprecated or of memory dumps."""
_LAUNCHES = frozenset({"cuda_runtime", "cuda_driver", "runtime", "driver", "xpu_runtime", "privateuse1_runtime"})
_RECORDER_END = "("


class Span(NamedTuple):
    """One span or instant.

    Attributes:
        name: its name.
        cat: its category; empty if it has none.
        pid: its process, or in PyTorch's traces a device.
        tid: its thread; a stream of a device, or in MLC-LLM's a request.
        ts: begin in microseconds.
        dur: microseconds; 0 for an instant.
        number: of its event, or of its first one.
        correlation: what a kernel and its launch share; -1 if there is none.
    """

    name: str
    cat: str
    pid: str
    tid: str
    ts: float
    dur: float
    number: int
    correlation: int = -1

    @property
    def end(self) -> float:
        """Its end in microseconds."""
        return self.ts + self.dur


class Spans:
    """Collects events one at a time.

    Attributes:
        all: the spans, in the order of their ends.
        kinds: events that were understood, by ``ph`` and category.
        process_names: from the metadata.
    """

    def __init__(self) -> None:
        self.all: list[Span] = []
        self.kinds: Counter[tuple[str, str]] = Counter()
        self.process_names: dict[str, str] = {}
        self._open: defaultdict[tuple[str, ...], list[Span]] = defaultdict(list)
        self._unmatched: dict[tuple[str, ...], tuple[float, int]] = {}
        self._violations: dict[int, Violation] = {}

    def add(self, number: int, event: Any) -> bool:
        """Take an event.

        Returns:
            Whether it was understood.
        """
        phase = event.get("ph") if isinstance(event, dict) else None
        if not isinstance(phase, str) or phase not in _PHASES or len(phase) != 1:
            return False
        cat = event.get("cat")
        cat = intern(cat) if isinstance(cat, str) else ""
        if phase in "XBEbneiI" and not self._timed(number, phase, cat, event):
            return False
        if phase == "M" and event.get("name") == "process_name" and isinstance(args := event.get("args"), dict):
            self.process_names[str(event.get("pid", ""))] = one_line(str(args.get("name", "")), 60)
        self.kinds[phase, cat] += 1
        return True

    def _timed(self, number: int, phase: str, cat: str, event: Mapping[str, Any]) -> bool:
        ts, name = _finite(event.get("ts")), event.get("name", "" if phase == "E" else None)
        if ts is None or not isinstance(name, str):
            return False
        pid, tid = (intern(str(event.get(key, ""))) for key in ("pid", "tid"))
        span = Span(intern(name), cat, pid, tid, ts, 0.0, number)
        if phase == "X":
            dur = _finite(event.get("dur"))
            if dur is None or dur < 0:
                return False
            self.all.append(span._replace(dur=dur, correlation=_correlation(event)))
        elif phase in "be":
            key = ("async", cat, str(event.get("id", event.get("id2", ""))), name)
            self._open[key].append(span) if phase == "b" else self._end(key, span)
        elif phase == "B":
            self._begin(span)
        elif phase == "E" and not name.startswith(_RECORDER_END):
            self._end((pid, tid, name) if name else self._innermost(pid, tid), span)
        else:  # MLC-LLM's instant "finish" gets its number before it is taken for the end of a span: "finish (0)" ends "(0)"
            self.all.append(span._replace(name="finish") if phase == "E" else span)
        return True

    def _begin(self, span: Span) -> None:
        key = (span.pid, span.tid, span.name)
        ended = self._unmatched.pop(key, None)
        if ended is not None and ended[0] == span.ts:
            # MLC-LLM sorts by microsecond, and not stably: an end may stand before a begin of the same microsecond.
            self.all.append(span)
            del self._violations[ended[1]]
        else:
            self._open[key].append(span)

    def _innermost(self, pid: str, tid: str) -> tuple[str, ...]:
        """Return the span of a thread that an end without a name closes: the last one that is open."""
        begun = [(spans[-1].number, key) for key, spans in self._open.items() if key[:2] == (pid, tid)]
        return max(begun)[1] if begun else (pid, tid, "")

    def _end(self, key: tuple[str, ...], end: Span) -> None:
        if begun := self._open.get(key):
            span = begun.pop()
            if not begun:
                del self._open[key]
            self.all.append(span._replace(dur=max(0.0, end.ts - span.ts), pid=end.pid, tid=end.tid))
            return
        self._unmatched[key] = (end.ts, end.number)
        self._break("trace-end-not-begun", end, f"{one_line(key[-1], 60) or 'a span'} ends, and had not begun")

    def _break(self, rule: str, span: Span, says: str, where: str = "") -> None:
        where = where or one_line(f"process {span.pid}, thread {span.tid}", 100)
        self._violations[span.number] = Violation(rule, where, says, (span.number,))

    def violations(self) -> list[Violation]:
        """List the ends that had not begun, then, once all events were added, the begins that do not end."""
        early = list(self._violations.values())
        for key, spans in self._open.items():
            for span in spans:
                says = f"{one_line(span.name, 60)} begins, and does not end"
                self._break("trace-begin-not-closed", span, says, "asynchronous" if key[0] == "async" else "")
        late = list(self._violations.values())[len(early) :]
        return early + sorted(late, key=lambda item: item.places)

    def of(self, categories: frozenset[str]) -> list[Span]:
        """List the spans of some categories."""
        return [span for span in self.all if span.cat in categories]

    def launches(self) -> dict[int, Span]:
        """Return the calls that launched kernels, by correlation."""
        return {span.correlation: span for span in self.of(_LAUNCHES) if span.correlation >= 0}


def _finite(value: Any) -> float | None:
    """Parse a number of the file; None if it is none, or not finite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _correlation(event: Mapping[str, Any]) -> int:
    args = event.get("args")
    value = args.get("correlation", -1) if isinstance(args, dict) else -1
    return value if isinstance(value, int) and 0 <= value < 1 << 63 else -1
