"""The facts of a profile: its passes by phase, its kernels by name, what does not begin or end, and its timeline."""

from __future__ import annotations

from collections import Counter, defaultdict

from assay.harness.ingest.result import Document, Fact, Table
from assay.harness.ingest.timeline import MAX_COLUMNS, MAX_LANES, MAX_TRACKS, Lane, Timeline, TimelineTrack, cell
from assay.harness.ingest.trace.chrome import MLC, LoadedProfile
from assay.harness.ingest.trace.model import Segment, SegmentKind, Trace, Track
from assay.harness.ingest.trace.shown import ROWS_SHOWN, finding_of, left_out
from assay.harness.text import one_line

_WITHOUT_CATEGORY = {
    "M": "metadata",
    "i": "instant",
    "I": "instant",
    "C": "counter",
    "s": "flow",
    "t": "flow",
    "f": "flow",
}


def document(loaded: LoadedProfile) -> Document:
    """Make the document of what a profile states."""
    trace = loaded.trace
    return Document(
        file=loaded.file,
        facts=_facts(loaded),
        tables=(_kernels(trace), _passes(trace)),
        findings=tuple(finding_of(violation, trace, {}) for violation in trace.violations),
        timeline=timeline(trace),
    )


def _facts(loaded: LoadedProfile) -> tuple[Fact, ...]:
    trace, spans = loaded.trace, loaded.spans
    start, end = spans.bounds()
    what = Counter[str]()
    for (phase, cat), number in spans.kinds.items():
        what[cat or _WITHOUT_CATEGORY.get(phase, "span")] += number
    kinds = Counter(segment.kind for track in trace.tracks for segment in track.segments)
    common = ", ".join(f"{one_line(name, 40)} {number:,}" for name, number in what.most_common(12))
    phases = ", ".join(f"{kind} {number:,}" for kind, number in sorted(kinds.items()))
    facts = [
        Fact(id="writer", title="Written by", text=trace.writer),
        Fact(id="events", title="Events by category", text=common or "none"),
        Fact(id="length", title="From the first event to the last", text=f"{(end - start) / 1e3:,.3f} ms"),
        Fact(
            id="tracks",
            title="Tracks",
            text=", ".join(_name(one, spans.process_names) for one in trace.tracks[:20]) or "none",
        ),
        Fact(id="segments", title="Segments by phase", text=phases or "none"),
    ]
    if trace.writer == MLC:
        sampled = [
            str(sum(step.name == "sampling" for s in t.segments for step in s.steps)) for t in trace.tracks[:40:2]
        ]
        facts.append(Fact(id="tokens", title="Tokens sampled, by request", text=", ".join(sampled)))
    return tuple(facts)


def _name(track: Track, names: dict[str, str]) -> str:
    given = names.get(track.name.removeprefix("device "), "") if track.kind == "device" else ""
    return f"{track.name} ({given})" if given else track.name


def _kernels(trace: Trace) -> Table:
    from assay.harness.ingest.trace.diff import totals

    counts, times = totals(trace)
    keys = sorted(counts, key=lambda key: (-times.get(key, 0.0), key))
    whole = sum(times.values()) or 1.0
    rows = tuple(
        (one_line(name, 300), phase, f"{counts[phase, name]:,}", f"{times.get((phase, name), 0.0) / 1e3:,.3f}",
         f"{100 * times.get((phase, name), 0.0) / whole:.1f}")
        for phase, name in keys[:ROWS_SHOWN]
    )  # fmt: skip
    return Table(
        id="kernels",
        title="What ran, by name and phase",
        columns=("name", "phase", "count", "ms", "% of all"),
        rows=rows,
        note=left_out(len(keys)),
    )


def _passes(trace: Trace) -> Table:
    groups: dict[tuple[str, str, int], list[Segment]] = defaultdict(list)
    for track in trace.tracks:
        for segment in track.segments:
            groups[track.name, segment.kind, len(segment.steps)].append(segment)
    rows = tuple(
        (track, kind, f"{steps:,}", f"{len(ones):,}", one_line(ones[0].label, 80), f"{ones[0].first:,}")
        for (track, kind, steps), ones in list(groups.items())[:ROWS_SHOWN]
    )
    return Table(
        id="passes",
        title="Segments with as many steps",
        columns=("track", "phase", "steps", "segments", "label of the first", "its first event"),
        rows=rows,
        note=left_out(len(groups)),
    )


def timeline(trace: Trace) -> Timeline:
    """Draw a profile by track and phase: how much of each column something ran."""
    tracks = [track for track in trace.tracks if track.segments]
    begins = [time for track in tracks for segment in track.segments for time in segment.times[:1]]
    low = min(begins, default=0.0)
    high = max(
        (t + d for track in tracks for s in track.segments for t, d in zip(s.times, s.durations, strict=True)),
        default=low,
    )
    width = (high - low) / MAX_COLUMNS or 1.0
    return Timeline(
        axis="ms",
        low=0.0,
        high=(high - low) / 1e3,
        tracks=tuple(_track(track, low, width) for track in tracks[:MAX_TRACKS]),
        left_out=max(0, len(tracks) - MAX_TRACKS),
    )


def _track(track: Track, low: float, width: float) -> TimelineTrack:
    busy: dict[SegmentKind, list[float]] = {}
    for segment in track.segments:
        shares = busy.setdefault(segment.kind, [0.0] * MAX_COLUMNS)
        end = low
        # Nested and concurrent spans are counted once: from where the one before it ended.
        for time, duration in sorted(zip(segment.times, segment.durations, strict=True)):
            _fill(shares, max(time, end) - low, time + duration - low, width)
            end = max(end, time + duration)
    steps = sum(len(segment.steps) for segment in track.segments)
    lanes = tuple(
        Lane(name=kind, kind="other" if kind == "setup" else kind, cells="".join(map(cell, shares)))
        for kind, shares in sorted(busy.items())
    )
    return TimelineTrack(
        name=track.name, note=f"{len(track.segments):,} segments, {steps:,} steps", lanes=lanes[:MAX_LANES]
    )


def _fill(shares: list[float], start: float, stop: float, width: float) -> None:
    """Add an interval to the columns that it covers; a cell shows even the shortest span."""
    if stop < start:
        return
    first, last = (min(MAX_COLUMNS - 1, max(0, int(at / width))) for at in (start, stop))
    for column in range(first, last + 1):
        covered = min(stop, (column + 1) * width) - max(start, column * width)
        shares[column] = min(1.0, shares[column] + max(covered / width, 1e-6))
