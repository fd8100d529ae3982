"""Reads an MLC-LLM engine trace: lines → requests, segments, actions and calls; what it states, and the rules that it breaks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from assay.harness.ingest import mlc_trace
from assay.harness.ingest.mlc_rules import violations
from assay.harness.ingest.mlc_trace import (
    ROWS_SHOWN,
    EngineLine,
    Segment,
    SegmentKind,
    StepTrace,
    TraceStep,
    Track,
    Violation,
    findings_of,
    goes_on,
    line_of,
    quote,
)
from assay.harness.ingest.result import (
    MAX_COLUMNS,
    MAX_TRACKS,
    NOTHING,
    POLLED,
    TENTHS,
    Excerpt,
    Fact,
    FactTable,
    FileDocument,
    FileRead,
    FormatReader,
    Lane,
    Timeline,
    TimelineTrack,
)
from assay.harness.ingest.source_file import SourceFile
from assay.harness.text import counted, one_line

_ID, _TITLE = "mlc-llm-actions", "MLC-LLM engine trace"
_SHOWN = 5
"""Lines quoted of those that no rule knows."""
_KINDS: dict[str, Literal["extend", "decode"]] = {mlc_trace.PREFILL: "extend", mlc_trace.DECODE: "decode"}
_FORKED = {
    mlc_trace.ADD: ("added", "adds its sequence, ", "adds a sequence: its prefill runs without a cached prefix"),
    mlc_trace.FORK: (
        "forked", "forks its sequence, ", "forks a sequence whose prefix is in the KV cache: its prefill runs with a cached prefix",
    ),
    "": ("not one", "", ""),
}  # fmt: skip
"""How a request got its sequence, in the table, in the timeline and in a fact."""


def _recognises(source: SourceFile) -> bool:
    """Return True if the file begins like an engine trace: with a line of the engine that a rule knows."""
    lines = (line_of(text.rstrip("\r")) for text in source.head_text.splitlines()[:400])
    return any(line is not None and line.step is not None and line.letter not in ("[", "]") for line in lines)


def _read(source: SourceFile) -> FileDocument:
    """Read it: what it states, and the rules that it breaks."""
    trace = _steps(source)
    shown = trace.tracks[:ROWS_SHOWN]
    wanted = {place for violation in trace.violations for place in violation.places}
    wanted |= {place for _, place in map(_sequence, shown) if place}
    wanted |= {track.output_at[0] for track in shown if track.output is not None}
    texts = {number: one_line(text) for number, text in source.lines() if number in wanted} if wanted else {}
    return FileDocument(
        file=trace.file, facts=tuple(_facts(trace, texts)), tables=(_requests(trace), _calls(trace)),
        findings=findings_of(trace, texts), timeline=trace.timeline,
    )  # fmt: skip


def _steps(source: SourceFile) -> StepTrace:
    """Read the steps of a whole engine trace, one line at a time."""
    reading = _Reading()
    for number, text in source.lines():
        reading.line(number, text)
    parts, unread, last = reading.parts, reading.unread, reading.last
    outside = [line for part in parts if not part.request for line in part.lines if line[0].step]
    tracks = tuple(part.track() for part in parts if part.request)
    return StepTrace(
        FileRead.of(source, _ID, _TITLE, last - unread, unread, "line", reading.excerpts, source.encoding_notes()),
        tracks, _timeline(tracks), _segment(outside, "setup") if outside else None,
        tuple(_violations(parts, last)),
    )  # fmt: skip


def _timeline(tracks: Sequence[Track]) -> Timeline:
    """Draw a trace by request and action, a column for each segment, or for several where there are many."""
    shown = tracks[:MAX_TRACKS]
    longest = max((len(track.segments) for track in shown), default=0)
    per = max(1, -(-longest // MAX_COLUMNS))
    return Timeline(
        segments=longest, tracks=tuple(_lanes(track, per) for track in shown), left_out=len(tracks) - len(shown)
    )


@dataclass
class _RequestLines:
    """The lines from the addition of a request to that of the next; `request` is 0 for what stands outside of all requests."""

    request: int
    lines: list[tuple[EngineLine, int]] = field(default_factory=list)
    output: list[str] = field(default_factory=list)
    output_at: tuple[int, int] = (0, 0)

    def track(self) -> Track:
        """Cut it into segments."""
        segments: list[Segment] = []
        begun: list[tuple[EngineLine, int]] = []
        for line, at in self.lines:
            if line.letter == "[" and begun:
                segments.append(_segment(begun))
                begun = []
            if line.step:
                begun.append((line, at))
            if line.letter == "]":
                segments.append(_segment(begun))
                begun = []
        segments += [_segment(begun)] if begun else []
        output = "\n".join(self.output) if self.output_at[0] else None
        return Track(f"request {self.request}", tuple(segments), output, self.output_at)


class _Reading:
    """Sorts lines into requests, and what stands outside of them.

    Attributes:
        parts: in the order of the file.
        last: number of the last line.
        unread: lines that no rule knows; `excerpts` quotes the first of them.
    """

    def __init__(self) -> None:
        self.parts, self.excerpts = [_RequestLines(0)], list[Excerpt]()
        self.last = self.unread = self._requests = 0
        self._answering = False

    def line(self, number: int, text: str) -> None:
        """Take the next line."""
        self.last, part = number, self.parts[-1]
        if self._answering and goes_on(text):
            part.output.append(text)
            part.output_at = (part.output_at[0], number)
            return
        line = line_of(text)
        if line is None:
            self.unread += 1
            if self.unread <= _SHOWN:
                self.excerpts.append(Excerpt(first=number, last=number, text=one_line(text)))
            return
        self._answering = False
        if line.letter == "N":
            self._requests += 1
            self.parts.append(_RequestLines(self._requests))
        elif line.step and line.step.name == mlc_trace.RELOAD:
            self.parts.append(_RequestLines(0))
        elif line.letter == "o" and part.request and not part.output:
            part.output, part.output_at, self._answering = [line.text], (number, number), True
        self.parts[-1].lines.append((line, number))


def _segment(lines: Sequence[tuple[EngineLine, int]], kind: SegmentKind | None = None) -> Segment:
    steps = tuple(line.step for line, _ in lines if line.step)
    return Segment(kind or _computes(steps), steps, [at for _, at in lines])


@lru_cache(4096)
def _computes(steps: tuple[TraceStep, ...]) -> SegmentKind:
    """Tell the kind of a segment of an engine trace from the functions of the model that it calls."""
    names = {step.name for step in steps if step.kind == "call"}
    prefills, decodes = names & mlc_trace.PREFILLS, names & (mlc_trace.DECODES | mlc_trace.VERIFIES)
    if prefills and decodes:
        return "mixed"
    return "extend" if prefills else "decode" if decodes else "idle"


def _violations(parts: Sequence[_RequestLines], last: int) -> Iterator[Violation]:
    for number, part in enumerate(parts):
        ruled = [(line, at) for line, at in part.lines if line.letter]
        following = parts[number + 1].lines[0][1] if number + 1 < len(parts) else 0
        letters = "".join(line.letter for line, _ in ruled) + ("X" if following else "Z")
        lines = [(line.step.name if line.step else "", at) for line, at in ruled] + [("", following or last)]
        outside = "no request" if number else "before the first request"
        yield from violations(letters, lines, f"request {part.request}" if part.request else outside)


def _sequence(track: Track) -> tuple[str, int]:
    """Return how a request got its sequence, and in which line; nothing if it got none or several."""
    got = [
        (step.name, place)
        for segment in track.segments
        for step, place in zip(segment.steps, segment.places, strict=True)
        if step.name in (mlc_trace.ADD, mlc_trace.FORK)
    ]
    return got[0] if len(got) == 1 else ("", 0)


def _marked(track: Track) -> list[Segment]:
    """List the segments that stand between marks: not the prefill before the first of them."""
    return [segment for segment in track.segments if segment.steps[0].name == "segment begins"]


def tokens(track: Track) -> tuple[int, int]:
    """Count the tokens that were sampled for a request: in prefills, and in everything else."""
    sampled = [
        (segment.kind, sum(step.name in mlc_trace.SAMPLE for step in segment.steps)) for segment in track.segments
    ]
    return sum(n for kind, n in sampled if kind == "extend"), sum(n for kind, n in sampled if kind != "extend")


def _facts(trace: StepTrace, texts: dict[int, str]) -> Iterator[Fact]:
    yield Fact(id="requests", title="Requests", text=counted(len(trace.tracks), "request"))
    if not trace.violations:
        yield Fact(id="rules", title="Rules", text="no rule of the engine is broken")
    for track in trace.tracks[:ROWS_SHOWN]:
        marked, slug, (first, rest) = _marked(track), track.name.replace(" ", "-"), tokens(track)
        idle = sum(segment.kind == "idle" for segment in marked)
        steps = sum(segment.kind == "decode" for segment in marked)
        ends = ", the last one" if idle == 1 and marked[-1].kind == "idle" else ""
        says = f"{counted(len(marked), 'segment')}: {steps:,} with a decode, {idle:,} idle{ends}"
        yield Fact(id=f"{slug}-segments", title=f"Segments of {track.name}", text=says)
        says = f"{counted(first + rest, 'token')}: {first:,} from the prefill, {rest:,} from decodes"
        yield Fact(id=f"{slug}-tokens", title=f"Tokens of {track.name}", text=says)
        name, place = _sequence(track)
        if name:
            says, cites = f"{track.name} {_FORKED[name][2]}", quote([place], texts)
            yield Fact(id=f"{slug}-sequence", title=f"Sequence of {track.name}", text=says, cites=cites)
        if track.output is not None:
            at, until = track.output_at
            cite = Excerpt(first=at, last=until, text=texts.get(at, ""))
            yield Fact(id=f"{slug}-output", title=f"Answer to {track.name}", text=track.output, cites=(cite,))


def _requests(trace: StepTrace) -> FactTable:
    rows = []
    for track in trace.tracks[:ROWS_SHOWN]:
        marked = _marked(track)
        kinds = [segment.kind for segment in marked]
        rows.append((
            track.name, f"{track.segments[0].first:,} to {track.segments[-1].last:,}" if track.segments else "",
            _FORKED[_sequence(track)[0]][0], f"{len(marked):,}", f"{kinds.count('decode'):,}", f"{kinds.count('idle'):,}",
            f"{sum(tokens(track)):,}",
        ))  # fmt: skip
    columns = ("request", "lines", "sequence", "segments", "decodes", "idle", "tokens")
    return FactTable(
        id="requests", title="Requests", columns=columns, rows=tuple(rows), note=_left_out(len(trace.tracks))
    )


def _left_out(total: int) -> str:
    return f"{total - ROWS_SHOWN:,} more are not shown" if total > ROWS_SHOWN else ""


def _calls(trace: StepTrace) -> FactTable:
    counts = trace.totals()
    kinds = [kind for kind in ("setup", "extend", "mixed", "decode", "idle") if any(key[0] == kind for key in counts)]
    names = sorted({name for _, name in counts}, key=lambda name: (-sum(counts[kind, name] for kind in kinds), name))
    rows = tuple(
        (name, *(f"{counts[kind, name]:,}" for kind in kinds), f"{sum(counts[kind, name] for kind in kinds):,}")
        for name in names[:ROWS_SHOWN]
    )
    title, columns = "Actions and calls, by what their segment computes", ("name", *kinds, "all")
    return FactTable(id="calls", title=title, columns=columns, rows=rows, note=_left_out(len(names)))


def _lanes(track: Track, per: int) -> TimelineTrack:
    groups = [track.segments[at : at + per] for at in range(0, len(track.segments), per)]
    lanes = tuple(
        Lane(name=name, kind=_KINDS.get(name, "other"), cells="".join(_cell(group, name) for group in groups))
        for name in mlc_trace.POLLING_ORDER
    )
    note = f"{_FORKED[_sequence(track)[0]][1]}{counted(sum(tokens(track)), 'token')}"
    return TimelineTrack(name=track.name, note=note, lanes=lanes)


def _cell(group: Sequence[Segment], action: str) -> str:
    """Return the cell of an action: in how many of some segments it computed something, or that it was polled."""
    polled = computed = 0
    for segment in group:
        calls: set[str] | None = None
        for kind, name in segment.steps:
            if kind == "action":
                computed += bool(calls and calls & mlc_trace.MODEL_CALLS)
                calls = set() if name == action else None
                polled += name == action
            elif calls is not None and kind == "call":
                calls.add(name)
        computed += bool(calls and calls & mlc_trace.MODEL_CALLS)
    if not computed:
        return POLLED if polled else NOTHING
    return TENTHS[int(min(1.0, computed / len(group)) * len(TENTHS) - 1e-9)]


READER = FormatReader(_ID, _TITLE, _recognises, _read, steps=_steps)
