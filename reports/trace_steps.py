"""The documents of a trace, and of two traces compared."""

from __future__ import annotations

from assay.harness.ingest import result as ingested
from assay.harness.ingest.result import Fact
from assay.harness.ingest.trace.steps import verdict_of
from assay.harness.ingest.trace.trace_diff import StepRow, TraceDiff
from assay.harness.text import clip, counted, one_line
from assay.harness.verdict import Verdict
from assay.reports.document import Block, Cell, Code, Document, Drawing, Facts, Findings, Line, Only, Section, Table
from assay.reports.ingest import file_line, place, table_of, timeline_blocks
from assay.reports.page import TEXT_SHOWN
from assay.reports.trace_timeline import timeline_svg

_WORDS: dict[Verdict, str] = {"pass": "In order", "regression": "Out of order", "inconclusive": "Not all read"}
_DIFF_WORDS: dict[Verdict, str] = {"pass": "Equal", "regression": "Different", "inconclusive": "Not compared"}
_ROWS = 20
"""Most rows of a table on a terminal; the page has the others."""
_STEPS = ("step", "phase", "first", "second", "ms", "ms", "ratio")


def trace_document(trace: ingested.FileDocument) -> Document:
    """Build the document of a trace: what it states, and the rules that it breaks."""
    verdict, file = verdict_of(trace), trace.file
    none = Line("No rule is broken.", "empty")
    body: list[Block] = [Line(f"Note: {note}") for note in file.notes]
    if trace.timeline is not None:
        body.append(Section("timeline", "Timeline", timeline_blocks(trace) or [Line("Nothing ran.", "empty")]))
    body.append(Section("findings", "Findings", [Findings(trace.findings) if trace.findings else none]))
    if file.unread:
        first = Line(f"{file.unread:,} of {counted(file.lines, file.unit)}. The first of them:")
        rows: list[Block] = [
            Line((f"Not read: {place(excerpt, file.unit)}: ", Cell(excerpt.text, code=True)))
            for excerpt in file.excerpts
        ]
        body.append(Section("unread", "Not read", [first, *rows]))
    answers = [fact for fact in trace.facts if fact.id.endswith("-output")]
    facts = [(_named(fact, trace), one_line(fact.text, 700)) for fact in trace.facts if fact not in answers]
    said: list[Block] = [Code(clip(fact.text, TEXT_SHOWN), _named(fact, trace)) for fact in answers]
    short = Facts([(_named(fact, trace), one_line(fact.text)) for fact in answers])
    stated: list[Block] = [Facts(facts, "small"), Only("page", said), Only("terminal", [short])]
    body.append(Section("facts", "What it states", stated))
    for number, table in enumerate(map(table_of, trace.tables), 1):
        shown = Table(table.columns, table.rows, note=table.note, style="kernels", most=_ROWS)
        body.append(Section(f"table-{number}", table.title, [shown], announced=True))
    return Document(
        command="trace show",
        title=one_line(file.path, 60),
        verdict=verdict,
        word=_WORDS[verdict],
        headline=f"{file_line(file)}.",
        crumbs=[file.title],
        body=body,
        result=trace,
    )


def _named(fact: Fact, trace: ingested.FileDocument) -> str:
    return ", ".join([fact.title, *(f"{trace.file.unit} {cite.first:,}" for cite in fact.cites)])


def trace_diff_document(result: TraceDiff) -> Document:
    """The first difference of two traces, a summary of all, and their steps."""
    body: list[Block] = [Facts([("first trace", file_line(result.a)), ("second trace", file_line(result.b))])]
    body += [Line(f"Note: {note}") for note in (*result.a.notes, *result.b.notes, *result.notes)]
    if result.kinds:
        kinds = [(kind.where, kind.a, kind.b, f"{kind.count:,}", kind.first) for kind in result.kinds]
        columns = ("where", "first trace", "second trace", "times", "first at")
        of = len(kinds) + result.kinds_left_out
        about = f"{result.differences:,} differences of {counted(of, 'kind')}, each kind once, in the order of its first place."
        table = Table(columns, kinds, numbers=(3, 4), most=_ROWS)
        body.append(
            Section("differences", "Differences", [Line(about), table, *_left(result.kinds_left_out)], announced=True)
        )
    names = ("First trace", "Second trace")
    drawn = [(name, timeline_svg(timeline)) for name, timeline in zip(names, result.timelines, strict=False)]
    parts = [Section(f"timeline-{name[0]}", name, [Drawing(svg)]) for name, svg in drawn if svg]
    return Document(
        command="trace diff",
        title=f"{one_line(result.a.path, 40)}, {one_line(result.b.path, 40)}",
        verdict=result.verdict,
        word=_DIFF_WORDS[result.verdict],
        headline=result.headline,
        body=[*body, Only("page", parts), *_steps(result)],
        result=result,
    )


def _left(count: int) -> list[Block]:
    return [Only("page", [Line(f"{count:,} more are not shown.", "quiet")])] if count else []


def _steps(result: TraceDiff) -> list[Block]:
    if not result.steps:
        return []
    about = (
        "Steps that do not occur equally often come first. Times are shown and were not compared; the ratio is the second over the "
        "first."
    )
    table = Table(_STEPS, list(map(_step, result.steps)), numbers=range(2, len(_STEPS)), style="kernels", most=_ROWS)
    shown = [Only("page", [Line(about, "quiet")]), table, *_left(result.steps_left_out)]
    return [Section("steps", "Steps by phase", shown, announced=True)]


def _step(row: StepRow) -> tuple[str, ...]:
    times = ("–" if us is None else f"{us / 1e3:,.3f}" for us in (row.a_us, row.b_us))
    return (row.name, row.phase, f"{row.a:,}", f"{row.b:,}", *times, "–" if row.ratio is None else f"{row.ratio:.2f}")
