"""The spans of a Chrome trace, held in flat arrays: begins matched with their ends, kernels with their launches.

Read off what writes them: PyTorch 2.11 and 2.13 (complete events "X", flows, instants, metadata; kernels carry
``args.correlation``, which the call that launched them shares), ``event_trace_recorder.cc`` of MLC-LLM at 79d603f ("B", "E", "i";
a request is a thread), and SGLang 0.5.23's ``utils/profile_merger.py`` (the ranks in the pids, all else as PyTorch wrote it).
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from assay.harness.ingest.trace.machine import Balance, Violations
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
    correlation: int


@dataclass
class Spans:
    """Collects events one at a time.

    Attributes:
        found: what is not balanced.
        kinds: events that were understood, by ``ph`` and category.
        process_names: from the metadata.
    """

    found: Violations = field(default_factory=Violations)
    kinds: Counter[tuple[str, str]] = field(default_factory=Counter)
    process_names: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._texts: dict[str, int] = {}
        self._lanes: dict[tuple[str, str], int] = {}
        self._name, self._cat, self._lane = array("l"), array("l"), array("l")
        self._number, self._correlation = array("q"), array("q")
        self._ts, self._dur = array("d"), array("d")
        self._balance: Balance[tuple[str, ...]] = Balance()
        self._begun: dict[int, tuple[str, str, float]] = {}
        self._stacks: dict[tuple[str, str], list[tuple[tuple[str, ...], int]]] = {}
        self._early: dict[tuple[str, ...], tuple[float, int]] = {}

    def __len__(self) -> int:
        return len(self._ts)

    def add(self, number: int, event: Any) -> bool:
        """Take an event.

        Returns:
            Whether it was understood.
        """
        if not isinstance(event, dict):
            return False
        phase = event.get("ph")
        if not isinstance(phase, str) or phase not in _PHASES or len(phase) != 1:
            return False
        if phase in "XBEbneiI" and not self._timed(number, phase, event):
            return False
        if phase == "M":
            self._metadata(event)
        cat = event.get("cat")
        self.kinds[phase, cat if isinstance(cat, str) else ""] += 1
        return True

    def _metadata(self, event: Mapping[str, Any]) -> None:
        args = event.get("args")
        if event.get("name") == "process_name" and isinstance(args, dict):
            self.process_names[str(event.get("pid", ""))] = one_line(str(args.get("name", "")), 60)

    def _timed(self, number: int, phase: str, event: Mapping[str, Any]) -> bool:
        ts, name = _finite(event.get("ts")), event.get("name", "" if phase == "E" else None)
        if ts is None or not isinstance(name, str):
            return False
        cat, lane = event.get("cat"), (str(event.get("pid", "")), str(event.get("tid", "")))
        cat = cat if isinstance(cat, str) else ""
        if phase == "X":
            dur = _finite(event.get("dur"))
            if dur is None or dur < 0:
                return False
            self._append(name, cat, lane, ts, dur, number, _correlation(event))
        elif phase in "iIn":
            self._append(name, cat, lane, ts, 0.0, number, -1)
        elif phase in "BE":
            self._duration(number, phase, name, cat, lane, ts)
        else:
            key = ("async", cat, str(event.get("id", event.get("id2", ""))), name)
            self._begin(key, number, name, cat, ts) if phase == "b" else self._end(key, number, lane, ts)
        return True

    def _duration(self, number: int, phase: str, name: str, cat: str, lane: tuple[str, str], ts: float) -> None:
        key = (*lane, name)
        if phase == "B":
            early = self._early.pop(key, None)
            if early is not None and early[0] == ts:
                # MLC-LLM sorts by microsecond, and not stably: an end may stand before a begin of the same microsecond.
                self._append(name, cat, lane, ts, 0.0, number, -1)
                self.found.counts["trace-end-not-begun"] -= 1
                self.found.kept = [one for one in self.found.kept if early[1] not in one.places]
                return
            self._begin(key, number, name, cat, ts)
            self._stacks.setdefault(lane, []).append((key, number))
        elif name.startswith(_RECORDER_END):
            # MLC-LLM's instant "finish" gets its number before it is taken for the end of a span: "finish (0)" ends "(0)".
            self._append("finish", cat, lane, ts, 0.0, number, -1)
        else:
            self._end(key if name else self._top(lane), number, lane, ts)

    def _top(self, lane: tuple[str, str]) -> tuple[str, ...]:
        """Return the span of a thread that an end without a name closes: the last one that is open."""
        stack = self._stacks.get(lane, [])
        while stack:
            key, number = stack.pop()
            if number in self._begun:
                return key
        return (*lane, "")

    def _begin(self, key: tuple[str, ...], number: int, name: str, cat: str, ts: float) -> None:
        self._balance.begin(key, number)
        self._begun[number] = (name, cat, ts)

    def _end(self, key: tuple[str, ...], number: int, lane: tuple[str, str], ts: float) -> None:
        place = self._balance.end(key)
        if place is None:
            self._early[key] = (ts, number)
            says = f"{one_line(key[-1], 60) or 'a span'} ends, and had not begun"
            self.found.add("trace-end-not-begun", where(*lane), says, number)
            return
        name, cat, begun = self._begun.pop(place)
        self._append(name, cat, lane, begun, max(0.0, ts - begun), place, -1)

    def finish(self) -> None:
        """Finish once all events were added: what has not ended is a violation."""
        for key, number in self._balance.waiting():
            lane = where(key[0], key[1]) if key[0] != "async" else "asynchronous"
            self.found.add("trace-begin-not-closed", lane, f"{one_line(key[-1], 60)} begins, and does not end", number)
        self.found.counts = {rule: count for rule, count in self.found.counts.items() if count}

    def _append(
        self, name: str, cat: str, lane: tuple[str, str], ts: float, dur: float, number: int, correlation: int
    ) -> None:
        texts = self._texts
        self._name.append(texts.setdefault(name, len(texts)))
        self._cat.append(texts.setdefault(cat, len(texts)))
        self._lane.append(self._lanes.setdefault(lane, len(self._lanes)))
        self._ts.append(ts)
        self._dur.append(dur)
        self._number.append(number)
        self._correlation.append(correlation)

    def all(self, categories: frozenset[str] | None = None) -> list[Span]:
        """List the spans of some categories, or all, in the order of the file."""
        names, lanes = list(self._texts), list(self._lanes)
        wanted = None if categories is None else {self._texts[cat] for cat in categories if cat in self._texts}
        return [
            Span(
                names[self._name[i]], names[self._cat[i]], *lanes[self._lane[i]], self._ts[i], self._dur[i],
                self._number[i], self._correlation[i],
            )
            for i in range(len(self._ts))
            if wanted is None or self._cat[i] in wanted
        ]  # fmt: skip

    def categories(self) -> set[str]:
        """Return the categories that occur among the spans."""
        names = list(self._texts)
        return {names[i] for i in set(self._cat)}

    def launches(self) -> dict[int, Span]:
        """Return the calls that launched kernels, by correlation."""
        return {span.correlation: span for span in self.all(_LAUNCHES) if span.correlation >= 0}

    def bounds(self) -> tuple[float, float]:
        """Return the first begin and the last end, in microseconds; zeros if there is no span."""
        if not self._ts:
            return 0.0, 0.0
        return min(self._ts), max(ts + dur for ts, dur in zip(self._ts, self._dur, strict=True))


def where(pid: str, tid: str) -> str:
    """Describe a process and a thread."""
    return one_line(f"process {pid}, thread {tid}", 100)


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
