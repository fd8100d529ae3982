"""One model of a trace, whoever wrote it: tracks, their segments, and the steps of a segment.

A track is a request of an engine, or a device or a thread of a profile. A segment is a part of it that repeats: one step of an
engine, or one forward pass. Its steps are the actions that the engine polled, the calls that it made, and the marks in the file.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

StepKind = Literal["mark", "action", "call"]
TrackKind = Literal["request", "device", "thread"]
SegmentKind = Literal["setup", "extend", "decode", "mixed", "idle", "other"]
"""What a segment computes: the phases of the glossary, both in one pass, nothing, or something unnamed."""
Unit = Literal["line", "event"]


class Step(NamedTuple):
    """One thing that happened, without its place: equal steps are one object in a trace, and compare between traces."""

    kind: StepKind
    name: str


@dataclass(frozen=True, slots=True)
class Segment:
    """A repeating part of a track.

    Attributes:
        label: as in the file, such as ``step[DECODE bs=4]``; empty where the file gives it no name.
        kind: what it computes.
        steps: shared by all segments of a trace that have the same ones.
        places: the line or the event of each step, from 1.
        times: the start of each step in microseconds; empty where the file has no times.
        durations: of each step in microseconds; empty where the file has no times.
    """

    label: str
    kind: SegmentKind
    steps: tuple[Step, ...]
    places: Sequence[int]
    times: Sequence[float] = ()
    durations: Sequence[float] = ()

    @property
    def first(self) -> int:
        """The line or event of its first step; 0 if it has none."""
        return self.places[0] if len(self.places) else 0

    @property
    def last(self) -> int:
        """The line or event of its last step; 0 if it has none."""
        return self.places[-1] if len(self.places) else 0

    def actions(self) -> Iterator[tuple[str, int, tuple[str, ...]]]:
        """Yield each action that was polled, with its place and the names of the calls that it made, in order."""
        name, place = "", 0
        calls: list[str] = []
        for step, at in zip(self.steps, self.places, strict=True):
            if step.kind == "action":
                if name:
                    yield name, place, tuple(calls)
                name, place, calls = step.name, at, []
            elif step.kind == "call":
                calls.append(step.name)
        if name:
            yield name, place, tuple(calls)


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
    kind: TrackKind
    segments: tuple[Segment, ...]
    output: str | None = None
    output_at: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule of the state machine that a trace breaks.

    Attributes:
        rule: kebab-case id, such as ``trace-begin-not-closed``.
        where: track and segment, in words.
        says: what is wrong, in a sentence without its end.
        places: the lines or events that show it.
    """

    rule: str
    where: str
    says: str
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """A whole trace.

    Attributes:
        format: "mlc-llm-actions" or "chrome-trace".
        writer: who wrote it, as far as the file tells, such as "PyTorch's profiler".
        unit: what places count.
        setup: what stands before the first request; None if nothing does.
        tracks: in the order of the file.
        violations: of the rules of the state machine, in the order of the file.
        broken: how many violations there are of each rule, those included that `violations` leaves out.
    """

    format: Literal["mlc-llm-actions", "chrome-trace"]
    writer: str
    unit: Unit
    setup: Segment | None
    tracks: tuple[Track, ...]
    violations: tuple[Violation, ...] = ()
    broken: dict[str, int] = field(default_factory=dict)


class StepPool:
    """Equal steps, and equal sequences of them, as one object each: a long trace repeats a few of them."""

    def __init__(self) -> None:
        self._steps: dict[tuple[str, str], Step] = {}
        self._sequences: dict[tuple[Step, ...], tuple[Step, ...]] = {}

    def step(self, kind: StepKind, name: str) -> Step:
        """Intern the step with this kind and name."""
        known = self._steps.get((kind, name))
        if known is None:
            known = self._steps[kind, name] = Step(kind, name)
        return known

    def sequence(self, steps: Sequence[Step]) -> tuple[Step, ...]:
        """Intern these steps as a tuple."""
        whole = tuple(steps)
        return self._sequences.setdefault(whole, whole)


def compact(places: Sequence[int]) -> Sequence[int]:
    """Store increasing places as a range where they are consecutive, as an array where they are not."""
    if places and places[-1] - places[0] == len(places) - 1:
        return range(places[0], places[-1] + 1)
    return array("q", places)
