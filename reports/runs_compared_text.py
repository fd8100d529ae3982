"""Runs side by side on the terminal: ``assay compare RUN RUN…``."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from assay.harness.ingest.results.runs_comparison import RunCell, RunRow, RunsComparison
from assay.harness.text import one_line
from assay.reports.summary import VERDICTS, when
from assay.reports.terminal import STYLES, say

FLIPS_SHOWN = 5
ROWS_SHOWN = 12
"""Rows of a group that the terminal shows; the page shows all."""
_TITLE_WIDTH = 30


def render_runs_compared(result: RunsComparison, console: Console) -> None:
    """Print the runs, the rows in which they differ, the flips of each beside A, and what each is beside A."""
    for one in result.runs:
        run = one.run
        mark = VERDICTS[run.verdict or "error"]
        style = STYLES[run.verdict or "error"]
        about = f"{run.candidate} against {run.reference}, {when(run.created)}, {run.folder}"
        say(console, Text.assemble(f"{one.name}  ", (f"{mark.sign} {run.verdict}", style), f"  {one_line(about, 300)}"))
        if run.cause:
            say(console, Text(f"   {one_line(run.cause, 300)}", style="dim"))
    for group in dict.fromkeys(row.group for row in result.changed):
        rows = [row for row in result.changed if row.group == group]
        say(console, "")
        say(console, Text(group[0].upper() + group[1:], style="bold"))
        _rows([one.name for one in result.runs], rows[:ROWS_SHOWN], console)
        if len(rows) > ROWS_SHOWN:
            say(console, f"  … and {len(rows) - ROWS_SHOWN:,} more rows: see --json or --html")
    if equal := len(result.rows) - len(result.changed):
        say(console, f"\n{equal:,} further rows are equal or within noise: see --json or --html")
    for one, pair in zip(result.runs[1:], result.pairs, strict=True):
        for flip in pair.flips[:FLIPS_SHOWN]:
            words = f"{one.name} {flip.direction}: {flip.key[:32]}, expected {flip.target!r}: A {flip.a!r}, {one.name} {flip.b!r}"
            say(console, one_line(words, 300))
        if len(pair.flips) > FLIPS_SHOWN and pair.overall:
            left = pair.overall.lost + pair.overall.gained - FLIPS_SHOWN
            say(console, f"  … and {left:,} more flips: see --json or --html")
    say(console, "")
    for one in result.runs[1:] if len(result.runs) > 2 else ():  # the last line of the command says it of two
        assert one.compared is not None
        say(
            console,
            Text.assemble((f"{VERDICTS[one.compared].sign} ", STYLES[one.compared]), one_line(one.sentence, 700)),
        )
    say(console, f"  {result.covers}")


def cell_text(cell: RunCell) -> str:
    """A cell in words: what is worse than A, or better, says so."""
    return one_line(cell.text, 100) + {True: " (worse)", False: " (better)", None: ""}[cell.worse]


def _rows(names: Sequence[str], rows: Sequence[RunRow], console: Console) -> None:
    """A table on a terminal, where each cell may wrap; elsewhere a line for each row."""
    if not console.is_terminal:
        for row in rows:
            cells = "; ".join(f"{name} {cell_text(cell)}" for name, cell in zip(names, row.cells, strict=True))
            say(console, f"  {one_line(row.title, 120)}: {cells}")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("", max_width=_TITLE_WIDTH, min_width=10)
    for name in names:
        table.add_column(name, ratio=1)
    for row in rows:
        styled = [
            Text(cell_text(cell), style={True: "red", False: "green", None: ""}[cell.worse]) for cell in row.cells
        ]
        table.add_row(Text(one_line(row.title, 120)), *styled)
    console.print(table)
