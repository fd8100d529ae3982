"""The document of a trace: facts and tables with their places, the rules that it breaks, and its timeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from assay.harness.ingest.result import Document, Excerpt, Fact, FileRead, Table
from assay.harness.ingest.source import Source
from assay.harness.ingest.timeline import (
    MAX_COLUMNS,
    MAX_LANES,
    MAX_TRACKS,
    NOTHING,
    POLLED,
    Lane,
    Timeline,
    TimelineTrack,
    cell,
)
from assay.harness.ingest.trace import mlc_lines
from assay.harness.ingest.trace.model import Segment, Trace, Track
from assay.harness.ingest.trace.shown import ROWS_SHOWN, finding_of, left_out, quote
from assay.harness.text import counted, one_line

_KINDS: dict[str, Literal["extend", "decode"]] = {mlc_lines.PREFILL: "extend", mlc_lines.DECODE: "decode"}


def document(trace: Trace, file: FileRead, source: Source) -> Document:
    """Make the document of what an engine trace states.

    Args:
        trace: as it was read.
        file: how much of it was understood.
        source: the file, from which cited lines are quoted.
    """
    wanted = {place for violation in trace.violations for place in violation.places}
    shown = trace.tracks[:ROWS_SHOWN]
    sequences = {track.name: _sequence(track) for track in shown}
    wanted |= {place for _, place in sequences.values() if place}
    wanted |= {track.output_at[0] for track in shown if track.output is not None}
    texts = _texts(source, wanted)
    return Document(
        file=file,
        facts=_facts(trace, sequences, texts),
        tables=(_requests(trace, sequences), _calls(trace)),
        findings=tuple(finding_of(one, trace, texts) for one in trace.violations),
        timeline=timeline(trace),
    )


def _texts(source: Source, wanted: set[int]) -> dict[int, str]:
    """Read the text of some lines in a second pass over the file."""
    if not wanted:
        return {}
    last = max(wanted)
    found = {}
    for line in source.lines():
        if line.number in wanted:
            found[line.number] = one_line(line.text)
        if line.number >= last:
            break
    return found


def _sequence(track: Track) -> tuple[str, int]:
    """Return how a request got its sequence, and in which line; nothing if it got none or several."""
    found = [
        (step.name, place)
        for segment in track.segments
        for step, place in zip(segment.steps, segment.places, strict=True)
        if step.name in (mlc_lines.ADD, mlc_lines.FORK)
    ]
    return found[0] if len(found) == 1 else ("", 0)


def _marked(track: Track) -> list[Segment]:
    """List the segments that stand between marks: not the prefill before the first of them."""
    return [segment for segment in track.segments if segment.steps and segment.steps[0].name == "segment begins"]


def tokens(track: Track) -> tuple[int, int]:
    """Count the tokens that were sampled for a request: in prefills, and in everything else."""
    sampled = [
        (segment.kind, sum(1 for step in segment.steps if step.name in mlc_lines.SAMPLE)) for segment in track.segments
    ]
    return sum(n for kind, n in sampled if kind == "extend"), sum(n for kind, n in sampled if kind != "extend")


def _facts(trace: Trace, sequences: dict[str, tuple[str, int]], texts: dict[int, str]) -> tuple[Fact, ...]:
    facts = [Fact(id="requests", title="Requests", text=counted(len(trace.tracks), "request"))]
    for track in trace.tracks[:ROWS_SHOWN]:
        marked = _marked(track)
        idle = sum(one.kind == "idle" for one in marked)
        steps = sum(one.kind == "decode" for one in marked)
        ends = ", the last one" if idle == 1 and marked[-1].kind == "idle" else ""
        first, rest = tokens(track)
        slug = track.name.replace(" ", "-")
        facts.append(
            Fact(
                id=f"{slug}-segments",
                title=f"Segments of {track.name}",
                text=f"{counted(len(marked), 'segment')}: {steps:,} with a decode, {idle:,} idle{ends}",
            )
        )
        says = f"{counted(first + rest, 'token')}: {first:,} from the prefill, {rest:,} from decodes"
        facts.append(Fact(id=f"{slug}-tokens", title=f"Tokens of {track.name}", text=says))
        facts += _reuse(track, sequences[track.name], slug, texts)
        if track.output is not None:
            cites = (
                Excerpt(first=track.output_at[0], last=track.output_at[1], text=texts.get(track.output_at[0], "")),
            )
            facts.append(Fact(id=f"{slug}-output", title=f"Answer to {track.name}", text=track.output, cites=cites))
    return tuple(facts)


def _reuse(track: Track, sequence: tuple[str, int], slug: str, texts: dict[int, str]) -> list[Fact]:
    name, place = sequence
    if not name:
        return []
    forks = name == mlc_lines.FORK
    says = (
        "forks a sequence whose prefix is in the KV cache: its prefill runs with a cached prefix"
        if forks
        else "adds a sequence: its prefill runs without a cached prefix"
    )
    cites = quote([place], texts)
    return [Fact(id=f"{slug}-sequence", title=f"Sequence of {track.name}", text=f"{track.name} {says}", cites=cites)]


def _requests(trace: Trace, sequences: dict[str, tuple[str, int]]) -> Table:
    words = {mlc_lines.ADD: "added", mlc_lines.FORK: "forked", "": "not one"}
    rows = []
    for track in trace.tracks[:ROWS_SHOWN]:
        marked = _marked(track)
        rows.append((
            track.name, f"{track.segments[0].first:,} to {track.segments[-1].last:,}" if track.segments else "",
            words[sequences[track.name][0]], f"{len(marked):,}", f"{sum(one.kind == 'decode' for one in marked):,}",
            f"{sum(one.kind == 'idle' for one in marked):,}", f"{sum(tokens(track)):,}",
        ))  # fmt: skip
    return Table(
        id="requests",
        title="Requests",
        columns=("request", "lines", "sequence", "segments", "decodes", "idle", "tokens"),
        rows=tuple(rows),
        note=left_out(len(trace.tracks)),
    )


def _calls(trace: Trace) -> Table:
    from assay.harness.ingest.trace.diff import totals

    counts, _ = totals(trace)
    kinds = [kind for kind in ("setup", "extend", "mixed", "decode", "idle") if any(key[0] == kind for key in counts)]
    names = sorted({name for _, name in counts}, key=lambda name: (-sum(counts[kind, name] for kind in kinds), name))
    rows = tuple(
        (name, *(f"{counts[kind, name]:,}" for kind in kinds), f"{sum(counts[kind, name] for kind in kinds):,}")
        for name in names[:ROWS_SHOWN]
    )
    return Table(
        id="calls",
        title="Actions and calls, by what their segment computes",
        columns=("name", *kinds, "all"),
        rows=rows,
        note=left_out(len(names)),
    )


def timeline(trace: Trace) -> Timeline:
    """Draw an engine trace by request and action, a column for each segment, or for several where there are many."""
    shown = trace.tracks[:MAX_TRACKS]
    longest = max((len(track.segments) for track in shown), default=0)
    per = max(1, -(-longest // MAX_COLUMNS))
    return Timeline(
        axis="segment",
        low=0,
        high=longest,
        tracks=tuple(_lanes(track, per) for track in shown),
        left_out=len(trace.tracks) - len(shown),
    )


def _lanes(track: Track, per: int) -> TimelineTrack:
    groups = [track.segments[at : at + per] for at in range(0, len(track.segments), per)]
    lanes = tuple(
        Lane(name=name, kind=_KINDS.get(name, "other"), cells="".join(_cell(group, name) for group in groups))
        for name in mlc_lines.POLLING_ORDER[:MAX_LANES]
    )
    sequence = {mlc_lines.ADD: "adds its sequence, ", mlc_lines.FORK: "forks its sequence, "}.get(
        _sequence(track)[0], ""
    )
    return TimelineTrack(name=track.name, note=f"{sequence}{counted(sum(tokens(track)), 'token')}", lanes=lanes)


def _cell(group: Sequence[Segment], name: str) -> str:
    """Return a table's cell: what an action does in some segments."""
    polled = computed = 0
    for segment in group:
        for action, _, calls in segment.actions():
            if action == name:
                polled += 1
                computed += any(call in mlc_lines.MODEL_CALLS for call in calls)
    if computed:
        return cell(min(1.0, computed / len(group)))
    return POLLED if polled else NOTHING
