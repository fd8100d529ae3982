"""What was read of other people's files, as text for a terminal."""

from __future__ import annotations

from rich.console import Console

from assay.harness.ingest.result import CitedFinding, Document, Excerpt, FileRead, IngestResult, Table
from assay.harness.text import counted, one_line
from assay.reports.summary import VERDICTS
from assay.reports.terminal import copy, finding_text, print_rows, say

BRIEF = frozenset(
    {
        "tests",
        "servers",
        "arguments",
        "metrics",
        "benchmarks",
        "kernel-calls",
        "results",
        "scores",
        "figures",
        "numbers",
        "requests",
        "passes",
        "boundaries",
    }
)
"""Tables of facts that a terminal shows; the page has all of them."""
MAX_UNREAD = 5
MAX_FACTS = 10
"""Facts that a terminal shows of a file in which nothing was found."""


def render(result: IngestResult, console: Console) -> None:
    """Print the result: the verdict, the findings, the facts in brief, what was not read, and what to run."""
    mark = VERDICTS[result.verdict]
    say(
        console,
        f"{mark.sign} {mark.word}: {one_line(result.headline, 600)}",
    )
    for document in result.documents:
        say(console, "")
        _document(document, console)
    if result.next_steps:
        say(console, "\nTo prove the cause:")
        for step in result.next_steps:
            copy(console, f"  {one_line(step, 600)}")


def _document(document: Document, console: Console) -> None:
    say(console, file_line(document.file))
    for finding in document.findings:
        say(console, finding_text(finding, console.width))
        if lines := cited(finding, document.file.unit):
            say(console, f"  {lines}")
    for fact in () if document.findings else document.facts[:MAX_FACTS]:
        say(console, f"{fact.title}: {one_line(fact.text)}")
    for table in document.tables:
        if table.id in BRIEF:
            _table(table, console)
    for note in document.file.notes:
        say(console, f"Note: {one_line(note, 600)}")
    for excerpt in document.file.excerpts[:MAX_UNREAD]:
        say(console, f"Not read: {place(excerpt, document.file.unit)}: {one_line(excerpt.text)}")
    more = len(document.file.excerpts) - MAX_UNREAD
    if more > 0:
        say(console, f"Not read: {more} more places; --json and the page list them")


def _table(table: Table, console: Console) -> None:
    title = f"{table.title} ({table.note})" if table.note else table.title
    print_rows(console, title, table.columns, [[one_line(cell) for cell in row] for row in table.rows])


def file_line(file: FileRead) -> str:
    """A file in one line: what it is, and how much of it was understood."""
    share = f"{file.read:,} of {counted(file.lines, file.unit)} read" if file.lines else f"{file.bytes:,} bytes"
    return f"{one_line(file.path)}: {file.title}; {share}"


def cited(finding: CitedFinding, unit: str) -> str:
    """The places that a finding follows from: "lines 51, 466-483"; empty if it cites none."""
    places = [_range(one) for one in finding.cites]
    several = len(places) > 1 or "-" in "".join(places)
    return f"{unit}{'s' * several} {', '.join(places)}" if places else ""


def place(excerpt: Excerpt, unit: str) -> str:
    """Where an excerpt is: "line 5", "lines 5-7"."""
    return f"{unit}{'s' * (excerpt.last > excerpt.first)} {_range(excerpt)}"


def _range(excerpt: Excerpt) -> str:
    return f"{excerpt.first}-{excerpt.last}" if excerpt.last > excerpt.first else str(excerpt.first)
