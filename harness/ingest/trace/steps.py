"""An engine's trace in steps: requests, their segments, and the steps of a segment.

A segment is a part that repeats: one step of the engine. Its steps are the actions that the engine polled, the calls that it made,
and the marks in the file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from assay.harness.ingest.result import CitedFinding, Excerpt, FileRead, Timeline

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
SegmentKind = Literal["setup", "extend", "decode", "mixed", "idle"]
"""What a segment computes: the phases of the glossary, both in one pass, or nothing."""


class TraceStep(NamedTuple):
    """One thing that happened, without its place, so that steps of two traces compare."""

    kind: Literal["mark", "action", "call"]
    name: str


@dataclass(frozen=True, slots=True)
class Segment:
    """A repeating part of a request: its steps, with the line of each."""

    kind: SegmentKind
    steps: tuple[TraceStep, ...]
    places: Sequence[int]

    @property
    def first(self) -> int:
        """The line of its first step; 0 if it has none."""
        return self.places[0] if self.places else 0

    @property
    def last(self) -> int:
        """The line of its last step; 0 if it has none."""
        return self.places[-1] if self.places else 0


@dataclass(frozen=True, slots=True)
class Track:
    """A request.

    Attributes:
        name: as messages call it, such as "request 2".
        segments: in order.
        output: the text that the engine answered; None if the file has none.
        output_at: the first and the last line of that text.
    """

    name: str
    segments: tuple[Segment, ...]
    output: str | None = None
    output_at: tuple[int, int] = (0, 0)


class Violation(NamedTuple):
    """A rule that a trace breaks: where, in words; what is wrong, in a sentence without its end; and the lines."""

    rule: str
    where: str
    says: str
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepTrace:
    """A whole trace.

    Attributes:
        file: how much of it was understood.
        tracks: requests, in the order of the file.
        timeline: what the engine did.
        setup: what stands before the first request; None if nothing does.
        violations: of `RULES`, in the order of the file.
    """

    file: FileRead
    tracks: tuple[Track, ...]
    timeline: Timeline
    setup: Segment | None = None
    violations: tuple[Violation, ...] = ()

    @property
    def segments(self) -> list[Segment]:
        """All segments: the setup, then those of the requests."""
        return [
            *([self.setup] if self.setup else []),
            *(segment for track in self.tracks for segment in track.segments),
        ]

    def totals(self) -> Counter[tuple[str, str]]:
        """Count each call and action by the kind of its segment."""
        return Counter(
            (segment.kind, step.name) for segment in self.segments for step in segment.steps if step.kind != "mark"
        )


def findings_of(trace: StepTrace, texts: Mapping[int, str]) -> tuple[CitedFinding, ...]:
    """Make a finding of each violation, but of one rule at most `VIOLATIONS_SHOWN`. `texts` are of lines, by their numbers."""
    counts, seen = Counter(violation.rule for violation in trace.violations), Counter[str]()
    made = list[CitedFinding]()
    for violation in trace.violations:
        seen[violation.rule] += 1
        if seen[violation.rule] > VIOLATIONS_SHOWN:
            continue
        total = counts[violation.rule]
        evidence = [f"line {place:,}{f': {texts[place]}' if place in texts else ''}" for place in violation.places]
        made.append(CitedFinding(
            id=violation.rule, title=RULES[violation.rule], severity="warning", where=violation.where,
            diagnosis=f"{violation.says[0].upper()}{violation.says[1:]}.", reproduce="",
            cites=quote(violation.places, texts, violation.says),
            evidence=(*evidence, *((f"{total:,} such places in the trace",) if total > 1 else ())),
        ))  # fmt: skip
    return tuple(made)


def quote(places: Iterable[int], texts: Mapping[int, str], otherwise: str = "") -> tuple[Excerpt, ...]:
    """Quote the places as excerpts, with the text that stands there."""
    return tuple(Excerpt(first=place, last=place, text=texts.get(place, otherwise)) for place in places if place)
