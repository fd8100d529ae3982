"""The document of ``assay sweep``: its cells, the worst first."""

from __future__ import annotations

from pathlib import Path

from assay.harness.drivers.sweep.spec import LOG, SweepResult, SweptCell
from assay.harness.progress import duration
from assay.harness.text import counted, listed, one_line
from assay.harness.verdict import WORST_FIRST
from assay.reports.document import MORE, Block, CaseResult, Cell, Document, Line, Row, Section, Suite, Table, Words
from assay.reports.summary import NOTHING
from assay.reports.wording.verdict import NOT_RUN, sweep_headline
from assay.reports.wording.written import worded_json

# Rows of a table that a terminal shows.
_MOST = 40
# Cells on the first screen.
_FIRST = 12


def sweep_document(result: SweepResult, page: Path) -> Document:
    """Build the document of every cell, the worst first."""
    body: list[Block] = [Line("Some cells did not run: it was interrupted.", "strong")] if result.interrupted else []
    body.append(Section("Cells", [_cells(result)], "cells"))
    return Document(
        command="sweep",
        title=one_line(Path(result.folder).name, 60),
        verdict=result.verdict,
        headline=sweep_headline(result),
        screen=_screen(result),
        meaning=f"The verdict is that of the worst cell. {counted(len(result.cells), 'cell')} in {duration(result.seconds)}.",
        created=result.created,
        crumbs=[f"in {one_line(result.folder, 120)}"],
        body=body,
        foot=f"{result.schema_id}.",
        suites=[_suite(result)],
        result=result,
        json=worded_json,
        page=str(page),
    )


def _worst_first(result: SweepResult) -> list[SweptCell]:
    order = [*WORST_FIRST, None]
    return sorted(result.cells, key=lambda cell: order.index(cell.verdict))


def _varied(result: SweepResult) -> list[str]:
    """Return the axes with several values, or all axes if none has."""
    return [name for name in result.axes if len({cell.axes[name] for cell in result.cells}) > 1] or list(result.axes)


def _screen(result: SweepResult) -> list[Row]:
    """Return a row for each of the worst cells: its verdict, its place on the axes that vary, and why."""
    varied = _varied(result)
    rows, cells = list[Row](), _worst_first(result)
    for before, cell in zip([None, *cells], cells[:_FIRST], strict=False):
        same = before is not None and before.verdict == cell.verdict
        place = listed([f"{name} {one_line(cell.axes[name], 60)}" for name in varied])
        why = one_line(cell.problem or cell.headline, 120)
        rows.append(Row("" if same else cell.verdict or NOT_RUN, f"{place}: {why}" if why else place))
    rows += [Row("", f"and {counted(len(cells) - _FIRST, 'more cell')}")] if len(cells) > _FIRST else []
    rows += [Row("Interrupted", "not all cells were run")] if result.interrupted else []
    return [*rows, MORE]


def _cells(result: SweepResult) -> Table:
    rows, varied = list[tuple[Words, ...]](), _varied(result)
    for cell in _worst_first(result):
        verdict = Cell(cell.verdict, cell.verdict) if cell.verdict else NOT_RUN
        log = Cell(cell.key, code=True, link=f"cells/{cell.key}/{LOG}") if cell.verdict else cell.key
        axes = [one_line(cell.axes[name], 60) for name in varied]
        took = f"{cell.seconds:,.1f} s" if cell.verdict else NOTHING
        rows.append((verdict, *axes, took, one_line(cell.problem or cell.headline, 200), log))
    return Table(("Verdict", *varied, "Took", "Why", "Cell"), rows, style="runs stacked", most=_MOST)


def _suite(result: SweepResult) -> Suite:
    cases = []
    for cell in result.cells:
        name = " ".join(cell.command)
        message = cell.problem or cell.headline or (cell.verdict or NOT_RUN)
        cases.append(
            CaseResult(
                name,
                f"assay.sweep.{cell.command[0]}",
                cell.verdict or "missing",
                message,
                [f"{name}: {message}"],
                cell.seconds,
            )
        )
    return Suite("sweep", cases, {"command": result.command}, result.created)
