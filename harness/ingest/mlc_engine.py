"""The reader of MLC-LLM engine traces: what a trace states, and the rules that it breaks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from assay.harness.ingest.mlc_rules import RULES
from assay.harness.ingest.mlc_trace import (
    ADD,
    FORK,
    ID,
    TITLE,
    SegmentKind,
    StepTrace,
    begins_trace,
    read_steps,
    timeline,
)
from assay.harness.ingest.result import CitedFinding, Excerpt, Fact, FactTable, FileDocument, FormatReader
from assay.harness.ingest.source_file import SourceFile
from assay.harness.text import counted, one_line

# Most rows of a table, and most violations of one rule that become findings; the others are counted.
_ROWS_SHOWN, _VIOLATIONS_SHOWN = 100, 5
# Kinds of segments, in the order of the columns.
_KINDS: tuple[SegmentKind, ...] = ("setup", "extend", "mixed", "decode", "idle")
# How a request got its sequence.
_SEQUENCE = {
    ADD: "adds a sequence: its prefill runs without a cached prefix",
    FORK: "forks a sequence whose prefix is in the KV cache: its prefill runs with a cached prefix",
}


def _read(source: SourceFile) -> FileDocument:
    trace = read_steps(source)
    shown = trace.tracks[:_ROWS_SHOWN]
    wanted = {place for violation in trace.violations for place in violation.places}
    wanted |= {place for _, place in (track.sequence for track in shown) if place}
    wanted |= {place for track in shown for place in (track.lines[0].number, track.output_at[0])}
    texts = {number: one_line(text) for number, text in source.lines() if number in wanted} if wanted else {}
    return FileDocument(
        file=trace.file, facts=tuple(_facts(trace, texts)), tables=(_calls(trace),),
        findings=tuple(_findings(trace, texts)), timeline=timeline(trace),
    )  # fmt: skip


def _findings(trace: StepTrace, texts: Mapping[int, str]) -> Iterator[CitedFinding]:
    """Yield a finding of each violation, but of one rule at most `_VIOLATIONS_SHOWN`. `texts` are of lines, by their numbers."""
    counts, seen = Counter(violation.rule for violation in trace.violations), Counter[str]()
    for violation in trace.violations:
        seen[violation.rule] += 1
        if seen[violation.rule] > _VIOLATIONS_SHOWN:
            continue
        total = counts[violation.rule]
        evidence = [f"line {place:,}{f': {texts[place]}' if place in texts else ''}" for place in violation.places]
        cites = [(place, texts.get(place, violation.says)) for place in violation.places if place]
        yield CitedFinding(
            id=violation.rule, title=RULES[violation.rule], severity="warning", where=violation.where,
            diagnosis=f"{violation.says[0].upper()}{violation.says[1:]}.", reproduce="",
            cites=tuple(Excerpt(first=place, last=place, text=text) for place, text in cites),
            evidence=(*evidence, *((f"{total:,} such places in the trace",) if total > 1 else ())),
        )  # fmt: skip


def _facts(trace: StepTrace, texts: dict[int, str]) -> Iterator[Fact]:
    yield Fact(id="requests", title="Requests", text=counted(len(trace.tracks), "request"))
    if not trace.violations:
        yield Fact(id="rules", title="Rules", text="no rule of the engine is broken")
    for track in trace.tracks[:_ROWS_SHOWN]:
        # Not the prefill before the first mark.
        marked = [segment for segment in track.segments if segment.letters.startswith("[")]
        slug, (first, rest) = track.name.replace(" ", "-"), track.tokens
        idle = sum(segment.kind == "idle" for segment in marked)
        steps = sum(segment.kind == "decode" for segment in marked)
        ends = ", the last one" if idle == 1 and marked[-1].kind == "idle" else ""
        says = f"{counted(len(marked), 'segment')}: {steps:,} with a decode, {idle:,} idle{ends}"
        place, last = track.lines[0].number, track.lines[-1].number
        cite = Excerpt(first=place, last=last, text=texts.get(place, ""))
        yield Fact(id=f"{slug}-segments", title=f"Segments of {track.name}", text=says, cites=(cite,))
        says = f"{counted(first + rest, 'token')}: {first:,} from the prefill, {rest:,} from decodes"
        yield Fact(id=f"{slug}-tokens", title=f"Tokens of {track.name}", text=says)
        name, place = track.sequence
        if name:
            cite = Excerpt(first=place, last=place, text=texts.get(place, ""))
            says = f"{track.name} {_SEQUENCE[name]}"
            yield Fact(id=f"{slug}-sequence", title=f"Sequence of {track.name}", text=says, cites=(cite,))
        if track.output is not None:
            at, until = track.output_at
            cite = Excerpt(first=at, last=until, text=texts.get(at, ""))
            yield Fact(id=f"{slug}-output", title=f"Answer to {track.name}", text=track.output, cites=(cite,))


def _calls(trace: StepTrace) -> FactTable:
    segments = [trace.setup, *(segment for track in trace.tracks for segment in track.segments)]
    counts = Counter((segment.kind, line.name) for segment in segments for line in segment.lines if line.kind != "mark")
    kinds = [kind for kind in _KINDS if any(key[0] == kind for key in counts)]
    totals = Counter[str]()
    for (_, name), count in counts.items():
        totals[name] += count
    names = sorted(totals, key=lambda name: (-totals[name], name))
    rows = tuple(
        (name, *(f"{counts[kind, name]:,}" for kind in kinds), f"{totals[name]:,}") for name in names[:_ROWS_SHOWN]
    )
    title, columns = "Actions and calls, by what their segment computes", ("name", *kinds, "all")
    return FactTable(
        id="calls",
        title=title,
        columns=columns,
        rows=rows,
        note=f"{len(names) - _ROWS_SHOWN:,} more are not shown" if len(names) > _ROWS_SHOWN else "",
    )


READER = FormatReader(ID, TITLE, begins_trace, _read, steps=read_steps)
