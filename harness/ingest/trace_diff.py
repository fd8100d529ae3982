"""Compares two traces: the first difference with both places, and a summary of all differences.

The comparison covers structure: which steps a request takes, in which order, and its answer.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from difflib import SequenceMatcher
from functools import cache
from itertools import zip_longest

from assay.harness.files import timestamp
from assay.harness.ingest.comparison import ComparedTraces, Comparison, TraceDifference
from assay.harness.ingest.mlc_trace import Segment, StepTrace, TraceLine, Track, timeline
from assay.harness.statement import Statement, state
from assay.harness.text import one_line
from assay.harness.verdict import Verdict

# Most rows in the summary.
_KINDS_SHOWN = 50
# Most pairs of equal items for which two sequences are aligned, since time grows with their number.
_MOST_COMPARED = 5_000_000


def diff_traces(a: StepTrace, b: StepTrace) -> Comparison:
    """Compare two traces as far as possible."""
    differences = list(_differences(a, b))
    unread = [(side.file.path, side.file.unread) for side in (a, b) if side.file.unread]
    empty = [side for side in (a, b) if not any(segment.steps for track in side.tracks for segment in track.segments)]
    verdict: Verdict = "inconclusive"
    if empty:
        differences = []
        why = state("trace-without-steps", path=empty[0].file.path)
    elif differences:
        verdict, first = "regression", differences[0]
        subject = first.where.partition(",")[0]
        why = state("traces-differ", subject=subject, a=first.a, b=first.b, lines=first.lines)
    elif unread:
        why = state("traces-not-understood", unread=unread)
    else:
        segments = [segment for track in a.tracks for segment in track.segments]
        steps = sum(len(segment.steps) for segment in segments)
        verdict, why = "pass", state("traces-equal", requests=len(a.tracks), segments=len(segments), steps=steps)
    alike: dict[tuple[str, str, str], list[TraceDifference]] = defaultdict(list)
    for each in differences:
        alike[each.where, str(each.a), str(each.b)].append(each)
    kinds = tuple(first.model_copy(update={"count": 1 + len(others)}) for first, *others in alike.values())
    return Comparison(
        verdict=verdict, created=timestamp(), kind="trace", why=(why,), a=a.file, b=b.file,
        trace=ComparedTraces(
            differences=len(differences), kinds=kinds[:_KINDS_SHOWN], kinds_left_out=max(0, len(kinds) - _KINDS_SHOWN),
            timelines=(timeline(a), timeline(b)),
        ),
    )  # fmt: skip


def _differ(where: str, a: Statement | None, b: Statement | None, lines: tuple[int, int]) -> TraceDifference:
    """Make a difference. A side that does nothing there is None, with the line before, or 0 if that is unknown."""
    return TraceDifference(where=where, a=a, b=b, count=1, lines=lines)


def _differences(a: StepTrace, b: StepTrace) -> Iterator[TraceDifference]:
    """Yield all differences in trace order: the setup, then the requests, matched by position."""
    yield from _of_segments("the engine", a.setup, b.setup)
    for ours, theirs in zip_longest(a.tracks, b.tracks):
        if ours is not None and theirs is not None:
            yield from _of_tracks(ours, theirs)
        else:
            only = ours or theirs
            yield _only(only.name, _does("is"), ours is not None, only.segments[0].first if only.segments else 0, 0)


def _only(where: str, has: Statement, left: bool, at: int, after: int) -> TraceDifference:
    """Make a difference that only one trace has, at line `at`; the other lacks it after line `after`."""
    return _differ(where, has, None, (at, after)) if left else _differ(where, None, has, (after, at))


def _of_tracks(a: Track, b: Track) -> Iterator[TraceDifference]:
    ours, theirs = ([(segment.kind, segment.steps) for segment in track.segments] for track in (a, b))
    for a1, a2, b1, b2 in _aligned(ours, theirs):
        for left, right in zip_longest(a.segments[a1:a2], b.segments[b1:b2]):
            if left is not None and right is not None:
                if (left.kind, left.steps) != (right.kind, right.steps):
                    yield from _of_segments(a.name, left, right)
                continue
            only, beside = (left, b.segments[:b2]) if left else (right, a.segments[:a2])
            has = state("one-more-segment", kind=only.kind, steps=len(only.steps))
            yield _only(f"{a.name}, {only.kind}", has, left is not None, only.first, beside[-1].last if beside else 0)
    if a.output != b.output:
        yield _of_answers(a, b)


def _of_segments(name: str, a: Segment, b: Segment) -> Iterator[TraceDifference]:
    where = f"{name}, {a.kind}"
    for a1, a2, b1, b2 in _aligned(a.steps, b.steps):
        for i, j in zip_longest(range(a1, a2), range(b1, b2)):
            (ours, at), (theirs, there) = _step(a, a2, i), _step(b, b2, j)
            if ours is not None and theirs is not None and ours.step == theirs.step:
                continue
            yield _differ(where, _of_line(ours), _of_line(theirs), (at, there))


def _step(segment: Segment, end: int, index: int | None) -> tuple[TraceLine | None, int]:
    """Return a line and its number, or None and the number of the last line before `end` if there is no such line."""
    if index is not None and index < len(segment.lines):
        return segment.lines[index], segment.lines[index].number
    before = (end if index is None else index) - 1
    return None, segment.lines[before].number if 0 <= before < len(segment.lines) else segment.last


def _of_line(line: TraceLine | None) -> Statement | None:
    return None if line is None else _does(line.kind or "call", one_line(line.name, 200))


@cache
def _does(does: str, name: str = "") -> Statement:
    """State a trace's action at a line: its kind and the name of its object."""
    return state("trace-does", does=does, name=name)


def _of_answers(a: Track, b: Track) -> TraceDifference:
    says = [None if track.output is None else _does("has-answer") for track in (a, b)]
    lines = (a.output_at[0], b.output_at[0])
    if a.output is not None and b.output is not None:
        at = next(index for index, (x, y) in enumerate(zip_longest(a.output, b.output)) if x != y)
        lines = (lines[0] + a.output[:at].count("\n"), lines[1] + b.output[:at].count("\n"))
        says = [_does("answers", one_line(text[max(0, at - 20) : at + 40], 70)) for text in (a.output, b.output)]
    return _differ(f"{a.name}, answer", says[0], says[1], lines)


def _aligned(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[tuple[int, int, int, int]]:
    """List the differences between two sequences, as a[a1:a2] in place of b[b1:b2]. Too long sequences differ as a whole."""
    start = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    most = min(len(a), len(b)) - start
    end = next((i for i in range(most) if a[-1 - i] != b[-1 - i]), most)
    ours, theirs = a[start : len(a) - end], b[start : len(b) - end]
    counts = Counter(theirs)
    if sum(counts[item] for item in ours) > _MOST_COMPARED:
        return [(start, len(a) - end, start, len(b) - end)]
    blocks = SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes()
    return [(start + a1, start + a2, start + b1, start + b2) for tag, a1, a2, b1, b2 in blocks if tag != "equal"]
