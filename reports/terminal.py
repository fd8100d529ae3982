"""What every renderer for a terminal shares: literal lines, a finding, and rows as a table where one fits."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from assay.harness.text import one_line
from assay.harness.verdict import Finding


def say(console: Console, text: str) -> None:
    """Print text as it is: no markup, no highlighting, no wrapping."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def finding_lines(finding: Finding) -> list[str]:
    """A finding and its evidence, without the command that reproduces it."""
    lines = [one_line(f"{finding.severity}: {finding.where}: {finding.diagnosis}", 600)]
    return lines + [f"  - {one_line(line, 400)}" for line in finding.evidence]


def print_rows(console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows as a table on a terminal that is wide enough, otherwise each row as one line that is never wrapped."""
    table = Table(title=one_line(title))
    for column in columns:
        table.add_column(column, no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # a str would be read as markup
    if (
        console.is_terminal
        and Measurement.get(console, console.options.update(width=1_000), table).maximum <= console.width
    ):
        console.print(table)
        return
    say(console, one_line(title))
    for row in rows:
        say(console, "  " + "; ".join(f"{column} {cell}" for column, cell in zip(columns, row, strict=True)))
