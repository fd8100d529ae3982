"""Compares two traces: the first difference in a sentence with both places, and a summary of all.

What is compared is the structure: which steps a track takes, in which order. Times are shown and never compared: two runs of the
same program differ in them.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Literal, NamedTuple

from pydantic import Field

from assay.harness.ingest.result import Excerpt, FileRead
from assay.harness.ingest.timeline import Timeline
from assay.harness.ingest.trace import mlc_lines
from assay.harness.ingest.trace.align import Block, align
from assay.harness.ingest.trace.model import Segment, Step, Trace, Track
from assay.harness.schema import Part
from assay.harness.text import counted, one_line
from assay.harness.verdict import Decided

KINDS_SHOWN, STEPS_SHOWN = 50, 200
"""Most rows of the summary, and of the table of steps."""
_ONE = {mlc_lines.ADD: ("adds its sequence", "adds one"), mlc_lines.FORK: ("forks its sequence", "forks one")}
_MARKS = {
    "Add Request": "is added",
    "segment begins": "begins a segment",
    "segment ends": "ends a segment",
}
_ANONYMOUS = "(anonymous namespace)::"
_RUNS = {"mlc-llm-actions": "calls", "chrome-trace": "runs"}


class DifferenceKind(Part):
    """Differences that read the same, in one place or in many."""

    where: str = Field(description='track and kind of segment, such as "request 2, decode"')
    a: str = Field(description="what the first trace does, in words")
    b: str = Field(description="what the second one does")
    count: int
    first: str = Field(description="the places of the first of them, in both files")


class StepRow(Part):
    """The number of times that a step occurs in the segments of one kind, and how long it takes in all."""

    phase: str
    name: str
    a: int
    b: int
    a_us: float | None = Field(None, description="microseconds in all; null where the file has no times")
    b_us: float | None = None

    @property
    def ratio(self) -> float | None:
        """Time in the second trace over time in the first; None where one of them has none."""
        return self.b_us / self.a_us if self.a_us and self.b_us is not None else None


class TraceDiff(Decided):
    """Two traces compared. `verdict` is "pass" for equal ones, "regression" for different ones, and otherwise "inconclusive"."""

    a: FileRead
    b: FileRead
    headline: str = Field(description="the first difference, or that there is none, or why they cannot be compared")
    cites: tuple[Excerpt, ...] = Field((), description="the first difference in both files")
    differences: int = 0
    kinds: tuple[DifferenceKind, ...] = ()
    kinds_left_out: int = 0
    steps: tuple[StepRow, ...] = Field((), description="steps that do not occur equally often come first")
    steps_left_out: int = 0
    notes: tuple[str, ...] = ()
    timelines: tuple[Timeline, ...] = ()


class Side(NamedTuple):
    """One of the traces that are compared."""

    trace: Trace
    file: FileRead


class Place(NamedTuple):
    """The place of something, or, if `after`, the last step before the place where something is missing. 0 is unknown."""

    at: int
    after: bool = False

    def text(self, unit: str) -> str:
        """Describe the place, such as "line 12" or "after line 12"; empty if it is unknown."""
        return f"{'after ' if self.after else ''}{unit} {self.at:,}" if self.at else ""


class Difference(NamedTuple):
    """One difference, in words: what each trace does, or None for the one that does not do what the other does."""

    where: str
    subject: str
    left: str | None
    right: str | None
    a: Place
    b: Place


def compare(a: Side, b: Side, timelines: tuple[Timeline, ...] = ()) -> TraceDiff:
    """Compare two traces.

    Args:
        a: the first one.
        b: the second one.
        timelines: of both, for the page.
    """
    verdict: Literal["pass", "regression", "inconclusive"]
    if reason := _refusal(a, b):
        return TraceDiff(verdict="inconclusive", a=a.file, b=b.file, headline=reason, timelines=timelines)
    notes: list[str] = []
    found = list(_differences(a.trace, b.trace, notes))
    unread = [f"{side.file.path}: {side.file.unread:,}" for side in (a, b) if side.file.unread]
    if found:
        verdict, headline = "regression", _sentence(found[0], a.trace.unit)
    elif unread:
        verdict = "inconclusive"
        headline = f"What was read of both is equal, but {a.trace.unit}s were not understood ({'; '.join(unread)})."
    else:
        verdict, headline = "pass", f"Both traces take the same steps: {_size(a.trace)}."
    kinds, left_out = _summary(found, a.trace.unit)
    steps, steps_left_out = _steps(a.trace, b.trace)
    return TraceDiff(
        verdict=verdict, a=a.file, b=b.file, headline=headline, cites=_cites(found), differences=len(found),
        kinds=kinds, kinds_left_out=left_out, steps=steps, steps_left_out=steps_left_out, notes=tuple(notes),
        timelines=timelines,
    )  # fmt: skip


def _refusal(a: Side, b: Side) -> str:
    """Explain why two traces cannot be compared; empty if they can."""
    if a.trace.format != b.trace.format or a.trace.writer != b.trace.writer:
        return (
            f"The traces cannot be compared: one is by {a.trace.writer} ({a.file.title}), the other by {b.trace.writer} "
            f"({b.file.title}); expected two by the same writer."
        )
    for side in (a, b):
        if not any(len(segment.steps) for track in side.trace.tracks for segment in track.segments):
            return f"The traces cannot be compared: {side.file.path} has no request and no pass with a step in it."
    return ""


def _size(trace: Trace) -> str:
    segments = sum(len(track.segments) for track in trace.tracks)
    steps = sum(len(segment.steps) for track in trace.tracks for segment in track.segments)
    return (
        f"{counted(len(trace.tracks), trace.tracks[0].kind)}, {counted(segments, 'segment')}, {counted(steps, 'step')}"
    )


def _differences(a: Trace, b: Trace, notes: list[str]) -> Iterator[Difference]:
    """Yield all differences, in the order of the traces: the setup, then the tracks, matched by their order."""
    runs = _RUNS[a.format]
    if a.setup is not None or b.setup is not None:
        empty = Segment("", "setup", (), ())
        yield from _segment_differences("the engine", a.setup or empty, b.setup or empty, runs, notes)
    for ours, theirs in zip_longest(a.tracks, b.tracks):
        if ours is None or theirs is None:
            only = ours or theirs
            assert only is not None
            first, has = Place(_first(only)), "is there"
            if ours:
                yield Difference("tracks", only.name, has, None, first, Place(0))
            else:
                yield Difference("tracks", only.name, None, has, Place(0), first)
        else:
            yield from _track_differences(ours, theirs, runs, notes)


def _first(track: Track) -> int:
    return track.segments[0].first if track.segments else 0


def _track_differences(a: Track, b: Track, runs: str, notes: list[str]) -> Iterator[Difference]:
    ours, theirs = [_signature(segment) for segment in a.segments], [_signature(segment) for segment in b.segments]
    blocks = align(ours, theirs)
    if blocks is None:
        notes.append(f"The segments of {a.name} differ so much that they were compared by their order alone.")
        blocks = [Block("replace", 0, len(ours), 0, len(theirs))]
    for block in blocks:
        if block.tag == "equal":
            continue
        before = Place(_last(a.segments[: block.a2]), True), Place(_last(b.segments[: block.b2]), True)
        for left, right in zip_longest(a.segments[block.a1 : block.a2], b.segments[block.b1 : block.b2]):
            if left is None or right is None:
                yield _whole_segment(a.name, left, right, *before)
            elif _signature(left) != _signature(right):
                yield from _segment_differences(a.name, left, right, runs, notes)
    if a.output != b.output:
        yield _output_difference(a, b)


def _last(segments: Sequence[Segment]) -> int:
    return segments[-1].last if segments else 0


def _signature(segment: Segment) -> tuple[str, tuple[Step, ...]]:
    return (segment.kind, segment.steps)


def _whole_segment(name: str, left: Segment | None, right: Segment | None, a: Place, b: Place) -> Difference:
    only = left or right
    assert only is not None
    has = f"has one more segment, {_title(only)},"
    where = f"{name}, {only.kind}"
    if left:
        return Difference(where, name, has, None, Place(only.first), b)
    return Difference(where, name, None, has, a, Place(only.first))


def _title(segment: Segment) -> str:
    label = one_line(segment.label, 60) if segment.label else segment.kind
    return f"{label} with {counted(len(segment.steps), 'step')}"


def _segment_differences(name: str, a: Segment, b: Segment, runs: str, notes: list[str]) -> Iterator[Difference]:
    where = f"{name}, {a.kind}"
    blocks = align(a.steps, b.steps)
    if blocks is None:
        first = next(i for i, (one, other) in enumerate(zip_longest(a.steps, b.steps)) if one != other)
        notes.append(f"The steps of {name} ({a.kind}, from {a.first:,} and {b.first:,}) differ too much to align.")
        yield _step_difference(where, name, a, b, (first, first), (first, first), runs)
        return
    if a.kind != b.kind and a.steps == b.steps:
        yield Difference(where, name, f"is in {a.kind}", f"is in {b.kind}", Place(a.first), Place(b.first))
    for block in blocks:
        if block.tag == "equal":
            continue
        for i, j in zip_longest(range(block.a1, block.a2), range(block.b1, block.b2)):
            yield _step_difference(where, name, a, b, (i, block.a2), (j, block.b2), runs)


def _step_difference(
    where: str, name: str, a: Segment, b: Segment, i: tuple[int | None, int], j: tuple[int | None, int], runs: str
) -> Difference:
    """Compare what both do at a step; an index of None stands for nothing, after the step before the second one."""
    (ours, at), (theirs, other) = _step_at(a, *i), _step_at(b, *j)
    if ours is not None and theirs is not None and ours.name in _ONE and theirs.name in _ONE:
        return Difference(where, name, _ONE[ours.name][0], _ONE[theirs.name][1], at, other)
    shorten = ours is None or theirs is None or short_name(ours.name) != short_name(theirs.name)
    return Difference(where, name, _phrase(ours, runs, shorten), _phrase(theirs, runs, shorten), at, other)


def _step_at(segment: Segment, index: int | None, end: int) -> tuple[Step | None, Place]:
    if index is not None and index < len(segment.steps):
        return segment.steps[index], Place(segment.places[index])
    return None, Place(segment.places[end - 1] if 0 < end <= len(segment.steps) else segment.last, True)


def _phrase(step: Step | None, runs: str, shorten: bool) -> str | None:
    if step is None:
        return None
    if step.kind == "mark":
        return _MARKS.get(step.name, f"logs {step.name}")
    if step.kind == "action":
        return f"polls {step.name}"
    if step.name in _ONE:
        return _ONE[step.name][0]
    return f"{runs} {one_line(short_name(step.name) if shorten else step.name, 200)}"


def short_name(name: str) -> str:
    """Strip a kernel's name of its templates' arguments and its parameters: ``flash_fwd_kernel`` of a C++ signature."""
    plain = name.removeprefix("void ").replace(_ANONYMOUS, "")
    return re.split(r"[<(]", plain, maxsplit=1)[0].strip() or name


def _output_difference(a: Track, b: Track) -> Difference:
    ours, theirs = a.output or "", b.output or ""
    if a.output is None or b.output is None:
        says = [None if track.output is None else "has an answer" for track in (a, b)]
        return Difference(f"{a.name}, answer", a.name, says[0], says[1], Place(a.output_at[0]), Place(b.output_at[0]))
    at = next((i for i, (x, y) in enumerate(zip(ours, theirs, strict=False)) if x != y), min(len(ours), len(theirs)))
    lines = ours[:at].count("\n")
    left, right = (f"answers {one_line(text[max(0, at - 20) : at + 40], 70)!r}" for text in (ours, theirs))
    return Difference(
        f"{a.name}, answer", a.name, left, right, Place(a.output_at[0] + lines), Place(b.output_at[0] + lines)
    )


def _sentence(found: Difference, unit: str) -> str:
    """Describe a difference in a sentence, with both places where both are known."""
    left, right = (f" ({place.text(unit)})" if place.at else "" for place in (found.a, found.b))
    if found.left is None:
        sentence = f"{found.subject} {found.right} in the second trace{right} and not in the first{left}."
    elif found.right is None:
        sentence = f"{found.subject} {found.left} in the first trace{left} and not in the second{right}."
    else:
        sentence = f"{found.subject} {found.left}{left} where the other {found.right}{right}."
    return sentence[0].upper() + sentence[1:].replace(", in the", " in the")


def _cites(found: Sequence[Difference]) -> tuple[Excerpt, ...]:
    """List the places of the first difference, with what each trace does there in words."""
    if not found:
        return ()
    says = zip((found[0].a, found[0].b), (found[0].left, found[0].right), ("first", "second"), strict=True)
    return tuple(
        Excerpt(first=place.at, last=place.at, text=f"{which} trace: {words or 'nothing'}")
        for place, words, which in says
        if place.at
    )


def _summary(found: Sequence[Difference], unit: str) -> tuple[tuple[DifferenceKind, ...], int]:
    groups: dict[tuple[str, str | None, str | None], list[Difference]] = defaultdict(list)
    for one in found:
        groups[one.where, one.left, one.right].append(one)
    kinds = tuple(
        DifferenceKind(where=where, a=left or "–", b=right or "–", count=len(ones),
                       first=" and ".join(filter(None, (ones[0].a.text(unit), ones[0].b.text(unit)))))
        for (where, left, right), ones in groups.items()
    )  # fmt: skip
    return kinds[:KINDS_SHOWN], max(0, len(kinds) - KINDS_SHOWN)


def _steps(a: Trace, b: Trace) -> tuple[tuple[StepRow, ...], int]:
    """Count how often each step occurs, by the kind of its segment."""
    (ours, our_us), (theirs, their_us) = totals(a), totals(b)
    keys = sorted(
        ours.keys() | theirs.keys(), key=lambda key: (ours[key] == theirs[key], -max(ours[key], theirs[key]), key)
    )
    rows = tuple(
        StepRow(
            phase=key[0],
            name=one_line(key[1], 300),
            a=ours[key],
            b=theirs[key],
            a_us=our_us.get(key),
            b_us=their_us.get(key),
        )
        for key in keys[:STEPS_SHOWN]
    )
    return rows, max(0, len(keys) - STEPS_SHOWN)


def totals(trace: Trace) -> tuple[Counter[tuple[str, str]], dict[tuple[str, str], float]]:
    """Count each call and action by the kind of its segment, and sum their microseconds where there are times."""
    counts: Counter[tuple[str, str]] = Counter()
    times: dict[tuple[str, str], float] = defaultdict(float)
    repeated: Counter[tuple[str, tuple[Step, ...]]] = Counter()
    for segment in [*filter(None, [trace.setup]), *(one for track in trace.tracks for one in track.segments)]:
        repeated[segment.kind, segment.steps] += 1
        for step, duration in zip(segment.steps, segment.durations, strict=False):
            times[segment.kind, step.name] += duration
    for (kind, steps), number in repeated.items():
        for step in steps:
            if step.kind != "mark":
                counts[kind, step.name] += number
    return counts, dict(times)
