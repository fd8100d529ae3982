"""A trace in steps, whoever wrote it: tracks, their segments, and the steps of a segment.

A track is a request of an engine, or a device or a thread of a profile. A segment is a part of it that repeats: one step of an
engine, or one forward pass. Its steps are the actions that the engine polled, the calls that it made, and the marks in the file.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from assay.harness.ingest.result import CitedFinding, Excerpt, Fact, FileDocument, FileRead, Timeline
from assay.harness.verdict import Verdict, serious

ROWS_SHOWN = 100
"""Most rows of a table."""
VIOLATIONS_SHOWN = 5
"""Most violations of one rule that become findings; the others are counted."""
RULES = {
    "trace-begin-not-closed": "A begin without its end",
    "trace-end-not-begun": "An end without its begin",
    "trace-decode-before-prefill": "A decode before the prefill of its request",
    "trace-sequence-count": "Not one sequence added or forked for a request",
    "trace-action-order": "Actions polled out of order",
    "trace-call-order": "Calls of a forward pass out of order",
    "trace-cut-off": "The trace ends early",
}
"""Rules that a trace keeps, by id, with their titles."""
SegmentKind = Literal["setup", "extend", "decode", "mixed", "idle", "other"]
"""What a segment computes: the phases of the glossary, both in one pass, nothing, or something unnamed."""


class TraceStep(NamedTuple):
    """One thing that happened, without its place, so that steps of two traces compare."""

    kind: Literal["mark", "action", "call"]
    name: str


@dataclass(frozen=True, slots=True)
class Segment:
    """A repeating part of a track.

    Attributes:
        label: as in the file, such as ``step[DECODE bs=4]``; empty where the file gives it no name.
        kind: what it computes.
        steps: in order.
        places: the line or the event of each step, from 1.
        times: the start of each step in microseconds; empty where the file has no times.
        durations: of each step in microseconds; empty where the file has no times.
    """

    label: str
    kind: SegmentKind
    steps: tuple[TraceStep, ...]
    places: Sequence[int]
    times: Sequence[float] = ()
    durations: Sequence[float] = ()

    @property
    def first(self) -> int:
        """The line or event of its first step; 0 if it has none."""
        return self.places[0] if self.places else 0

    @property
    def last(self) -> int:
        """The line or event of its last step; 0 if it has none."""
        return self.places[-1] if self.places else 0


@dataclass(frozen=True, slots=True)
class Track:
    """A request of an engine, or a device or a thread of a profile.

    Attributes:
        name: as messages call it, such as "request 2" or "device 0".
        kind: of these.
        segments: in order.
        output: the text that the engine answered; None if the file has none.
        output_at: the first and the last line of that text.
    """

    name: str
    kind: Literal["request", "device", "thread"]
    segments: tuple[Segment, ...]
    output: str | None = None
    output_at: tuple[int, int] = (0, 0)


class Violation(NamedTuple):
    """A rule that a trace breaks: where, in words; what is wrong, in a sentence without its end; and the lines or events."""

    rule: str
    where: str
    says: str
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepTrace:
    """A whole trace.

    Attributes:
        file: how much of it was understood.
        writer: who wrote it, as far as the file tells, such as "PyTorch's profiler".
        tracks: in the order of the file.
        timeline: what an engine did; None for a profile.
        setup: what stands before the first request; None if nothing does.
        violations: of `RULES`, in the order of the file.
        stated: what else the file states.
    """

    file: FileRead
    writer: str
    tracks: tuple[Track, ...]
    timeline: Timeline | None = None
    setup: Segment | None = None
    violations: tuple[Violation, ...] = ()
    stated: tuple[Fact, ...] = ()

    @property
    def segments(self) -> list[Segment]:
        """All segments: the setup, then those of the tracks."""
        return [
            *([self.setup] if self.setup else []),
            *(segment for track in self.tracks for segment in track.segments),
        ]


def totals(trace: StepTrace) -> tuple[Counter[tuple[str, str]], dict[tuple[str, str], float]]:
    """Count each call and action by the kind of its segment, and sum their microseconds where there are times."""
    counts: Counter[tuple[str, str]] = Counter()
    times: dict[tuple[str, str], float] = defaultdict(float)
    for segment in trace.segments:
        counts.update((segment.kind, step.name) for step in segment.steps if step.kind != "mark")
        for step, duration in zip(segment.steps, segment.durations, strict=False):
            times[segment.kind, step.name] += duration
    return counts, dict(times)


def findings_of(trace: StepTrace, texts: Mapping[int, str]) -> tuple[CitedFinding, ...]:
    """Make a finding of each violation, but of one rule at most `VIOLATIONS_SHOWN`. `texts` are of lines, by their numbers."""
    counts, made = Counter(violation.rule for violation in trace.violations), list[CitedFinding]()
    for number, violation in _numbered(trace.violations):
        if number > VIOLATIONS_SHOWN:
            continue
        unit, total = trace.file.unit, counts[violation.rule]
        evidence = [f"{unit} {place:,}{f': {texts[place]}' if place in texts else ''}" for place in violation.places]
        made.append(CitedFinding(
            id=violation.rule, title=RULES[violation.rule], severity="warning", where=violation.where,
            diagnosis=f"{violation.says[0].upper()}{violation.says[1:]}.", reproduce="",
            cites=quote(violation.places, texts, violation.says),
            evidence=(*evidence, *((f"{total:,} such places in the trace",) if total > 1 else ())),
        ))  # fmt: skip
    return tuple(made)


def _numbered(violations: Iterable[Violation]) -> Iterable[tuple[int, Violation]]:
    """Number the violations of each rule from 1."""
    seen: Counter[str] = Counter()
    for violation in violations:
        seen[violation.rule] += 1
        yield seen[violation.rule], violation


def quote(places: Iterable[int], texts: Mapping[int, str], otherwise: str = "") -> tuple[Excerpt, ...]:
    """Quote the places as excerpts, with the text that stands there."""
    return tuple(Excerpt(first=place, last=place, text=texts.get(place, otherwise)) for place in places if place)


def left_out(total: int) -> str:
    """Describe how many rows a table lacks; empty if it has all."""
    return f"{total - ROWS_SHOWN:,} more are not shown" if total > ROWS_SHOWN else ""


def verdict_of(document: FileDocument) -> Verdict:
    """Return the verdict: "regression" if a rule is broken, "inconclusive" if part of it was not understood or it is empty."""
    if serious(document.findings):
        return "regression"
    return "inconclusive" if document.file.unread or not document.file.read else "pass"
