"""Reads Chrome trace events: PyTorch's profiler, SGLang's, and MLC-LLM's event recorder → tracks, passes and kernels."""

from __future__ import annotations

import bisect
import re
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from assay.harness.ingest.result import Document, Excerpt, FileRead
from assay.harness.ingest.source import Source
from assay.harness.ingest.trace.json_events import GZIP, EventStream
from assay.harness.ingest.trace.model import Segment, SegmentKind, StepPool, Trace, Track
from assay.harness.ingest.trace.spans import Span, Spans
from assay.harness.text import one_line

_SHOWN = 5
"""Events quoted of those that no rule knows."""
KERNELS = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
"""Categories of what runs on a device, in PyTorch's traces."""
_OPERATORS = frozenset({"cpu_op"})
_ANNOTATIONS = frozenset({"user_annotation"})
MLC, PYTORCH, UNKNOWN = "MLC-LLM's event recorder", "PyTorch's profiler", "an unknown writer"

_ID, _TITLE = "chrome-trace", "Chrome trace events"
_HEAD = re.compile(r'\s*(?:\[\s*\{\s*"(?:ph|name|cat|pid|tid|ts|dur|args|id)"|\{.*"traceEvents"\s*:\s*\[)', re.DOTALL)
_STEP = re.compile(r"step\[(\w+)")
_PHASES: dict[str, SegmentKind] = {
    "EXTEND": "extend", "DECODE": "decode", "VERIFY": "decode", "MIXED": "mixed", "IDLE": "idle",
}  # fmt: skip
_PROFILER_STEP = re.compile(r"ProfilerStep#\d+")
_COUNTED = re.compile(r" \(\d+\)$")
_FRONT_END = frozenset({
    "receive request", "invoke generate", "tokenization", "detokenization", "callback", "yield delta output",
    "yield final usage", "skip empty delta text", "finish",
})  # fmt: skip
"""Events of MLC-LLM's Python side (``engine.py``, ``engine_base.py``): their threads run beside the engine's."""
_STEP_BEGINS = frozenset({"embedding", "proposal embedding", "verify embedding"})
"""What each step of MLC-LLM's engine begins with."""


@dataclass(frozen=True)
class LoadedProfile:
    """A profile, how much of it was understood, and its spans."""

    trace: Trace
    file: FileRead
    spans: Spans


def phase_of(name: str) -> SegmentKind:
    """Infer the phase that a name states: SGLang's ``step[DECODE bs=4]``, or a word in it; "other" if it states none."""
    if found := _STEP.match(name):
        return _PHASES.get(found[1], "other")
    lower = name.lower()
    if "prefill" in lower or "extend" in lower:
        return "extend"
    return "decode" if "decode" in lower or "verify" in lower else "other"


def is_chrome_trace(source: Source) -> bool:
    """Return True if a file begins like Chrome trace events, compressed or not."""
    if source.head.startswith(GZIP):
        stream = EventStream(source.path)
        first = next(stream.events(), None)
        return first is not None and isinstance(first.value, dict) and "ph" in first.value
    return _HEAD.match(source.head_text) is not None


def load(source: Source) -> LoadedProfile:
    """Read all events of a file, one at a time."""
    stream, spans = EventStream(source.path), Spans()
    unread: list[Excerpt] = []
    number = refused = 0
    for event in stream.events():
        number = event.number
        if not spans.add(number, event.value):
            refused += 1
            if len(unread) < _SHOWN:
                text = one_line(event.text or repr(event.value)[:400])
                unread.append(Excerpt(first=number, last=number, text=text))
    spans.finish()
    whole_object = bool(stream.head)
    if stream.ended and (whole_object or "compressed" in stream.ended):
        spans.found.add("trace-cut-off", "end of the file", stream.ended, number)
    writer = _writer(spans, stream.head)
    tracks = _requests(spans) if writer == MLC else _profile(spans)
    trace = Trace("chrome-trace", writer, "event", None, tracks, tuple(spans.found.kept), dict(spans.found.counts))
    notes = (stream.ended,) if stream.ended else ()
    file = FileRead.of(source, _ID, f"{_TITLE} of {writer}", number - refused, refused, "event", unread, notes)
    return LoadedProfile(trace, file, spans)


def _writer(spans: Spans, head: str) -> str:
    categories = spans.categories()
    if categories & (KERNELS | _OPERATORS | _ANNOTATIONS) or '"schemaVersion"' in head:
        return PYTORCH
    phases = {phase for phase, _ in spans.kinds}
    timed = spans.all()[:100]
    if timed and categories == {""} and phases <= set("BEi") and all(
        span.pid == "1" and (span.name == "finish" or _COUNTED.search(span.name)) for span in timed
    ):  # fmt: skip
        return MLC
    return UNKNOWN


def _profile(spans: Spans) -> tuple[Track, ...]:
    """List the tracks of a profile: its devices, or its threads if no device ran anything; of another writer, all threads."""
    pool, categories = StepPool(), spans.categories()
    passes = Passes(spans.all(_ANNOTATIONS))
    if categories & KERNELS:
        launches = spans.launches()
        by_device: dict[str, list[Span]] = defaultdict(list)
        for kernel in spans.all(KERNELS):
            by_device[kernel.pid].append(kernel)
        tracks = [
            Track(f"device {device}", "device", _passes(pool, kernels, passes, launches))
            for device, kernels in sorted(by_device.items())
        ]
        return tuple(tracks)
    by_thread: dict[tuple[str, str], list[Span]] = defaultdict(list)
    for span in spans.all(_OPERATORS if categories & _OPERATORS else None):
        by_thread[span.pid, span.tid].append(span)
    threads = by_thread.values()
    return tuple(
        Track(f"thread {number}", "thread", _passes(pool, ones, passes, {})) for number, ones in enumerate(threads, 1)
    )


class Passes:
    """The forward passes of a profile: the outermost annotations that say what they are, by thread.

    SGLang's ``step[…]`` come first, then names with a phase in them, then ``ProfilerStep#…`` of PyTorch's scheduler.
    """

    def __init__(self, annotations: Sequence[Span]) -> None:
        rules: tuple[Callable[[str], bool], ...] = (
            lambda name: _STEP.match(name) is not None,
            lambda name: phase_of(name) != "other",
            lambda name: _PROFILER_STEP.fullmatch(name) is not None,
        )
        chosen = next(
            (found for rule in rules if (found := [annotation for annotation in annotations if rule(annotation.name)])),
            [],
        )
        self._by_thread: dict[tuple[str, str], list[Span]] = defaultdict(list)
        for one in sorted(chosen, key=lambda one: (one.ts, -one.dur)):
            thread = self._by_thread[one.pid, one.tid]
            if not thread or one.ts >= thread[-1].ts + thread[-1].dur:
                thread.append(one)
        self._begins = {key: [one.ts for one in ones] for key, ones in self._by_thread.items()}

    def of(self, pid: str, tid: str, ts: float) -> Span | None:
        """Return the pass in which a thread was at a time; None if it was in none."""
        begins = self._begins.get((pid, tid))
        if not begins:
            return None
        at = bisect.bisect_right(begins, ts) - 1
        one = self._by_thread[pid, tid][at] if at >= 0 else None
        return one if one is not None and ts <= one.ts + one.dur else None


def _passes(pool: StepPool, spans: list[Span], passes: Passes, launches: dict[int, Span]) -> tuple[Segment, ...]:
    """Group spans by the pass that launched them; what runs between passes becomes segments of its own."""
    spans.sort(key=lambda one: (one.ts, -one.dur, one.number))
    groups: dict[tuple[int, int], list[Span]] = defaultdict(list)
    found: dict[int, Span] = {}
    latest = 0
    for span in spans:
        launch = launches.get(span.correlation, span) if span.correlation >= 0 else span
        one = passes.of(launch.pid, launch.tid, launch.ts)
        if one is None:
            groups[latest, 1].append(span)
        else:
            latest = max(latest, one.number)
            found[one.number] = one
            groups[one.number, 0].append(span)
    order = sorted(groups.items(), key=lambda item: item[1][0].ts)
    return tuple(
        _segment(pool, found[number].name if not outside else "", ones, outside == 1)
        for (number, outside), ones in order
    )


def _segment(pool: StepPool, label: str, spans: Iterable[Span], outside: bool) -> Segment:
    # By stream: how kernels of different streams interleave differs from run to run.
    ones = sorted(spans, key=lambda span: (span.tid, span.ts, -span.dur, span.number))
    kind: SegmentKind = "other" if outside else phase_of(label)
    return Segment(
        label, kind, pool.sequence([pool.step("call", one.name) for one in ones]),
        array("q", (one.number for one in ones)), array("d", (one.ts for one in ones)),
        array("d", (one.dur for one in ones)),
    )  # fmt: skip


def _requests(spans: Spans) -> tuple[Track, ...]:
    """List the requests of MLC-LLM's recorder: the steps of the engine, and what its Python side did, name by name."""
    pool = StepPool()
    by_request: dict[str, list[Span]] = {}
    for span in spans.all():
        name = _COUNTED.sub("", span.name)
        by_request.setdefault(span.tid, []).append(span._replace(name=name, tid=""))
    tracks = []
    for number, ones in enumerate(by_request.values(), 1):
        ones.sort(key=lambda one: (one.ts, -one.dur, one.name))
        engine: list[list[Span]] = [[]]
        front: dict[str, list[Span]] = defaultdict(list)
        for one in ones:
            if one.name in _FRONT_END:
                front[one.name].append(one)
                continue
            if one.name in _STEP_BEGINS:
                engine.append([])
            engine[-1].append(one)
        segments = [_step(pool, group) for group in engine if group]
        _check_order(spans, number, segments)
        tracks.append(Track(f"request {number}", "request", tuple(segments)))
        beside = tuple(_segment(pool, name, group, True) for name, group in sorted(front.items()))
        if beside:
            tracks.append(Track(f"request {number}, front end", "request", beside))
    return tuple(tracks)


def _check_order(spans: Spans, request: int, segments: Sequence[Segment]) -> None:
    """Check that a request is prefilled before it is decoded."""
    kinds = [segment.kind for segment in segments]
    first = next((i for i, kind in enumerate(kinds) if kind == "decode"), len(kinds))
    if first < len(kinds) and not {"extend", "mixed"} & set(kinds[:first]):
        says = "the request is decoded, and nothing was prefilled"
        spans.found.add("trace-decode-before-prefill", f"request {request}", says, segments[first].first)


def _step(pool: StepPool, spans: list[Span]) -> Segment:
    kinds = {phase_of(span.name) for span in spans} - {"other"}
    kind: SegmentKind = next(iter(kinds)) if len(kinds) == 1 else "mixed" if kinds else "other"
    return Segment(
        "", kind, pool.sequence([pool.step("call", span.name) for span in spans]),
        array("q", (span.number for span in spans)), array("d", (span.ts for span in spans)),
        array("d", (span.dur for span in spans)),
    )  # fmt: skip


class ChromeReader:
    """Reads Chrome trace events."""

    id, title = _ID, _TITLE

    def recognises(self, source: Source) -> bool:
        """Return True if the file begins with trace events, compressed or not."""
        return is_chrome_trace(source)

    def read(self, source: Source) -> Document:
        """Read it: passes, kernels, and what does not begin or end."""
        from assay.harness.ingest.trace.chrome_facts import document

        return document(load(source))
