"""Heat maps of errors, for a page: what its script draws, and what is said of each."""

from __future__ import annotations

from collections.abc import Sequence

from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from assay.harness.judge.report import ErrorGrid, excess, out_of_bounds
from assay.harness.text import one_line


def worst_grid(grids: Sequence[ErrorGrid]) -> ErrorGrid | None:
    """The heat map with the worst cell; None if there is none."""
    return max(grids, key=lambda grid: _worst(grid)[0], default=None)


def grid_data(grids: Sequence[ErrorGrid]) -> Markup:
    """Return what layer_diff.js draws, as JSON that is safe within a script element."""
    return htmlsafe_json_dumps([_payload(grid) for grid in grids], separators=(",", ":"))


def grid_says(grid: ErrorGrid) -> str:
    """Return how many of its cells are out of bounds, in words."""
    if all(bound is None for bound in grid.bounds):
        return "no bound"
    count = sum(map(sum, _beyond(grid)))
    return f"{count:,} out of bounds" if count else "within bounds"


def _payload(grid: ErrorGrid) -> dict[str, object]:
    return {
        "title": one_line(f"{grid.title}: {grid.where}"),
        "column": grid.columns,
        "rows": [one_line(label, 40) for label in grid.row_labels],
        "columns": [one_line(label, 40) for label in grid.column_labels],
        "bounds": grid.bounds,
        "values": grid.values,
        "beyond": _beyond(grid),
        "worst": _worst(grid)[1],
    }


def _beyond(grid: ErrorGrid) -> list[list[int]]:
    """Return which cells are out of bounds: 1 or 0, rows x columns."""
    rows = zip(grid.values, grid.bounds, strict=True)
    return [[int(out_of_bounds(error, bound)) for error in row] for row, bound in rows]


def _worst(grid: ErrorGrid) -> tuple[float, tuple[int, int]]:
    """The largest excess, and the row and column of the first cell that has it."""
    rows = enumerate(zip(grid.values, grid.bounds, strict=True))
    cells = ((excess(error, bound), (r, c)) for r, (row, bound) in rows for c, error in enumerate(row))
    return max(cells, key=lambda cell: cell[0], default=(-1.0, (0, 0)))
