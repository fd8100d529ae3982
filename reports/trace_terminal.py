"""A trace, and two traces compared, on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from assay.harness.ingest.result import Document
from assay.harness.ingest.trace.diff import StepRow, TraceDiff
from assay.harness.text import one_line
from assay.reports.ingest import file_line, place
from assay.reports.terminal import finding_lines, print_rows, say

CELL_WIDTH = 60
"""Most characters of a cell on a terminal."""
TABLE_ROWS = 20
"""Most rows of a table on a terminal; the page has the others."""


def render_trace(document: Document, console: Console) -> None:
    """Print what a trace states."""
    say(console, file_line(document.file))
    for note in document.file.notes:
        say(console, f"Note: {note}")
    for excerpt in document.file.excerpts:
        say(console, f"Not read: {place(excerpt, document.file.unit)}: {excerpt.text}")
    for fact in document.facts:
        say(console, f"{fact.title}: {one_line(fact.text)}")
    for table in document.tables:
        print_rows(console, table.title, table.columns, [_clipped(row) for row in table.rows[:TABLE_ROWS]])
    for finding in document.findings:
        for line in finding_lines(finding):
            say(console, line)
    if not document.findings:
        say(console, "No rule of the state machine is broken.")


def render_diff(result: TraceDiff, console: Console) -> None:
    """Print the first difference of two traces, and a summary of all."""
    say(console, result.headline)
    for file in (result.a, result.b):
        say(console, file_line(file))
    for note in (*result.a.notes, *result.b.notes, *result.notes):
        say(console, f"Note: {note}")
    if result.kinds:
        rows = [(kind.where, kind.a, kind.b, f"{kind.count:,}", kind.first) for kind in result.kinds[:TABLE_ROWS]]
        say(console, f"{result.differences:,} differences, of {len(result.kinds) + result.kinds_left_out:,} kinds:")
        print_rows(console, "Differences", ("where", "first trace", "second trace", "times", "first at"), rows)
    changed = [step_cells(row) for row in result.steps if row.a != row.b or row.ratio is not None]
    if changed:
        timed = any(row.a_us is not None or row.b_us is not None for row in result.steps)
        width = len(STEP_COLUMNS) if timed else STEP_COLUMNS.index("ms")
        print_rows(console, "Steps", STEP_COLUMNS[:width], [_clipped(row)[:width] for row in changed[:TABLE_ROWS]])


STEP_COLUMNS = ("step", "phase", "first", "second", "ms", "ms", "ratio")


def _clipped(row: Sequence[str]) -> tuple[str, ...]:
    """A row whose cells are short enough for a terminal: a kernel's name may have hundreds of characters."""
    return tuple(one_line(cell, CELL_WIDTH) for cell in row)


def step_cells(row: StepRow) -> tuple[str, ...]:
    """A row of the table of steps."""
    times = ("–" if us is None else f"{us / 1e3:,.3f}" for us in (row.a_us, row.b_us))
    return (row.name, row.phase, f"{row.a:,}", f"{row.b:,}", *times, "–" if row.ratio is None else f"{row.ratio:.2f}")
