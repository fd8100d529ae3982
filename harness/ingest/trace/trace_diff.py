"""Compares two traces: the first difference in a sentence with both places, and a summary of all.

What is compared is the structure: which steps a track takes, in which order. Times are shown and never compared: two runs of the
same program differ in them.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from difflib import SequenceMatcher
from itertools import zip_longest
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import Field

from assay.harness.errors import EvidenceError
from assay.harness.ingest.recognise import reader_of
from assay.harness.ingest.result import Excerpt, FileDocument, FileRead, FormatReader, Timeline
from assay.harness.ingest.source_file import SourceFile, two
from assay.harness.ingest.trace import mlc_lines
from assay.harness.ingest.trace.steps import Segment, StepTrace, TraceStep, Track, totals
from assay.harness.reading import reading
from assay.harness.schema import Part
from assay.harness.text import counted, one_line
from assay.harness.verdict import Decided

_KINDS_SHOWN, _STEPS_SHOWN = 50, 200
"""Most rows of the summary, and of the table of steps."""
_ONE = {mlc_lines.ADD: ("adds its sequence", "adds one"), mlc_lines.FORK: ("forks its sequence", "forks one")}
_MARKS = {"Add Request": "is added", "segment begins": "begins a segment", "segment ends": "ends a segment"}
_ANONYMOUS = "(anonymous namespace)::"
_MOST_COMPARED = 5_000_000
"""Pairs of equal items beyond which two sequences are not aligned: time grows with them."""


class _DifferenceKind(Part):
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
    kinds: tuple[_DifferenceKind, ...] = ()
    kinds_left_out: int = 0
    steps: tuple[StepRow, ...] = Field((), description="steps that do not occur equally often come first")
    steps_left_out: int = 0
    notes: tuple[str, ...] = ()
    timelines: tuple[Timeline, ...] = Field((), description="of engines; none of profiles")


class _Difference(NamedTuple):
    """One difference, in words: what each trace does, or None for the one that does not do what the other does, and where."""

    where: str
    subject: str
    left: str | None
    right: str | None
    a: str
    b: str
    places: tuple[int, int]


_Sides = tuple[Segment, Segment]


def document_of(path: Path) -> FileDocument:
    """Make the document of a trace: what it states, and the rules that it breaks.

    Raises:
        UsageError: there is no such file.
        EvidenceError: it is no trace that a reader knows.
    """
    source = SourceFile.of(path)
    with reading(path, "trace"):
        return _reader_of(source).read(source)


def diff_files(a: Path, b: Path) -> TraceDiff:
    """Compare the traces in two files.

    Raises:
        UsageError: one of the files does not exist.
        EvidenceError: one of them is no trace that a reader knows.
    """
    two(a, b, "traces")
    with reading(f"{a} or {b}", "trace"):
        left, right = map(_steps_of, [SourceFile.of(path) for path in (a, b)])
        timelines = tuple(filter(None, (left.timeline, right.timeline)))
        return _Comparison(left, right).result().model_copy(update={"timelines": timelines})


def _steps_of(source: SourceFile) -> StepTrace:
    reader = _reader_of(source)
    assert reader.steps is not None
    return reader.steps(source)


def _reader_of(source: SourceFile) -> FormatReader:
    reader = reader_of(source, "trace")
    if reader is None:
        raise EvidenceError(
            f"{source.path} is no trace that assay knows.",
            "the lines of an MLC-LLM engine, or Chrome trace events in JSON (.json or .json.gz)",
            "give a trace; assay ingest reports what a file is",
        )
    return reader


class _Comparison:
    """Compares two traces."""

    def __init__(self, a: StepTrace, b: StepTrace) -> None:
        self._a, self._b, self._unit = a, b, a.file.unit
        self._runs = "calls" if self._unit == "line" else "runs"
        self._notes: list[str] = []

    def result(self) -> TraceDiff:
        """Compare them, as far as they can be."""
        a, b = self._a, self._b
        if reason := self._refusal():
            return TraceDiff(verdict="inconclusive", a=a.file, b=b.file, headline=reason)
        differences = list(self._differences())
        unread = [f"{side.file.path}: {side.file.unread:,}" for side in (a, b) if side.file.unread]
        verdict: Literal["pass", "regression", "inconclusive"]
        if differences:
            verdict, headline = "regression", _sentence(differences[0])
        elif unread:
            verdict = "inconclusive"
            headline = f"What was read of both is equal, but {self._unit}s were not understood ({'; '.join(unread)})."
        else:
            segments = [segment for track in a.tracks for segment in track.segments]
            tracks, steps = (
                counted(len(a.tracks), a.tracks[0].kind),
                counted(sum(len(segment.steps) for segment in segments), "step"),
            )
            verdict = "pass"
            headline = f"Both traces take the same steps: {tracks}, {counted(len(segments), 'segment')}, {steps}."
        kinds, rows = _summary(differences), _rows(a, b)
        return TraceDiff(
            verdict=verdict, a=a.file, b=b.file, headline=headline, cites=_cites(differences), differences=len(differences),
            kinds=kinds[:_KINDS_SHOWN], kinds_left_out=max(0, len(kinds) - _KINDS_SHOWN), steps=rows[:_STEPS_SHOWN],
            steps_left_out=max(0, len(rows) - _STEPS_SHOWN), notes=tuple(self._notes),
        )  # fmt: skip

    def _refusal(self) -> str:
        """Explain why the traces cannot be compared; empty if they can."""
        a, b = self._a, self._b
        if (a.file.format, a.writer) != (b.file.format, b.writer):
            return (
                f"The traces cannot be compared: one is by {a.writer} ({a.file.title}), the other by {b.writer} "
                f"({b.file.title}); expected two by the same writer."
            )
        for side in (a, b):
            if not any(segment.steps for track in side.tracks for segment in track.segments):
                return f"The traces cannot be compared: {side.file.path} has no request and no pass with a step in it."
        return ""

    def _differences(self) -> Iterator[_Difference]:
        """Yield all differences, in the order of the traces: the setup, then the tracks, matched by their order."""
        a, b = self._a, self._b
        if a.setup is not None or b.setup is not None:
            empty = Segment("", "setup", (), ())
            yield from self._of_segments("the engine", (a.setup or empty, b.setup or empty))
        for ours, theirs in zip_longest(a.tracks, b.tracks):
            if ours is not None and theirs is not None:
                yield from self._of_tracks(ours, theirs)
                continue
            only = ours or theirs
            at = only.segments[0].first if only.segments else 0
            yield self._only("tracks", only.name, "is there", ours is not None, at, 0)

    def _only(self, where: str, subject: str, has: str, left: bool, at: int, after: int) -> _Difference:
        """Make the difference that one trace alone has: at a place, and where it is missing after one; 0 is unknown."""
        here, there = self._place(at), self._place(after, "after ")
        if left:
            return _Difference(where, subject, has, None, here, there, (at, after))
        return _Difference(where, subject, None, has, there, here, (after, at))

    def _place(self, at: int, after: str = "") -> str:
        return f"{after}{self._unit} {at:,}" if at else ""

    def _of_tracks(self, a: Track, b: Track) -> Iterator[_Difference]:
        blocks = _aligned(
            [(segment.kind, segment.steps) for segment in a.segments],
            [(segment.kind, segment.steps) for segment in b.segments],
        )
        if blocks is None:
            self._notes.append(f"The segments of {a.name} differ so much that they were compared by their order alone.")
            blocks = [(0, len(a.segments), 0, len(b.segments))]
        for a1, a2, b1, b2 in blocks:
            for left, right in zip_longest(a.segments[a1:a2], b.segments[b1:b2]):
                if left is not None and right is not None:
                    if (left.kind, left.steps) != (right.kind, right.steps):
                        yield from self._of_segments(a.name, (left, right))
                    continue
                only, beside = (left, b.segments[:b2]) if left else (right, a.segments[:a2])
                label = one_line(only.label, 60) if only.label else only.kind
                has = f"has one more segment, {label} with {counted(len(only.steps), 'step')},"
                after = beside[-1].last if beside else 0
                yield self._only(f"{a.name}, {only.kind}", a.name, has, left is not None, only.first, after)
        if a.output != b.output:
            yield self._of_answers(a, b)

    def _of_segments(self, name: str, both: _Sides) -> Iterator[_Difference]:
        a, b = both
        where = f"{name}, {a.kind}"
        blocks = _aligned(a.steps, b.steps)
        if blocks is None:
            first = next(i for i, (x, y) in enumerate(zip_longest(a.steps, b.steps)) if x != y)
            self._notes.append(
                f"The steps of {name} ({a.kind}, from {a.first:,} and {b.first:,}) differ too much to align."
            )
            blocks = [(first, first + 1, first, first + 1)]
        if a.kind != b.kind and a.steps == b.steps:
            places = self._place(a.first), self._place(b.first)
            yield _Difference(where, name, f"is in {a.kind}", f"is in {b.kind}", *places, (a.first, b.first))
        for a1, a2, b1, b2 in blocks:
            for i, j in zip_longest(range(a1, a2), range(b1, b2)):
                yield self._of_steps(
                    where, name, both, (a2 if i is None else i, b2 if j is None else j), (i is None, j is None)
                )

    def _of_steps(
        self, where: str, name: str, both: _Sides, at: tuple[int, int], missing: tuple[bool, bool]
    ) -> _Difference:
        """Compare what both do at a step; where it is missing, nothing, after the step before."""
        steps, texts, places = list[TraceStep | None](), list[str](), list[int]()
        for segment, index, lacks in zip(both, at, missing, strict=True):
            lacks = lacks or index >= len(segment.steps)
            places.append(
                segment.places[index] if not lacks
                else segment.places[index - 1] if 0 < index <= len(segment.steps) else segment.last
            )  # fmt: skip
            texts.append(self._place(places[-1], "after " if lacks else ""))
            steps.append(None if lacks else segment.steps[index])
        ours, theirs = steps
        shorten = ours is None or theirs is None or _short_name(ours.name) != _short_name(theirs.name)
        left, right = (self._phrase(step, shorten) for step in steps)
        if ours is not None and theirs is not None and ours.name in _ONE and theirs.name in _ONE:
            right = _ONE[theirs.name][1]
        return _Difference(where, name, left, right, texts[0], texts[1], (places[0], places[1]))

    def _phrase(self, step: TraceStep | None, shorten: bool) -> str | None:
        if step is None:
            return None
        if step.kind == "mark":
            return _MARKS.get(step.name, f"logs {step.name}")
        if step.kind == "action":
            return f"polls {step.name}"
        if step.name in _ONE:
            return _ONE[step.name][0]
        return f"{self._runs} {one_line(_short_name(step.name) if shorten else step.name, 200)}"

    def _of_answers(self, a: Track, b: Track) -> _Difference:
        where, lines = f"{a.name}, answer", (a.output_at[0], b.output_at[0])
        if a.output is None or b.output is None:
            says = [None if track.output is None else "has an answer" for track in (a, b)]
        else:
            pairs = enumerate(zip_longest(a.output, b.output))
            at = next(index for index, (x, y) in pairs if x != y)
            lines = (lines[0] + a.output[:at].count("\n"), lines[1] + a.output[:at].count("\n"))
            says = [f"answers {one_line(text[max(0, at - 20) : at + 40], 70)!r}" for text in (a.output, b.output)]
        return _Difference(where, a.name, says[0], says[1], self._place(lines[0]), self._place(lines[1]), lines)


def _aligned(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[tuple[int, int, int, int]] | None:
    """List what differs between two sequences, as a[a1:a2] in place of b[b1:b2]; None if they differ too much to be aligned."""
    start = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    most = min(len(a), len(b)) - start
    end = next((i for i in range(most) if a[-1 - i] != b[-1 - i]), most)
    ours, theirs = a[start : len(a) - end], b[start : len(b) - end]
    counts = Counter(theirs)
    if sum(counts[item] for item in ours) > _MOST_COMPARED:
        return None
    blocks = SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes()
    return [(start + a1, start + a2, start + b1, start + b2) for tag, a1, a2, b1, b2 in blocks if tag != "equal"]


def _short_name(name: str) -> str:
    """Strip a kernel's name of its templates' arguments and its parameters: ``flash_fwd_kernel`` of a C++ signature."""
    plain = name.removeprefix("void ").replace(_ANONYMOUS, "")
    return re.split(r"[<(]", plain, maxsplit=1)[0].strip() or name


def _sentence(difference: _Difference) -> str:
    """Describe a difference in a sentence, with both places where both are known."""
    left, right = (f" ({place})" if place else "" for place in (difference.a, difference.b))
    if difference.left is None:
        sentence = f"{difference.subject} {difference.right} in the second trace{right} and not in the first{left}."
    elif difference.right is None:
        sentence = f"{difference.subject} {difference.left} in the first trace{left} and not in the second{right}."
    else:
        sentence = f"{difference.subject} {difference.left}{left} where the other {difference.right}{right}."
    return sentence[0].upper() + sentence[1:].replace(", in the", " in the")


def _cites(differences: Sequence[_Difference]) -> tuple[Excerpt, ...]:
    """List the places of the first difference, with what each trace does there in words."""
    says = [(item.places, (item.left, item.right)) for item in differences[:1]]
    return tuple(
        Excerpt(first=at, last=at, text=f"{which} trace: {words or 'nothing'}")
        for places, both in says
        for at, words, which in zip(places, both, ("first", "second"), strict=True)
        if at
    )


def _summary(differences: Sequence[_Difference]) -> tuple[_DifferenceKind, ...]:
    groups: dict[tuple[str, str | None, str | None], list[_Difference]] = defaultdict(list)
    for item in differences:
        groups[item.where, item.left, item.right].append(item)
    return tuple(
        _DifferenceKind(
            where=where, a=left or "–", b=right or "–", count=len(same), first=" and ".join(filter(None, (same[0].a, same[0].b)))
        )
        for (where, left, right), same in groups.items()
    )  # fmt: skip


def _rows(a: StepTrace, b: StepTrace) -> tuple[StepRow, ...]:
    """Count how often each step occurs, by the kind of its segment."""
    (ours, our_us), (theirs, their_us) = totals(a), totals(b)
    keys = sorted(
        ours.keys() | theirs.keys(), key=lambda key: (ours[key] == theirs[key], -max(ours[key], theirs[key]), key)
    )
    return tuple(
        StepRow(
            phase=key[0], name=one_line(key[1], 300), a=ours[key], b=theirs[key], a_us=our_us.get(key), b_us=their_us.get(key)
        )
        for key in keys
    )  # fmt: skip
