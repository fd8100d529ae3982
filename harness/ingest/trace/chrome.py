"""Reads Chrome trace events: PyTorch's profiler, SGLang's, and MLC-LLM's event recorder → tracks, passes and kernels."""

from __future__ import annotations

import bisect
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from assay.harness.ingest.result import Excerpt, Fact, FactTable, FileDocument, FileRead, FormatReader
from assay.harness.ingest.source_file import SourceFile
from assay.harness.ingest.trace.json_events import GZIP, EventStream
from assay.harness.ingest.trace.spans import Span, Spans
from assay.harness.ingest.trace.steps import (
    ROWS_SHOWN,
    Segment,
    SegmentKind,
    StepTrace,
    TraceStep,
    Track,
    Violation,
    findings_of,
    left_out,
    totals,
)
from assay.harness.text import one_line

_SHOWN = 5
"""Events quoted of those that no rule knows."""
KERNELS = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
"""Categories of what runs on a device, in PyTorch's traces."""
_OPERATORS = frozenset({"cpu_op"})
_ANNOTATIONS = frozenset({"user_annotation"})
_MLC, _PYTORCH, _UNKNOWN = "MLC-LLM's event recorder", "PyTorch's profiler", "an unknown writer"
_WITHOUT_CATEGORY = {"M": "metadata", "C": "counter", **dict.fromkeys("iI", "instant"), **dict.fromkeys("stf", "flow")}
_HEAD = re.compile(r'\s*(?:\[\s*\{\s*"(?:ph|name|cat|pid|tid|ts|dur|args|id)"|\{.*"traceEvents"\s*:\s*\[)', re.DOTALL)
_STEP = re.compile(r"step\[(\w+)")
_PHASES: dict[str, SegmentKind] = {
    "EXTEND": "extend", "DECODE": "decode", "VERIFY": "decode", "MIXED": "mixed", "IDLE": "idle",
}  # fmt: skip
_PASSES: tuple[Callable[[str], object], ...] = (
    _STEP.match,
    lambda name: _phase_of(name) != "other",
    re.compile(r"ProfilerStep#\d+").fullmatch,
)
"""Names of annotations that are forward passes: SGLang's ``step[…]`` come first, then names with a phase in them, then those of
PyTorch's scheduler."""
_COUNTED = re.compile(r" \(\d+\)$")
_FRONT_END = frozenset({
    "receive request", "invoke generate", "tokenization", "detokenization", "callback", "yield delta output",
    "yield final usage", "skip empty delta text", "finish",
})  # fmt: skip
"""Events of MLC-LLM's Python side (``engine.py``, ``engine_base.py``): their threads run beside the engine's."""
_STEP_BEGINS = frozenset({"embedding", "proposal embedding", "verify embedding"})
"""What each step of MLC-LLM's engine begins with."""


def _recognises(source: SourceFile) -> bool:
    """Return True if the file begins with trace events, compressed or not."""
    if source.head.startswith(GZIP):
        _, first, _ = next(EventStream(source.path).events(), (0, None, ""))
        return isinstance(first, dict) and "ph" in first
    return _HEAD.match(source.head_text) is not None


def _read(source: SourceFile) -> FileDocument:
    """Read it: passes, kernels, and what does not begin or end."""
    trace = _steps(source)
    return FileDocument(
        file=trace.file, facts=tuple(_facts(trace)), tables=(_kernels(trace), _passes(trace)),
        findings=findings_of(trace, {}),
    )  # fmt: skip


def _steps(source: SourceFile) -> StepTrace:
    """Read all events of a file, one at a time."""
    stream, spans = EventStream(source.path), Spans()
    unread: list[Excerpt] = []
    number = refused = 0
    for number, value, text in stream.events():
        if not spans.add(number, value):
            refused += 1
            if len(unread) < _SHOWN:
                unread.append(Excerpt(first=number, last=number, text=one_line(text or repr(value)[:400])))
    violations = spans.violations()
    if stream.ended and (stream.head or "compressed" in stream.ended):
        violations.append(Violation("trace-cut-off", "end of the file", stream.ended, (number,) if number else ()))
    writer = _writer(spans, stream.head)
    tracks = tuple(_requests(spans)) if writer == _MLC else _profile(spans)
    violations += _decoded_before_prefill(tracks) if writer == _MLC else ()
    return StepTrace(
        FileRead.of(
            source, "chrome-trace", f"Chrome trace events of {writer}", number - refused, refused, "event", unread,
            filter(None, [stream.ended]),
        ),
        writer, tracks, violations=tuple(violations), stated=tuple(_stated(spans, tracks)),
    )  # fmt: skip


def _phase_of(name: str) -> SegmentKind:
    """Infer the phase that a name states: SGLang's ``step[DECODE bs=4]``, or a word in it; "other" if it states none."""
    if step := _STEP.match(name):
        return _PHASES.get(step[1], "other")
    lower = name.lower()
    if "prefill" in lower or "extend" in lower:
        return "extend"
    return "decode" if "decode" in lower or "verify" in lower else "other"


def _writer(spans: Spans, head: str) -> str:
    categories = {span.cat for span in spans.all}
    if categories & (KERNELS | _OPERATORS | _ANNOTATIONS) or '"schemaVersion"' in head:
        return _PYTORCH
    phases = {phase for phase, _ in spans.kinds}
    if categories == {""} and phases <= set("BEi") and all(
        span.pid == "1" and (span.name == "finish" or _COUNTED.search(span.name)) for span in spans.all[:100]
    ):  # fmt: skip
        return _MLC
    return _UNKNOWN


def _profile(spans: Spans) -> tuple[Track, ...]:
    """List the tracks of a profile: its devices, or its threads if no device ran anything; of another writer, all threads."""
    pass_at = _pass_at(spans.of(_ANNOTATIONS))
    kernels, operators = spans.of(KERNELS), spans.of(_OPERATORS)
    groups: dict[tuple[str, str], list[Span]] = defaultdict(list)
    for span in kernels or operators or spans.all:
        groups[span.pid, "" if kernels else span.tid].append(span)
    if kernels:
        launches = spans.launches()
        return tuple(
            Track(f"device {device}", "device", _segments(ran, pass_at, launches))
            for (device, _), ran in sorted(groups.items())
        )
    return tuple(
        Track(f"thread {number}", "thread", _segments(ran, pass_at, {}))
        for number, ran in enumerate(groups.values(), 1)
    )


def _pass_at(annotations: Sequence[Span]) -> Callable[[Span], Span | None]:
    """Make what finds the forward pass in which a thread was when a span began: the outermost annotation that names one."""
    named = ([span for span in annotations if rule(span.name)] for rule in _PASSES)
    by_thread: dict[tuple[str, str], list[Span]] = defaultdict(list)
    for span in sorted(next(filter(None, named), []), key=lambda span: (span.ts, -span.dur)):
        thread = by_thread[span.pid, span.tid]
        if not thread or span.ts >= thread[-1].end:
            thread.append(span)

    def pass_at(span: Span) -> Span | None:
        thread = by_thread.get((span.pid, span.tid), [])
        at = bisect.bisect_right(thread, span.ts, key=lambda begun: begun.ts) - 1
        return thread[at] if at >= 0 and span.ts <= thread[at].end else None

    return pass_at


def _segments(
    spans: list[Span], pass_at: Callable[[Span], Span | None], launches: Mapping[int, Span]
) -> tuple[Segment, ...]:
    """Group spans by the pass that launched them; what runs between passes becomes segments of its own."""
    groups: dict[tuple[int, bool], list[Span]] = defaultdict(list)
    labels: dict[int, str] = {}
    latest = 0
    for span in sorted(spans, key=lambda span: (span.ts, -span.dur, span.number)):
        inside = pass_at(launches.get(span.correlation, span))
        if inside is not None:
            latest = max(latest, inside.number)
            labels[inside.number] = inside.name
        groups[inside.number if inside else latest, inside is not None].append(span)
    made = []
    for (number, named), ran in sorted(groups.items(), key=lambda item: item[1][0].ts):
        label = labels[number] if named else ""
        # By stream: how kernels of different streams interleave differs from run to run.
        made.append(_segment(sorted(ran, key=lambda span: span.tid), label, _phase_of(label)))
    return tuple(made)


def _segment(spans: Sequence[Span], label: str, kind: SegmentKind) -> Segment:
    return Segment(
        label, kind, tuple(TraceStep("call", span.name) for span in spans), [span.number for span in spans],
        [span.ts for span in spans], [span.dur for span in spans],
    )  # fmt: skip


def _requests(spans: Spans) -> Iterator[Track]:
    """Yield the requests of MLC-LLM's recorder: the steps of the engine, and what its Python side did, name by name."""
    by_request: dict[str, list[Span]] = defaultdict(list)
    for span in spans.all:
        by_request[span.tid].append(span._replace(name=_COUNTED.sub("", span.name)))
    for number, ran in enumerate(by_request.values(), 1):
        engine: list[list[Span]] = [[]]
        front: dict[str, list[Span]] = defaultdict(list)
        for span in sorted(ran, key=lambda span: (span.ts, -span.dur, span.name)):
            if span.name in _FRONT_END:
                front[span.name].append(span)
                continue
            if span.name in _STEP_BEGINS:
                engine.append([])
            engine[-1].append(span)
        yield Track(
            f"request {number}", "request", tuple(_segment(group, "", _phase(group)) for group in engine if group)
        )
        if front:
            beside = tuple(_segment(group, name, "other") for name, group in sorted(front.items()))
            yield Track(f"request {number}, front end", "request", beside)


def _phase(spans: Sequence[Span]) -> SegmentKind:
    kinds = {_phase_of(span.name) for span in spans} - {"other"}
    return kinds.pop() if len(kinds) == 1 else "mixed" if kinds else "other"


def _decoded_before_prefill(tracks: Sequence[Track]) -> Iterator[Violation]:
    """Yield the requests that are decoded before they are prefilled."""
    for track in tracks:
        first = next((segment for segment in track.segments if segment.kind in ("extend", "mixed", "decode")), None)
        if first is not None and first.kind == "decode":
            says = "the request is decoded, and nothing was prefilled"
            yield Violation("trace-decode-before-prefill", track.name, says, (first.first,))


def _stated(spans: Spans, tracks: Sequence[Track]) -> Iterator[Fact]:
    what = Counter[str]()
    for (phase, cat), number in spans.kinds.items():
        what[cat or _WITHOUT_CATEGORY.get(phase, "span")] += number
    common = ", ".join(f"{one_line(name, 40)} {number:,}" for name, number in what.most_common(12))
    length = max((span.end for span in spans.all), default=0.0) - min((span.ts for span in spans.all), default=0.0)
    yield Fact(id="events", title="Events by category", text=common or "none")
    yield Fact(id="length", title="From the first event to the last", text=f"{length / 1e3:,.3f} ms")
    given = [spans.process_names.get(track.name.removeprefix("device "), "") for track in tracks[:20]]
    named = [f"{track.name} ({name})" if name and track.kind == "device" else track.name
             for track, name in zip(tracks, given, strict=False)]  # fmt: skip
    yield Fact(id="tracks", title="Tracks", text=", ".join(named) or "none")


def _facts(trace: StepTrace) -> Iterator[Fact]:
    yield Fact(id="writer", title="Written by", text=trace.writer)
    yield from trace.stated
    kinds = Counter(segment.kind for segment in trace.segments)
    phases = ", ".join(f"{kind} {number:,}" for kind, number in sorted(kinds.items()))
    yield Fact(id="segments", title="Segments by phase", text=phases or "none")
    if trace.writer == _MLC:
        engine = trace.tracks[:40:2]
        sampled = [str(sum(step.name == "sampling" for s in track.segments for step in s.steps)) for track in engine]
        yield Fact(id="tokens", title="Tokens sampled, by request", text=", ".join(sampled))


def _kernels(trace: StepTrace) -> FactTable:
    counts, times = totals(trace)
    whole = sum(times.values()) or 1.0
    rows = tuple(
        (one_line(name, 300), phase, f"{counts[phase, name]:,}", f"{time / 1e3:,.3f}", f"{100 * time / whole:.1f}")
        for (phase, name), time in sorted(times.items(), key=lambda item: (-item[1], item[0]))[:ROWS_SHOWN]
    )
    columns = ("name", "phase", "count", "ms", "% of all")
    return FactTable(
        id="kernels", title="What ran, by name and phase", columns=columns, rows=rows, note=left_out(len(times))
    )


def _passes(trace: StepTrace) -> FactTable:
    groups: dict[tuple[str, str, int], list[Segment]] = defaultdict(list)
    for track in trace.tracks:
        for segment in track.segments:
            groups[track.name, segment.kind, len(segment.steps)].append(segment)
    rows = tuple(
        (track, kind, f"{steps:,}", f"{len(same):,}", one_line(same[0].label, 80), f"{same[0].first:,}")
        for (track, kind, steps), same in list(groups.items())[:ROWS_SHOWN]
    )
    columns = ("track", "phase", "steps", "segments", "label of the first", "its first event")
    return FactTable(
        id="passes", title="Segments with as many steps", columns=columns, rows=rows, note=left_out(len(groups))
    )


READER = FormatReader("chrome-trace", "Chrome trace events", _recognises, _read, steps=_steps)
