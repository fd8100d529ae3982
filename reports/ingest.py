"""The document of ``assay ingest``: the content of other tools' files."""

from __future__ import annotations

from assay.harness.ingest import result as ingested
from assay.harness.ingest.result import UNKNOWN, CitedFinding, Excerpt, IngestResult
from assay.harness.text import clip, counted, one_line
from assay.reports.document import (
    Block,
    Cell,
    Code,
    Document,
    Drawing,
    Facts,
    Findings,
    Line,
    Section,
    Table,
    Words,
)
from assay.reports.page import TEXT_SHOWN
from assay.reports.trace_timeline import timeline_svg
from assay.reports.wording.comparison import ingest_headline
from assay.reports.wording.written import worded_json

_MOST, _UNREAD = 20, 5  # rows of a table, and places that were not read, outside the page


def ingest_document(result: IngestResult) -> Document:
    """Build the document: all findings first, the commands that prove them, then each file, and the lines not read."""
    steps = "\n".join(one_line(step, 600) for step in result.next_steps)
    proof = Section(
        "To prove the cause", [Code(steps, "A file only suggests; these commands measure")], "next", short="Prove it"
    )
    return Document(
        command="ingest",
        title=one_line(result.documents[0].file.path, 60),
        verdict=result.verdict,
        headline=ingest_headline(result),
        body=[
            _findings(result),
            *([proof] if result.next_steps else []),
            *(_file(number, document) for number, document in enumerate(result.documents, 1)),
            _unread(result),
        ],
        created=result.created,
        foot="Quoted text is from the files, not from assay.",
        result=result,
        json=worded_json,
    )


def _findings(result: IngestResult) -> Section:
    blocks: list[Block] = []
    several = len(result.documents) > 1
    quiet = [
        one_line(document.file.path)
        for document in result.documents
        if not document.findings and document.file.format != UNKNOWN
    ]
    for document in result.documents:
        if several and (document.findings or document.file.format == UNKNOWN):
            blocks.append(Line(one_line(document.file.path, 120), "strong"))
        for finding in document.findings:
            blocks.append(Findings([finding]))
            blocks += _quoted(finding.cites, _cited(finding, document.file.unit), document.file.unit)
        if document.file.format == UNKNOWN and not document.findings:
            blocks.append(Line("Not recognised.", "empty"))
    if quiet:
        blocks.append(Line(f"Nothing was found in {', '.join(quiet)}." if several else "None.", "empty"))
    return Section("Findings", blocks, "findings")


def _file(number: int, document: ingested.FileDocument) -> Section:
    file = document.file
    facts: list[tuple[Words, ...]] = [
        ("format", file.title),
        (f"{file.unit}s read", f"{file.read:,} of {file.lines:,}"),
        ("bytes", f"{file.bytes:,}"),
        *([("SHA-256", Cell(f"{file.sha256[:16]}…", code=True))] if file.sha256 else []),
    ]
    blocks: list[Block] = [Facts(facts), *(Line(note, "quiet") for note in file.notes), *_timeline(document)]
    answers = [fact for fact in document.facts if fact.id.endswith("-output")]
    rows = [
        (fact.title, one_line(fact.text, 300), ", ".join(_place(cite, file.unit) for cite in fact.cites[:3]))
        for fact in document.facts
        if fact not in answers
    ]
    says: list[Block] = [Table(("Fact", "The file says", "Where"), rows, most=_MOST)] if rows else []
    details: list[Block] = [
        Code(clip(fact.text, TEXT_SHOWN), ", ".join([fact.title, *(_place(cite, file.unit) for cite in fact.cites)]))
        for fact in answers
    ]
    says += [*map(_table, document.tables), *([Section("", details, detail=True)] if details else [])]
    blocks += [Section("What the file says", says, folded=True)] if says else []
    name = one_line(file.path.rpartition("/")[2], 40)
    return Section(one_line(file.path, 120), blocks, f"file-{number}", short=name)


def _table(table: ingested.FactTable) -> Table:
    rows = [[one_line(cell) for cell in row] for row in table.rows]
    return Table(table.columns, rows, table.title, table.note, most=_MOST)


def _unread(result: IngestResult) -> Section:
    blocks: list[Block] = []
    for file in (document.file for document in result.documents if document.file.unread):
        first = ", the first of them" if file.excerpts else ""
        blocks.append(Line(f"{one_line(file.path, 120)}: {file.unread:,} of {counted(file.lines, file.unit)}{first}."))
        blocks += _quoted(file.excerpts, "Show them", file.unit)
    return Section("Not read", blocks or [Line("Nothing: everything was read.", "empty")], "unread", detail=not blocks)


def _timeline(document: ingested.FileDocument) -> list[Block]:
    """Draw the timeline of a trace, for a page; other files have none."""
    if document.timeline is None:
        return []
    left = document.timeline.left_out
    more: list[Block] = [Line(f"{left:,} more tracks are not shown.", "quiet")] if left else []
    return [Section("", [Drawing(timeline_svg(document.timeline), "wide"), *more], detail=True)]


def _quoted(excerpts: tuple[Excerpt, ...], summary: str, unit: str) -> list[Block]:
    """Quote lines of a file, folded; return nothing if there are none."""
    rows = [(_place(excerpt, unit), Cell(one_line(excerpt.text, 200), code=True)) for excerpt in excerpts]
    return [Section(summary, [Table(("", ""), rows, most=_UNREAD)], folded=True)] if rows else []


def _cited(finding: CitedFinding, unit: str) -> str:
    """List the places that a finding follows from: "lines 51, 466-483", or an empty string if it cites none."""
    places = [_range(cite) for cite in finding.cites]
    several = len(places) > 1 or "-" in "".join(places)
    return f"{unit}{'s' * several} {', '.join(places)}" if places else ""


def _place(excerpt: Excerpt, unit: str) -> str:
    """Where an excerpt is: "line 5", "lines 5-7"."""
    return f"{unit}{'s' * (excerpt.last > excerpt.first)} {_range(excerpt)}"


def _range(excerpt: Excerpt) -> str:
    return f"{excerpt.first}-{excerpt.last}" if excerpt.last > excerpt.first else str(excerpt.first)
