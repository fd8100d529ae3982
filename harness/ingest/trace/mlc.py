"""Reads an MLC-LLM engine trace: lines → requests, segments, actions and calls."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache

from assay.harness.ingest.result import Document, Excerpt, FileRead
from assay.harness.ingest.source import Line, Source
from assay.harness.ingest.trace import mlc_lines
from assay.harness.ingest.trace.machine import EngineMachine
from assay.harness.ingest.trace.mlc_lines import Kind
from assay.harness.ingest.trace.model import Segment, SegmentKind, Step, StepKind, StepPool, Trace, Track, compact
from assay.harness.text import one_line

_SHOWN = 5
"""Lines quoted of those that no rule knows."""
_ID, _TITLE = "mlc-llm-actions", "MLC-LLM engine trace"
_STEPS = ("call", "action")
"""Kinds of lines that are a step as they are."""
_MARKS = {"add-request": "Add Request", "segment-begin": "segment begins", "segment-end": "segment ends"}


@dataclass
class _Part:
    """A segment that is being read."""

    steps: list[Step] = field(default_factory=list)
    places: list[int] = field(default_factory=list)


@dataclass
class _Request:
    """A request that is being read."""

    segments: list[Segment] = field(default_factory=list)
    output: list[str] | None = None
    output_at: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class LoadedTrace:
    """A trace, and how much of its file was understood."""

    trace: Trace
    file: FileRead
    counts: Counter[str]


class _Builder:
    """Puts lines together to segments and requests."""

    def __init__(self) -> None:
        self.pool = StepPool()
        self.setup, self.requests = _Part(), list[_Request]()
        self._part: _Part = self.setup
        self._request: _Request | None = None
        self._in_output = False

    def continues_output(self, line: Line, kind: Kind | None) -> bool:
        """Return True if a line goes on with the text of an answer."""
        if not self._in_output or (kind is not None and kind.kind != "blank"):
            return False
        return not mlc_lines.belongs_to_engine(line.text)

    def extend_output(self, line: Line) -> None:
        """Add a line to the text of an answer."""
        assert self._request is not None
        assert self._request.output is not None
        self._request.output.append(line.text)
        self._request.output_at = (self._request.output_at[0], line.number)

    def add(self, kind: Kind, at: int) -> None:
        """Add a call or an action, as nearly all lines are."""
        self._in_output = False
        self._part.steps.append(self.pool.step(*kind))  # type: ignore[arg-type]
        self._part.places.append(at)

    def take(self, kind: Kind, at: int) -> None:
        """Add any other line that is not the continuation of an answer."""
        self._in_output = False
        if kind.kind == "output":
            self._output(kind.name, at)
        elif kind.kind == "add-request":
            self._close()
            self._request, self._part = _Request(), _Part()
            self.requests.append(self._request)
        elif kind.name == mlc_lines.RELOAD:
            self._close()
            self._request, self._part = None, self.setup
        elif kind.kind == "segment-begin" and self._request is not None:
            self._close()
            self._part = _Part()
        self._step(kind, at)
        if kind.kind == "segment-end" and self._request is not None:
            self._close()
            self._part = _Part()

    def _output(self, text: str, at: int) -> None:
        if self._request is not None and self._request.output is None:
            self._request.output, self._request.output_at, self._in_output = [text], (at, at), True

    def _step(self, kind: Kind, at: int) -> None:
        if kind.kind == "setup-call":
            self._add("call", kind.name, at)
        elif kind.kind in _MARKS or kind.kind == "engine":
            self._add("mark", _MARKS.get(kind.kind, kind.name), at)

    def _add(self, kind: StepKind, name: str, at: int) -> None:
        self._part.steps.append(self.pool.step(kind, name))
        self._part.places.append(at)

    def _close(self) -> None:
        if self._request is not None and self._part.steps:
            self._request.segments.append(self.segment(self._part))

    def segment(self, part: _Part) -> Segment:
        """Make a part a segment."""
        steps = self.pool.sequence(part.steps)
        kind: SegmentKind = "setup" if part is self.setup else computes(steps)
        return Segment("", kind, steps, compact(part.places))

    def tracks(self) -> tuple[Track, ...]:
        """Return all requests, the last one closed."""
        self._close()
        self._part = _Part()
        return tuple(
            Track(
                f"request {number}", "request", tuple(request.segments),
                None if request.output is None else "\n".join(request.output), request.output_at,
            )
            for number, request in enumerate(self.requests, 1)
        )  # fmt: skip


@lru_cache(4096)
def computes(steps: tuple[Step, ...]) -> SegmentKind:
    """Tell the kind of a segment of an engine trace from the functions of the model that it calls."""
    names = {step.name for step in steps if step.kind == "call"}
    prefills, decodes = names & mlc_lines.PREFILLS, names & (mlc_lines.DECODES | mlc_lines.VERIFIES)
    if prefills and decodes:
        return "mixed"
    return "extend" if prefills else "decode" if decodes else "idle"


def is_engine_trace(source: Source) -> bool:
    """Return True if a file begins like an engine trace: with a line of the engine that a rule knows."""
    for text in source.head_text.splitlines()[:400]:
        kind = mlc_lines.kind_of(text.rstrip("\r"))
        if kind is not None and kind.kind in ("engine", "setup-call", "add-request", "action", "call"):
            return True
    return False


def load(source: Source) -> LoadedTrace:
    """Read a whole engine trace, one line at a time."""
    builder, machine = _Builder(), EngineMachine()
    counts: Counter[str] = Counter()
    unread: list[Excerpt] = []
    number = 0
    for line in source.lines():
        number, kind = line.number, mlc_lines.kind_of(line.text)
        if kind is not None and kind.kind in _STEPS:
            counts[kind.kind] += 1
            builder.add(kind, number)
            machine.feed(kind, number)
        elif builder.continues_output(line, kind):
            builder.extend_output(line)
            counts["output-text"] += 1
        elif kind is None:
            counts["unread"] += 1
            if len(unread) < _SHOWN:
                unread.append(Excerpt(first=number, last=number, text=one_line(line.text)))
        else:
            counts[kind.kind] += 1
            builder.take(kind, number)
            machine.feed(kind, number)
    machine.finish(number)
    tracks = builder.tracks()
    setup = builder.segment(builder.setup) if builder.setup.steps else None
    trace = Trace(
        "mlc-llm-actions", "MLC-LLM", "line", setup, tracks, tuple(machine.found.kept), dict(machine.found.counts)
    )
    read = number - counts["unread"]
    file = FileRead.of(source, _ID, _TITLE, read, counts["unread"], excerpts=unread, notes=source.encoding_notes())
    return LoadedTrace(trace, file, counts)


class MlcReader:
    """Reads the trace that an instrumented MLC-LLM engine prints."""

    id, title = _ID, _TITLE

    def recognises(self, source: Source) -> bool:
        """Return True if the file begins with lines of the engine."""
        return is_engine_trace(source)

    def read(self, source: Source) -> Document:
        """Read it: what it states, and the rules that it breaks."""
        from assay.harness.ingest.trace.facts import document

        loaded = load(source)
        return document(loaded.trace, loaded.file, source)
