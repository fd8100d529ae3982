"""Compares two traces: the first difference in a sentence with both places, and a summary of all.

What is compared is the structure: which steps a request takes, in which order, and what it answers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import NamedTuple

from assay.harness.files import timestamp
from assay.harness.ingest import mlc_trace
from assay.harness.ingest.comparison import ComparedTraces, Comparison, TraceDifference
from assay.harness.ingest.mlc_trace import Segment, StepTrace, TraceStep, Track
from assay.harness.ingest.result import Excerpt
from assay.harness.text import counted, one_line
from assay.harness.verdict import Verdict

_KINDS_SHOWN = 50
"""Most rows of the summary."""
_ONE = {mlc_trace.ADD: ("adds its sequence", "adds one"), mlc_trace.FORK: ("forks its sequence", "forks one")}
_MARKS = {"Add Request": "is added", "segment begins": "begins a segment", "segment ends": "ends a segment"}
_MOST_COMPARED = 5_000_000
"""Pairs of equal items beyond which two sequences are not aligned: time grows with them."""


class _Difference(NamedTuple):
    """One difference, in words: what each trace does, or None for the one that does not do what the other does, and where."""

    where: str
    subject: str
    left: str | None
    right: str | None
    a: str
    b: str
    places: tuple[int, int]

    @property
    def sentence(self) -> str:
        """It in a sentence, with both places where both are known."""
        a, b = (f" ({place})" if place else "" for place in (self.a, self.b))
        if self.left is None:
            said = f"{self.subject} {self.right} in the second trace{b} and not in the first{a}."
        elif self.right is None:
            said = f"{self.subject} {self.left} in the first trace{a} and not in the second{b}."
        else:
            said = f"{self.subject} {self.left}{a} where the other {self.right}{b}."
        return said[0].upper() + said[1:].replace(", in the", " in the")


_Sides = tuple[Segment, Segment]


def diff_traces(a: StepTrace, b: StepTrace) -> Comparison:
    """Compare two traces, as far as they can be."""
    notes: list[str] = []
    differences = list(_differences(a, b, notes))
    unread = [f"{side.file.path}: {side.file.unread:,}" for side in (a, b) if side.file.unread]
    empty = [side for side in (a, b) if not any(segment.steps for track in side.tracks for segment in track.segments)]
    verdict: Verdict = "inconclusive"
    if empty:
        differences = []
        headline = f"The traces cannot be compared: {empty[0].file.path} has no request with a step in it."
    elif differences:
        verdict, headline = "regression", differences[0].sentence
    elif unread:
        headline = f"What was read of both is equal, but lines were not understood ({'; '.join(unread)})."
    else:
        segments = [segment for track in a.tracks for segment in track.segments]
        counts = {
            "request": len(a.tracks),
            "segment": len(segments),
            "step": sum(len(segment.steps) for segment in segments),
        }
        verdict = "pass"
        headline = f"Both traces take the same steps: {', '.join(counted(n, what) for what, n in counts.items())}."
    kinds = _summary(differences)
    return Comparison(
        verdict=verdict, created=timestamp(), kind="trace", headline=headline, reasons=(headline,), a=a.file, b=b.file,
        notes=tuple(notes),
        trace=ComparedTraces(
            cites=_cites(differences), differences=len(differences), kinds=kinds[:_KINDS_SHOWN],
            kinds_left_out=max(0, len(kinds) - _KINDS_SHOWN), timelines=(a.timeline, b.timeline),
        ),
    )  # fmt: skip


def _differences(a: StepTrace, b: StepTrace, notes: list[str]) -> Iterator[_Difference]:
    """Yield all differences, in the order of the traces: the setup, then the requests, matched by their order."""
    if a.setup is not None or b.setup is not None:
        empty = Segment("setup", (), ())
        yield from _of_segments("the engine", (a.setup or empty, b.setup or empty), notes)
    for ours, theirs in zip_longest(a.tracks, b.tracks):
        if ours is not None and theirs is not None:
            yield from _of_tracks(ours, theirs, notes)
            continue
        only = ours or theirs
        at = only.segments[0].first if only.segments else 0
        yield _only("tracks", only.name, "is there", ours is not None, at, 0)


def _only(where: str, subject: str, has: str, left: bool, at: int, after: int) -> _Difference:
    """Make the difference that one trace alone has: at a line, and where it is missing after one; 0 is unknown."""
    here, there = _place(at), _place(after, "after ")
    if left:
        return _Difference(where, subject, has, None, here, there, (at, after))
    return _Difference(where, subject, None, has, there, here, (after, at))


def _place(at: int, after: str = "") -> str:
    return f"{after}line {at:,}" if at else ""


def _of_tracks(a: Track, b: Track, notes: list[str]) -> Iterator[_Difference]:
    blocks = _aligned(
        [(segment.kind, segment.steps) for segment in a.segments],
        [(segment.kind, segment.steps) for segment in b.segments],
    )
    if blocks is None:
        notes.append(f"The segments of {a.name} differ so much that they were compared by their order alone.")
        blocks = [(0, len(a.segments), 0, len(b.segments))]
    for a1, a2, b1, b2 in blocks:
        for left, right in zip_longest(a.segments[a1:a2], b.segments[b1:b2]):
            if left is not None and right is not None:
                if (left.kind, left.steps) != (right.kind, right.steps):
                    yield from _of_segments(a.name, (left, right), notes)
                continue
            only, beside = (left, b.segments[:b2]) if left else (right, a.segments[:a2])
            has = f"has one more segment, {only.kind} with {counted(len(only.steps), 'step')},"
            after = beside[-1].last if beside else 0
            yield _only(f"{a.name}, {only.kind}", a.name, has, left is not None, only.first, after)
    if a.output != b.output:
        yield _of_answers(a, b)


def _of_segments(name: str, both: _Sides, notes: list[str]) -> Iterator[_Difference]:
    a, b = both
    where = f"{name}, {a.kind}"
    blocks = _aligned(a.steps, b.steps)
    if blocks is None:
        first = next(i for i, (x, y) in enumerate(zip_longest(a.steps, b.steps)) if x != y)
        notes.append(f"The steps of {name} ({a.kind}, from {a.first:,} and {b.first:,}) differ too much to align.")
        blocks = [(first, first + 1, first, first + 1)]
    if a.kind != b.kind and a.steps == b.steps:
        places = _place(a.first), _place(b.first)
        yield _Difference(where, name, f"is in {a.kind}", f"is in {b.kind}", *places, (a.first, b.first))
    for a1, a2, b1, b2 in blocks:
        for i, j in zip_longest(range(a1, a2), range(b1, b2)):
            at, missing = (a2 if i is None else i, b2 if j is None else j), (i is None, j is None)
            yield _of_steps(where, name, both, at, missing)


def _of_steps(where: str, name: str, both: _Sides, at: tuple[int, int], missing: tuple[bool, bool]) -> _Difference:
    """Compare what both do at a step; where it is missing, nothing, after the step before."""
    steps, texts, places = list[TraceStep | None](), list[str](), list[int]()
    for segment, index, lacks in zip(both, at, missing, strict=True):
        lacks = lacks or index >= len(segment.steps)
        places.append(
            segment.places[index] if not lacks
            else segment.places[index - 1] if 0 < index <= len(segment.steps) else segment.last
        )  # fmt: skip
        texts.append(_place(places[-1], "after " if lacks else ""))
        steps.append(None if lacks else segment.steps[index])
    left, right = map(_phrase, steps)
    ours, theirs = steps
    if ours is not None and theirs is not None and ours.name in _ONE and theirs.name in _ONE:
        right = _ONE[theirs.name][1]
    return _Difference(where, name, left, right, texts[0], texts[1], (places[0], places[1]))


def _phrase(step: TraceStep | None) -> str | None:
    if step is None:
        return None
    if step.kind == "mark":
        return _MARKS.get(step.name, f"logs {step.name}")
    if step.kind == "action":
        return f"polls {step.name}"
    return _ONE[step.name][0] if step.name in _ONE else f"calls {one_line(step.name, 200)}"


def _of_answers(a: Track, b: Track) -> _Difference:
    where, lines = f"{a.name}, answer", (a.output_at[0], b.output_at[0])
    if a.output is None or b.output is None:
        says = [None if track.output is None else "has an answer" for track in (a, b)]
    else:
        pairs = enumerate(zip_longest(a.output, b.output))
        at = next(index for index, (x, y) in pairs if x != y)
        lines = (lines[0] + a.output[:at].count("\n"), lines[1] + a.output[:at].count("\n"))
        says = [f"answers {one_line(text[max(0, at - 20) : at + 40], 70)!r}" for text in (a.output, b.output)]
    return _Difference(where, a.name, says[0], says[1], _place(lines[0]), _place(lines[1]), lines)


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


def _cites(differences: Sequence[_Difference]) -> tuple[Excerpt, ...]:
    """List the places of the first difference, with what each trace does there in words."""
    return tuple(
        Excerpt(first=at, last=at, text=f"{which} trace: {words or 'nothing'}")
        for item in differences[:1]
        for at, words, which in zip(item.places, (item.left, item.right), ("first", "second"), strict=True)
        if at
    )


def _summary(differences: Sequence[_Difference]) -> tuple[TraceDifference, ...]:
    groups: dict[tuple[str, str | None, str | None], list[_Difference]] = defaultdict(list)
    for item in differences:
        groups[item.where, item.left, item.right].append(item)
    return tuple(
        TraceDifference(
            where=where, a=left or "–", b=right or "–", count=len(same), first=" and ".join(filter(None, (same[0].a, same[0].b)))
        )
        for (where, left, right), same in groups.items()
    )  # fmt: skip
