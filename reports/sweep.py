"""The document of ``assay sweep``: its cells, the worst first, and where each combination stopped."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from assay.harness.evidence.cell import LOG
from assay.harness.progress import duration
from assay.harness.sweep.result import SweepResult, SweptCell, SweptCombination
from assay.harness.text import counted, one_line
from assay.harness.verdict import WORST_FIRST
from assay.reports.document import Block, CaseResult, Cell, Document, Line, Section, Suite, Table, Words
from assay.reports.summary import NOTHING

_MOST = 40
"""Rows that a terminal shows of a table."""
_NOT_RUN = "not run"


def sweep_document(result: SweepResult, page: Path) -> Document:
    """The combinations with their verdict at each stage, if there is more than one; then every cell, the worst first.

    Args:
        result: the sweep.
        page: where its page is.
    """
    cells = {cell.key: cell for cell in result.cells}
    early = [Line(f"Not all cells were run: {result.ended_early}.", "strong")] if result.ended_early else []
    body: list[Block] = [*early]
    if len(result.stages) > 1:
        body.append(Section("stages", "Where each candidate stopped", [_stages(result, cells)], announced=True))
    body.append(Section("cells", "Cells", [_cells(result)], announced=True))
    if mixed := _environments(result):
        told = Line("Cells ran in different environments: compare them with care.", "strong")
        body.append(Section("environments", "Environments", [told, mixed], announced=True))
    return Document(
        command="sweep",
        title=one_line(Path(result.folder).name, 60),
        verdict=result.verdict,
        headline=result.headline,
        meaning=f"The verdict is that of the worst cell. {counted(len(result.cells), 'cell')} in {duration(result.seconds)}.",
        created=result.created,
        crumbs=[f"in {one_line(result.folder, 120)}"],
        body=body,
        foot=f"{result.schema_id}.",
        suites=[_suite(result)],
        result=result,
        name="assay sweep",
        page=str(page),
    )


def _stages(result: SweepResult, cells: Mapping[str, SweptCell]) -> Table:
    rows = [
        (
            *(one_line(value, 60) for value in combination.axes.values()),
            *_ladder(combination, result, cells),
            _end(combination),
        )
        for combination in result.combinations
    ]
    columns = (*result.axes, *result.stages, "stopped at")
    note = (
        "A combination goes on to the next stage unless it regressed or failed. A dash: it did not come to that stage."
    )
    return Table(columns, rows, note=note, most=_MOST)


def _ladder(combination: SweptCombination, result: SweepResult, cells: Mapping[str, SweptCell]) -> list[Words]:
    reached = [cells.get(combination.cells.get(stage, "")) for stage in result.stages]
    return [Cell(cell.verdict, cell.verdict) if cell and cell.verdict else NOTHING for cell in reached]


def _end(combination: SweptCombination) -> str:
    return combination.stopped or NOTHING


def _cells(result: SweepResult) -> Table:
    order = [*WORST_FIRST, None]
    staged = len({cell.stage for cell in result.cells}) > 1
    rows: list[tuple[Words, ...]] = []
    for cell in sorted(result.cells, key=lambda cell: order.index(cell.verdict)):
        verdict = Cell(cell.verdict, cell.verdict) if cell.verdict else _NOT_RUN
        took = f"{cell.seconds:,.1f} s" if cell.attempts else NOTHING
        again = f" ({cell.attempts} attempts)" if cell.attempts > 1 else ""
        log = Cell(cell.key, code=True, link=f"cells/{cell.key}/{LOG}") if cell.attempts else cell.key
        stage = [cell.stage] if staged else []
        rows.append(
            (
                verdict, *stage, *(one_line(cell.axes.get(name, NOTHING), 60) for name in result.axes), took,
                one_line(cell.problem or cell.headline, 200) + again, log,
            )
        )  # fmt: skip
    columns = ("Verdict", *(["Stage"] if staged else []), *result.axes, "Took", "Why", "Cell")
    return Table(columns, rows, style="runs stacked", most=_MOST)


def _environments(result: SweepResult) -> Table | None:
    """The environments in which the cells ran, if they ran in more than one; None otherwise."""
    by_versions: dict[tuple[tuple[str, str], ...], list[SweptCell]] = {}
    for cell in result.cells:
        if versions := tuple(sorted((name, value) for name, value in cell.environment.items() if name != "commit")):
            by_versions.setdefault(versions, []).append(cell)
    if len(by_versions) < 2:
        return None
    rows = [
        (" ".join(f"{name} {version}" for name, version in versions), str(len(cells)))
        for versions, cells in by_versions.items()
    ]
    return Table(("Versions", "Cells"), rows, numbers=(1,))


def _suite(result: SweepResult) -> Suite:
    cases = []
    for cell in result.cells:
        name = " ".join(cell.command)
        message = cell.problem or cell.headline or (cell.verdict or _NOT_RUN)
        cases.append(
            CaseResult(
                name,
                f"assay.sweep.{cell.stage}",
                cell.verdict or "missing",
                message,
                [f"{name}: {message}"],
                cell.seconds,
            )
        )
    return Suite("sweep", cases, {"command": result.command}, result.created)
